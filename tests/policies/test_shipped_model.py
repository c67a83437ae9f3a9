"""The ranker that the package ships, and the measured transitions that it was trained on."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from mtmc_lsp.core.learning.transitions import Outcome, Program
from mtmc_lsp.explore.parquet import read_programs, read_transitions
from mtmc_lsp.policies.model_file import MAX_FILE_BYTES, read_model, shipped_model
from mtmc_lsp.programs.fingerprints import is_forbidden
from mtmc_lsp.programs.splits import Split, split_of
from mtmc_lsp.training.ranker import programs_of
from mtmc_lsp.training.tree import MeasuredTree

DATA = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-transitions"


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return read_programs(DATA)


def test_the_shipped_model_fits_this_version_and_names_its_data(programs: list[Program]) -> None:
    path = shipped_model()
    assert path is not None and path.stat().st_size < MAX_FILE_BYTES
    header = read_model(path).header
    assert header.device == "NVIDIA H200"
    assert header.stop_margin >= 0.0
    trained = programs_of(MeasuredTree.of(programs, [], []), split_of, Split.TRAIN)
    assert header.counts["programs"] == len(trained)


def test_no_program_that_policies_are_evaluated_on_is_in_the_data(programs: list[Program]) -> None:
    assert [program.name for program in programs if is_forbidden(program.capture)] == []
    assert {program.origin for program in programs} == {"generated"}


def test_no_family_is_in_two_parts(programs: list[Program]) -> None:
    parts: dict[str, set[Split]] = defaultdict(set)
    for program in programs:
        parts[program.family].add(split_of(program))
    assert {len(each) for each in parts.values()} == {1}
    assert {split for each in parts.values() for split in each} == set(Split)


def test_the_data_has_as_many_timed_transitions_as_the_documents_say(programs: list[Program]) -> None:
    transitions = read_transitions(DATA)
    assert len(programs) == 579
    assert len(transitions) == 16_855
    assert sum(item.ratio is not None for item in transitions) == 16_478
    assert {item.device for item in transitions} <= {"NVIDIA H200", ""}
    assert sum(item.outcome is Outcome.FASTER for item in transitions) == 5_130
