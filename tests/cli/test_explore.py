"""``mtmc explore``: two small programs from their files to Parquet, and what bad input is answered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from runner import mtmc

from mtmc_lsp.explore.parquet import read_programs, read_transitions, read_versions

PROGRAMS = {
    "activation/a1": "# mtmc: x=f32[N,64] N=48\ndef gated(x):\n    return torch.relu(x) * torch.sigmoid(x)\n",
    "norm/n1": "# mtmc: x=f32[N,64] N=48\ndef scaled(x):\n    return x / (1 + x.abs().mean(-1, keepdim=True))\n",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\nname = 'mtmc-programs'\nversion = '0'\n")
    for name, text in PROGRAMS.items():
        (folder / name).parent.mkdir()
        (folder / f"{name}.py").write_text(f"import torch\n\n\n{text}")
    return folder


@pytest.mark.slow
def test_two_programs_are_explored_stored_shown_and_not_measured_again(suite: Path) -> None:
    arguments = ("explore", str(suite), "--out", "out", "--width", "3", "--depth", "2", "--seconds", "120")
    done = mtmc(suite, *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.err
    assert "[2/2]" in done.err
    out = suite / "out"
    programs, versions, transitions = read_programs(out), read_versions(out), read_transitions(out)
    assert {item.family for item in programs} == {"activation", "norm"}
    assert {item.source.splitlines()[3] for item in programs} == {text.splitlines()[0] for text in PROGRAMS.values()}
    first = [t for t in transitions if t.rank == 0]
    assert first
    assert {t.outcome.value for t in first} == {"correct"}
    assert {t.chosen_by for t in transitions} <= {"roofline", "runner-up", "random"}
    assert all(t.seconds > 0 and t.environment.startswith("torch ") for t in transitions)
    assert {t.version for t in transitions} <= {version.id for version in versions}
    assert all(version.predicted_us for version in versions)
    assert f"2 programs, {len(versions)} versions, {len(transitions)} transitions (0 timed)" in done.out
    assert "families: activation 1, norm 1" in done.out

    again = mtmc(suite, *arguments, CUDA_VISIBLE_DEVICES="")
    assert again.code == 0, again.err
    after = read_transitions(out)
    assert {(t.version, t.key): t for t in after}.items() >= {(t.version, t.key): t for t in transitions}.items()
    assert max(Counter((t.version, t.key) for t in after).values()) == 1
    shown = mtmc(suite, "explore", "--show", "out", "--json").document["summary"]
    assert shown["total"]["outcomes"] == dict(
        dict.fromkeys(shown["total"]["outcomes"], 0), **Counter(t.outcome.value for t in after)
    )
    assert shown["families"] == {"activation": 1, "norm": 1}


def test_what_is_missing_or_wrong_is_named(suite: Path) -> None:
    (suite / "empty").mkdir()
    (suite / "empty" / "helper.py").write_text("x = 1\n")
    cases = {
        ("explore",): "SUITE or --out is missing\n  Write mtmc explore SUITE --out DIR.",
        ("explore", str(suite)): "SUITE or --out is missing",
        ("explore", "--show", "out", "--out", "out"): "--show only summarises a folder",
        ("explore", "--show", "missing"): "missing: no such folder\n  Name a folder of `mtmc explore --out`.",
        ("explore", "--show", "empty"): "empty: this folder holds no transitions",
        ("explore", "no-such-suite", "--out", "out"): "there is no suite no-such-suite",
        ("explore", "empty", "--out", "out"): "empty: no problem in this folder",
        ("explore", "empty/helper.py", "--out", "out"): "empty/helper.py: no problem in this file",
        ("explore", ".", "--out", "out", "--filter", "nothing"): "no program is left\n  Change --filter.",
        ("explore", ".", "--out", "out", "--half", "looking"): "--half is for suites of installed packages",
        ("explore", ".", "--out", "empty"): "empty: holds files of something else",
    }
    for arguments, message in cases.items():
        answer = mtmc(suite, *arguments)
        assert answer.code == 2, (arguments, answer)
        assert message in answer.err, (arguments, answer.err)
        assert len(answer.err.strip().splitlines()) <= 2, answer.err
