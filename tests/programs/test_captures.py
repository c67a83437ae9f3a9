"""Generated programs are captured and planned, are no benchmark's, and share no graph between splits."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.programs.capturing import CapturedProblem, capture_problems
from mtmc_lsp.programs.corpus import generated_programs, write_programs
from mtmc_lsp.programs.fingerprints import fingerprint, is_forbidden, leaks
from mtmc_lsp.programs.generator import family_names, generate
from mtmc_lsp.programs.splits import Split, split_of_family

SECONDS = 1500
"""For the captures of one program per family on a slow machine."""


@dataclass(frozen=True)
class Captured:
    family: str
    result: CapturedProblem


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Captured]:
    """One program of each family."""
    folder = tmp_path_factory.mktemp("programs") / "out"
    write_programs(generate(len(family_names()), 11), folder)
    files = {item.problem.path: item for item in generated_programs(folder)}
    results = capture_problems([item.problem for item in files.values()], sys.executable)
    return {item.problem.name: Captured(files[item.problem.path].family, item) for item in results}


@pytest.mark.timeout(SECONDS)
def test_every_family_is_captured_as_a_whole(by_name: Mapping[str, Captured]) -> None:
    assert {item.family for item in by_name.values()} == set(family_names())
    assert {name: item.result.error for name, item in by_name.items() if item.result.error} == {}


@pytest.mark.timeout(SECONDS)
def test_the_planner_has_an_action_for_nine_of_ten_programs(by_name: Mapping[str, Captured]) -> None:
    without = [name for name, item in by_name.items() if not item.result.actions]
    assert len(without) <= 0.1 * len(by_name), without


@pytest.mark.timeout(SECONDS)
def test_graphs_differ(by_name: Mapping[str, Captured]) -> None:
    hashes = {fingerprint(item.result.captures[0].graph) for item in by_name.values()}
    assert len(hashes) >= 0.95 * len(by_name)


@pytest.mark.timeout(SECONDS)
def test_no_program_has_the_graph_of_a_benchmark(by_name: Mapping[str, Captured]) -> None:
    assert [name for name, item in by_name.items() if any(map(is_forbidden, item.result.captures))] == []


@pytest.mark.timeout(SECONDS)
def test_no_graph_is_in_training_and_held_out(by_name: Mapping[str, Captured]) -> None:
    training, held_out = [], []
    for item in by_name.values():
        (training if split_of_family(item.family) is Split.TRAIN else held_out).extend(item.result.captures)
    assert training
    assert held_out
    assert leaks(training, held_out) == []


def test_a_program_that_cannot_be_captured_tells_why_and_the_next_one_is_captured(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
    directive = "# mtmc: x=f32[6,8]\ndef f(x):\n    "
    (tmp_path / "a.py").write_text(f"{directive}raise ValueError('no such mode')\n")
    (tmp_path / "b.py").write_text(f"{directive}return (x * 2.0).exp() - 1.0\n")
    first, second = capture_problems(find_problems(tmp_path), sys.executable)
    assert "no such mode" in first.error
    assert first.captures == ()
    assert second.error == ""
    assert len(second.captures) == 1
