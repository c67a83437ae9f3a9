"""The adversarial candidates are what they claim to be, and their outcomes are counted as documented."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.adversarial_second import run
from benchmarks.adversarial_second.cases import Case, all_cases
from benchmarks.adversarial_second.run import as_expected, outcome, summary

ROOT = Path(__file__).resolve().parents[2]


def test_each_candidate_has_a_name_of_its_own_and_is_python() -> None:
    cases = all_cases()
    assert len({(case.kind, case.name) for case in cases}) == len(cases) > 250
    for case in cases:
        ast.parse(case.text())


def test_an_edit_that_does_not_match_once_names_its_candidate() -> None:
    case = Case("sizes", "lost edit", "softmax", (("no such text", ""),), None)
    with pytest.raises(ValueError, match=r"sizes/lost edit: 0 matches of .no such text. in softmax\.py"):
        case.text()


def test_a_fake_that_is_labelled_counts_as_caught_and_a_wrong_one_does_not() -> None:
    record = {"class": "fakes", "status": "correct", "label": "mixed"}
    assert outcome(record) == "labelled"
    assert as_expected({**record, "expected": "caught"})
    assert not as_expected({**record, "expected": "refused"})
    assert not as_expected({**record, "expected": "certified"})


def test_a_crash_of_the_tool_is_not_a_refusal() -> None:
    record = {"class": "sizes", "status": "no verdict", "label": "", "expected": "refused"}
    assert not as_expected(record)
    assert summary([record]).splitlines()[1].split() == ["sizes", "1", "0", "0", "0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in all_cases()))
def test_every_wrong_candidate_is_wrong_outside_of_the_verifier(kind: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.adversarial_second.check", "--class", kind]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_a_run_that_was_interrupted_goes_on_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, verified = tmp_path / "results.jsonl", list[str]()
    cases = all_cases()[:6]

    def verify(case: Case, limit: float) -> dict[str, object]:
        if len(verified) == 2:
            raise KeyboardInterrupt
        verified.append(case.name)
        return {"class": case.kind, "name": case.name, "expected": "refused", "status": "incorrect", "label": ""}

    monkeypatch.setattr(run, "all_cases", lambda: cases)
    monkeypatch.setattr(run, "verify", verify)
    monkeypatch.setattr(sys, "argv", ["run", "--order", "3", "--out", str(out)])
    monkeypatch.setenv("MTMC_COMMIT", "abc")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run.main()
        verified.clear()
    names = [json.loads(line)["name"] for line in out.read_text().splitlines()]
    assert run.main() == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(names) == 4 and [line["name"] for line in lines[:4]] == names
    assert {line["name"] for line in lines} == {case.name for case in cases}
    assert {line["commit"] for line in lines} == {"abc"}
