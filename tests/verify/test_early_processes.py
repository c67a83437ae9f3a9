"""Processes that start while the target is captured, on a machine with a GPU."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handwritten import RMS

from mtmc_lsp.app import pipeline as pipeline_module
from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.regions.capture import workload_of
from mtmc_lsp.app.target_file import Request, open_target
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture, Environment
from mtmc_lsp.measure import local_measurer
from mtmc_lsp.measure.early_processes import EarlyProcesses
from mtmc_lsp.measure.local_measurer import LocalMeasurer
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.messages import Libraries, StartRequest
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.messages import CaseRequest, ConstructRequest, LoadRequest, ReferenceRequest

GPU = Environment("3.12", "2.11.0", "3.6.0", "NVIDIA A10", "sm_86", "550.1")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capture_of: Any) -> list[tuple[Worker, Any]]:
    """The requests to workers, with their worker. No process starts: a worker answers that it started."""
    capture_of(RMS)  # by a real worker
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    requests: list[tuple[Worker, Any]] = []

    def call(worker: Worker, request: Any, *_: object) -> Any:
        requests.append((worker, request))
        return SimpleNamespace(gpu="GPU-0", free_bytes=1 << 34, error="", isolation=None)

    monkeypatch.setattr(Worker, "call", call)
    return requests


def started(requests: list[tuple[Worker, Any]]) -> list[Worker]:
    return [worker for worker, request in requests if isinstance(request, StartRequest)]


def early_processes(tmp_path: Path) -> EarlyProcesses:
    early = EarlyProcesses(sys.executable, str(tmp_path), ForkServer(sys.executable))
    early._thread.join(60)
    return early


def test_the_process_of_the_trials_starts_first(asked: list[tuple[Worker, Any]], tmp_path: Path) -> None:
    early = early_processes(tmp_path)
    assert started(asked) == [early.trials, early.reference.worker, early.candidate]
    for_candidates = [request.for_candidates for _, request in asked]
    assert for_candidates == [True, False, True]
    early.close()


def test_the_measurer_takes_them_with_their_folders(
    asked: list[tuple[Worker, Any]], tmp_path: Path, capture_of: Any
) -> None:
    capture: Capture = capture_of(RMS)
    on_gpu = replace(capture, environment=GPU, workload=replace(capture.workload, device="cuda"))
    early = early_processes(tmp_path)
    folders = (Path(early.kernels), early.reference.secret, early.reference.inputs)
    with contextlib.closing(LocalMeasurer(on_gpu, sys.executable, early=early)) as measurer:
        assert measurer._process._worker is early.candidate
        assert measurer._trial_process._worker is early.trials
        assert measurer._reference.worker is early.reference.worker
        assert measurer._reference.hidden == str(early.reference.secret)
        assert early.candidate._sandbox is not None
        assert early.candidate._sandbox.hidden == measurer._reference.hidden
        early.close()
        assert all(folder.is_dir() for folder in folders), "the measurer owns them"
    assert not any(folder.exists() for folder in folders)


def test_without_a_measurer_they_end_and_leave_no_folder(tmp_path: Path) -> None:
    with ForkServer(sys.executable) as fork_server:
        early = EarlyProcesses(sys.executable, str(tmp_path), fork_server)
        early._thread.join(120)
        processes = [early.trials._process, early.reference.worker._process, early.candidate._process]
        assert all(process is not None and process.poll() is None for process in processes)
        early.close()
        assert [process.wait(10) for process in processes if process is not None] == [-9, -9, -9]
    assert not any(Path(folder).exists() for folder in (early.kernels, early.reference.secret, early.reference.inputs))


def test_references_are_computed_while_the_first_step_is_planned(
    asked: list[tuple[Worker, Any]], tmp_path: Path, capture_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first candidate's process has started, which tells how much memory is free."""
    capture: Capture = capture_of(RMS)
    on_gpu = replace(capture, environment=GPU, workload=replace(capture.workload, device="cuda"))
    known: list[int] = []
    began = threading.Event()
    compute_ahead = VerificationEngine.compute_ahead

    def computed(engine: VerificationEngine, candidate: Any) -> Any:
        known.append(engine._process.free_bytes)
        began.set()
        return compute_ahead(engine, candidate)

    monkeypatch.setattr(VerificationEngine, "compute_ahead", computed)
    wanted = Libraries(("float32",))
    monkeypatch.setattr(local_measurer, "libraries_of", lambda graph: wanted)
    early = early_processes(tmp_path)
    with contextlib.closing(LocalMeasurer(on_gpu, sys.executable, early=early)) as measurer:
        assert not known, "a plan alone needs no references"
        measurer.prepare_first_step()
        assert began.wait(60)
        measurer._prepare()
        assert known == [1 << 34]
    loading = {worker for worker, request in asked if isinstance(request, StartRequest) and request.libraries == wanted}
    assert {early.trials, early.candidate} <= loading


COUNTING = """
import os
import torch

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with open({file!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{torch.initial_seed()}}\\n")
        self.weight = torch.nn.Parameter(torch.rand(8))

    # mtmc: x=f32[N,8] N=64
    def forward(self, x):
        return torch.softmax(x * self.weight, -1)
"""


def test_the_reference_constructs_the_module_once_and_before_it_is_asked_for(
    tmp_path: Path, captured: Callable[[str, str], Capture]
) -> None:
    made = tmp_path / "made"
    text = COUNTING.format(file=str(made))
    capture = captured(text, "Layer.forward")
    made.unlink()
    workload = replace(capture.workload, device="cuda")
    with ForkServer(sys.executable) as fork_server:
        request = ConstructRequest(workload, text, capture.module_name)
        early = EarlyProcesses(sys.executable, str(tmp_path), fork_server, request)
        with contextlib.closing(early):
            early._thread.join(120)
            # The sandbox of the trials, where there is one, does not let the constructor write.
            constructed = made.read_text()
            processes = [line.split()[0] for line in constructed.splitlines()]
            assert processes and len(processes) == len(set(processes))
            case = Case({"N": 16}, "normal", 1)
            data = CaseRequest(capture, text, case, str(early.reference.inputs / "inputs"))
            expected = str(early.reference.secret / "expected")
            early.reference.worker.call(ReferenceRequest(data, expected), 120)
            assert made.read_text() == constructed


READS = """
import pathlib

def can_read(path):
    try:
        return bool(pathlib.Path(path).read_text())
    except PermissionError:
        return False

pathlib.Path(KERNELS, "seen").write_text(repr([can_read(path) for path in PATHS]))
"""


def test_a_candidate_that_started_early_reads_new_inputs_but_no_expected_results(
    tmp_path: Path, capture_of: Any
) -> None:
    """Its sandbox was entered before these files existed."""
    with ForkServer(sys.executable) as fork_server:
        early = EarlyProcesses(sys.executable, str(tmp_path), fork_server)
        with contextlib.closing(early):
            early._thread.join(120)
            files = [folder / "new.txt" for folder in (early.reference.inputs, early.reference.secret)]
            for file in files:
                file.write_text("new")
            text = READS.replace("KERNELS", repr(early.kernels)).replace("PATHS", repr([str(file) for file in files]))
            early.candidate.call(LoadRequest(capture_of(RMS), RMS.text, (text,)), 120)
            seen = Path(early.kernels, "seen").read_text()
            isolation = early.candidate.call(StartRequest(gpu=False), 60).isolation
    if not isolation.files:
        pytest.skip("no Landlock here")
    assert seen == "[True, False]"


class NoMeasurer:
    """A measurer of a target on the CPU, which takes no process."""

    def __init__(self, *_: object, early: Any, **more: object) -> None:
        early.events.append("measurer")

    def close(self) -> None: ...


class Early:
    """Notes what happens to the early processes."""

    events: list[str] = []
    construct: object = None

    def __init__(self, python: str, cwd: str, fork_server: object, construct: object) -> None:
        self.events.append("early")
        Early.construct = construct

    def close(self) -> None:
        self.events.append("close")


class Branched:
    """A fork server with branches."""

    env: dict[str, str] = {}

    def branch(self, *_: object) -> Branched:
        return self

    def close(self) -> None: ...


STARTED = ["early", "capture", "measurer", "close", "close"]


@pytest.mark.parametrize(
    ("sees_gpu", "cores", "expected"), [(True, 8, STARTED), (True, 2, STARTED), (False, 8, ["capture"])]
)
def test_a_run_starts_them_before_the_capture(
    sees_gpu: bool, cores: int, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capture_of: Any
) -> None:
    path = tmp_path / "model.py"
    path.write_text(RMS.text)
    capture: Capture = capture_of(RMS)
    events: list[str] = []
    monkeypatch.setattr(Early, "events", events)
    monkeypatch.setattr(pipeline_module, "EarlyProcesses", Early)
    monkeypatch.setattr(pipeline_module, "sees_gpu", lambda: sees_gpu)
    monkeypatch.setattr(pipeline_module, "usable_cores", lambda: [*range(cores)])
    monkeypatch.setattr(pipeline_module, "refuse_calls_without_kernels", lambda *_: None)
    if sees_gpu:
        monkeypatch.setattr(pipeline_module, "LocalMeasurer", NoMeasurer)

    def run_capture(_: Pipeline) -> Capture:
        events.append("capture")
        return capture

    monkeypatch.setattr(Pipeline, "_run_capture", run_capture)
    target = open_target(Request(path, RMS.name, Settings(), sys.executable))
    with Pipeline(target, RunOptions(fork_server=Branched())) as pipeline:  # type: ignore[arg-type]
        pipeline._begin()
        pipeline.measurer()
    assert events == expected
    if sees_gpu:
        request = ConstructRequest(workload_of(target), RMS.text, "model")
        assert Early.construct == (request if cores > 2 else None), "on few cores, the capture goes before"
