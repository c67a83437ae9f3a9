"""What the terminal shows in seven situations, as files in ``tests/cli/transcripts``.

``MTMC_WRITE_TRANSCRIPTS=1 pytest tests/cli/test_transcripts.py`` writes the files again; review and commit the diff.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runner import Answer, mtmc, project

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.regions.capture import workload_of
from mtmc_lsp.cli import app
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.protocols import Coder, Planner
from mtmc_lsp.core.workload import Capture
from tests.search.fakes import ENVIRONMENT, FakeCoder, FakeMeasurer, FakePlanner, action, capture
from tests.verify.pairs import HONEST, REFERENCE

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from landscapes import Landscape, LandscapeCoder, LandscapePlanner

TRANSCRIPTS = Path(__file__).parent / "transcripts"
WIDTH = 100
STEP_LINES, LAST_LINES = 4, 12
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(WIDTH)}
MLP = """\
import torch


# mtmc: x=f32[4096,1024]
def f(x):
    return torch.relu(x) * 2


# mtmc: x=f32[4096,n_columns]
def no_size(x):
    return x + 1


# mtmc: x=f32[64,64]
def branches(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


# mtmc: x=f32[64,64]
def scores(x):
    return torch.softmax(torch.relu(x) * 2, -1)
"""
TITLES = ("Fuse relu and mul into one kernel", "Tune the kernel of out", "Run two kernels in one launch")


def steady(text: str) -> str:
    """The text without what differs from run to run: ids, seconds, errors and seeds."""
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{10}\b", "0123456789", text)
    text = re.sub(r"\b\d+ s\b", "N s", text)
    text = re.sub(r"\d\.\d+e[+-]\d+", "1.0e-07", text)
    return re.sub(r"\(\d+ checks\)|all \d+ checks", lambda match: re.sub(r"\d+", "100", match.group()), text)


def check(name: str, command: str, shown: str) -> None:
    """Compare what was shown with the transcript, and its lines with the width of the terminal."""
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    starts = [number for number, line in enumerate(lines) if re.match(r". Step \d", line)]
    end = lines.index("") if starts else 0
    for begin, after in itertools.pairwise([*starts, end] if starts else []):
        assert after - begin <= STEP_LINES, lines[begin:after]
    assert len(lines) - end <= LAST_LINES
    text = f"$ {command}\n{steady(shown)}"
    file = TRANSCRIPTS / f"{name}.txt"
    if os.environ.get("MTMC_WRITE_TRANSCRIPTS"):
        file.write_text(text)
    assert file.read_text() == text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    project(tmp_path, MLP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return tmp_path


def run_with_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, outcomes: Sequence[str], *arguments: str) -> int:
    """``mtmc optimize model.py::f`` in this process, as on a machine with a GPU: the steps have these outcomes."""
    items = [replace(action(n, outcome), text=TITLES[n - 1]) for n, outcome in enumerate(outcomes, 1)]
    return run_with(monkeypatch, FakePlanner(items), FakeCoder(), *arguments)


def run_with(monkeypatch: pytest.MonkeyPatch, planner: Planner, coder: Coder, *arguments: str) -> int:
    """The same with a planner and a coder."""

    class FakePipeline(Pipeline):
        def _start_fork_server(self) -> None:
            return None

        def _run_capture(self) -> Capture:
            found = capture(environment=replace(ENVIRONMENT, gpu="NVIDIA H100"))
            return replace(found, workload=workload_of(self.target))

        def _open_measurer(self, capture: Capture) -> Any:
            return FakeMeasurer()

        def _open_backends(self, *_: object) -> tuple[Planner, Coder]:
            return planner, coder

    monkeypatch.setattr("mtmc_lsp.app.pipeline.Pipeline", FakePipeline)
    monkeypatch.setattr("mtmc_lsp.app.pipeline.refuse_calls_without_kernels", lambda *_: None)
    return app(["optimize", "model.py::f", *arguments], standalone_mode=False)


def test_a_run_with_gain(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_gpu(folder, monkeypatch, ("better", "wrong", "better")) == 0
    check("gain", "mtmc optimize model.py::f", capsys.readouterr().out)


def test_a_run_without_gain(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_gpu(folder, monkeypatch, ("slower", "uncoded", "wrong elsewhere")) == 1
    check("no_gain", "mtmc optimize model.py::f", capsys.readouterr().out)


def test_a_run_without_time(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_gpu(folder, monkeypatch, ("late",)) == 1
    check("unfinished", "mtmc optimize model.py::f", capsys.readouterr().out)


def test_a_capture_that_takes_the_whole_budget_names_the_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class LatePipeline(Pipeline):
        def _start_fork_server(self) -> None:
            return None

        def _run_capture(self) -> Capture:
            self._deadline = 0.0
            raise WorkerFailed("capture.capture took longer than 60 s", kind=FailureKind.TIMEOUT)

    monkeypatch.setattr("mtmc_lsp.app.pipeline.Pipeline", LatePipeline)
    with pytest.raises(WorkerFailed) as caught:
        app(["optimize", "model.py::f", "--budget", "60"], standalone_mode=False)
    assert caught.value.message == "the budget of 60 s ended before f was captured"
    assert caught.value.remedy == "Give more time with --budget, or make the sizes in the workload smaller."
    assert caught.value.where is not None and caught.value.where.line == 5


def test_a_run_with_branches(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    landscape = Landscape({"0": 80.0, "1": 90.0, "1+2": 60.0}, savings={0: 20.0})
    parts = LandscapePlanner(landscape), LandscapeCoder(landscape)
    assert run_with(monkeypatch, *parts, "--search", "beam") == 0
    check("branches", "mtmc optimize model.py::f --search beam", capsys.readouterr().out)


def test_a_target_that_is_refused(folder: Path) -> None:
    answer = mtmc(folder, "optimize", "model.py::branches", **NO_GPU)
    assert answer.code == 2
    check("refused", "mtmc optimize model.py::branches", answer.out + answer.err)


def test_a_workload_that_is_wrong(folder: Path) -> None:
    answer = mtmc(folder, "optimize", "model.py::no_size", **NO_GPU)
    assert answer.code == 2
    check("bad_workload", "mtmc optimize model.py::no_size", answer.out + answer.err)


def test_a_run_without_a_gpu(folder: Path) -> None:
    answer = mtmc(folder, "optimize", "model.py::scores", "--arch", "sm_90", **NO_GPU)
    assert answer.code == 0
    check("no_gpu", "mtmc optimize model.py::scores --arch sm_90", answer.out + answer.err)


def verified(folder: Path, candidate: str) -> Answer:
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "candidate.py").write_text(candidate)
    return mtmc(folder, "verify", "reference.py::rms", "candidate.py::fast", "--seed", "1", **NO_GPU)


def test_a_candidate_of_verify_that_is_wrong(tmp_path: Path) -> None:
    answer = verified(tmp_path, HONEST.replace("scale * w", "scale + w"))
    assert answer.code == 1
    shown = re.sub(r"failures/\S+", "failures/FILE.py", answer.out + answer.err)
    check("wrong_candidate", "mtmc verify reference.py::rms candidate.py::fast --seed 1", shown)


def test_details_are_shown_with_v_and_diffs_with_diff(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with_gpu(folder, monkeypatch, ("better",))
    brief = capsys.readouterr().out
    run_with_gpu(folder, monkeypatch, ("better",), "-v", "--diff")
    full = capsys.readouterr().out
    for words in ("reason 1", "f_kernel on sm_90", "A/A control", "+# n1 better"):
        assert words in full
        assert words not in brief


def test_symbols_become_ascii_where_the_terminal_has_no_others(folder: Path) -> None:
    answer = mtmc(folder, "optimize", "model.py::no_size", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert answer.code == 2
    shown = mtmc(folder, "doctor", PYTHONIOENCODING="ascii", PYTHONUTF8="0", CUDA_VISIBLE_DEVICES="")
    assert shown.out.isascii()
    assert "+ python" in shown.out


def test_mtmc_alone_shows_the_commands_to_begin_with(folder: Path) -> None:
    answer = mtmc(folder, COLUMNS=str(WIDTH))
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= WIDTH
    for command in ("mtmc doctor", "mtmc optimize FILE::NAME", "mtmc apply", "mtmc --help"):
        assert command in answer.out
