import ast
import collections
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.adversarial.run import right, suite, summary

ROOT = Path(__file__).resolve().parents[2]


def test_the_suite_has_as_many_candidates_of_each_kind_as_the_documentation_says():
    kinds = collections.Counter(candidate.kind for candidate in suite())
    assert kinds["honest"] >= 80 and kinds["probing"] >= 30 and kinds["faking"] >= 20
    assert sum(kinds.values()) - kinds["honest"] - kinds["probing"] - kinds["faking"] >= 120


def test_each_candidate_has_a_name_and_a_text_of_its_own():
    candidates = suite()
    assert len({candidate.name for candidate in candidates}) == len(candidates)
    assert len({(candidate.text, candidate.before, candidate.args) for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        defined = [getattr(node, "name", "") for node in ast.parse(candidate.text).body]
        assert candidate.target in defined, candidate.name


def test_a_candidate_without_a_verdict_never_counts_as_judged_rightly():
    honest = {"class": "honest", "label": "", "status": "correct"}
    wrong = {"class": "state", "label": "", "status": "correct at reduced sizes"}
    assert (
        right(honest) and not right({**honest, "status": "incorrect"}) and not right({**honest, "status": "no answer"})
    )
    assert not right(wrong) and right({**wrong, "status": "incorrect"}) and not right({**wrong, "status": "no verdict"})
    assert "| state | 2 | 1 | 1 |" in summary([wrong, {**wrong, "status": "incorrect"}])


def _check(*arguments: str) -> None:
    command = [sys.executable, "-m", "benchmarks.adversarial.run", "--check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_sample_of_the_wrong_candidates_differs_from_its_reference_in_use():
    _check("--every", "19")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_wrong_candidate_differs_from_its_reference_in_use_and_every_honest_one_agrees():
    _check()
