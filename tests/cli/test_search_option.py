"""``--search beam`` and ``--search mcts`` as a user sees them, on a machine without a GPU."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from runner import MODEL, mtmc, project
from test_optimize import started, wait_for

from mtmc_lsp.source.compose import strip_generated

GOOD = MODEL[: MODEL.index("def no_workload")]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("kind", ["beam", "mcts"])
def test_a_search_with_branches_ends_and_its_report_shows_the_tree(kind: str, tmp_path: Path) -> None:
    project(tmp_path, GOOD)
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--search", kind, "--arch", "sm_90", "-v", **NO_GPU)
    assert answer.code == 0, answer.out + answer.err
    shown = " ".join(answer.out.split())
    assert "The search ended: every branch ended" in shown or "steps led to no faster version" in shown
    assert "versions were ranked by predicted time, since nothing is timed without a GPU" in shown
    assert "Search tree your code" in shown
    page = tmp_path / "run.html"
    assert mtmc(tmp_path, "report", "--html", str(page), **NO_GPU).code == 0
    assert '<ul class="tree"><li class="accepted"><span class="node">your code</span>' in page.read_text()
    document = mtmc(tmp_path, "report", "--json", **NO_GPU).document
    accepted = [step for step in document["steps"] if step["status"] == "accepted"]
    bases = [step["candidate"]["id"] for step in accepted]
    assert [step["base"] for step in accepted[1:]] == bases[:-1]
    assert document["final"]["source"] == accepted[-1]["candidate"]["source"]


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_search_that_it_began_with(tmp_path: Path) -> None:
    file = project(tmp_path, GOOD)
    process = started(tmp_path, "optimize", "model.py::two", "--search", "beam", "--arch", "sm_90", "--no-diff")
    try:
        wait_for(process, "✓ Step 1")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    edited = f"# a new first line\n{GOOD}"
    file.write_text(edited)
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--resume", "--search", "mcts", "--json", **NO_GPU)
    assert (answer.code, answer.error["code"]) == (2, "request")
    assert answer.error["message"].endswith("began with --search beam")
    assert answer.error["remedy"] == "Resume it without --search, or start a new run with --search mcts."
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--resume", "--arch", "sm_90", "-v", "--apply", **NO_GPU)
    assert answer.code == 0, answer.out + answer.err
    assert "accepted before" in answer.out and "Search tree" in answer.out
    assert answer.out.count("✓ Step 1 ") == 1
    assert "@triton.jit" in file.read_text()
    assert strip_generated(file.read_bytes(), "two") == edited.encode()


def test_the_search_may_be_a_setting_of_the_project(tmp_path: Path) -> None:
    project(tmp_path, GOOD)
    (tmp_path / "pyproject.toml").write_text('[tool.mtmc]\nsearch = "bfs"\n')
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--json", **NO_GPU)
    assert (answer.code, answer.error["code"]) == (2, "request")
    assert answer.error["message"] == "search in [tool.mtmc]: 'bfs' is not one of greedy, beam, mcts"
