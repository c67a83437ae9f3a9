"""One measurer per hand-written target, shared by all its candidates."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handwritten import Handwritten

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.foreign_candidate import verify_foreign
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.reference import Reference

RUN_SECONDS = 240.0


@pytest.fixture(scope="session")
def capture_of(
    interpreter_worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Handwritten], Capture]:
    """Captures a hand-written target, once."""
    known: dict[str, Capture] = {}

    def capture(target: Handwritten) -> Capture:
        if target.name not in known:
            folder = tmp_path_factory.mktemp(target.name)
            (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n")
            path = folder / f"{target.name.lower()}_file.py"
            path.write_text(target.text)
            source = path.read_bytes()
            found = find_target(source, str(path), target.name)
            known[target.name] = run_capture(find_workload(str(path), source, found), source, interpreter_worker, 120)
        return known[target.name]

    return capture


@pytest.fixture(scope="session")
def measurer_of(capture_of: Callable[[Handwritten], Capture]) -> Iterator[Callable[[Handwritten], LocalMeasurer]]:
    """The measurer of a hand-written target, with limits that suit tests."""
    known: dict[str, LocalMeasurer] = {}

    def measurer(target: Handwritten) -> LocalMeasurer:
        if target.name not in known:
            options = MeasureOptions(archs=("sm_90", "gfx942"), run_seconds=RUN_SECONDS)
            known[target.name] = LocalMeasurer(capture_of(target), sys.executable, options)
        return known[target.name]

    yield measurer
    for item in known.values():
        item.close()


class PairJudge:
    """Judges candidates against references, each candidate in a process of its own that is locked in as for users."""

    def __init__(self, worker: Worker, fork_server: ForkServer, folder: Path, *, has_gpu: bool = False) -> None:
        self._worker, self._fork_server, self._folder, self._has_gpu = worker, fork_server, folder, has_gpu
        self._captures: dict[str, Capture] = {}
        self._references: dict[tuple[str, float], Reference] = {}
        self._lock = threading.Lock()
        self._judged = 0
        (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n")

    def capture(self, text: str, name: str) -> Capture:
        """The capture of a reference, made once."""
        if text not in self._captures:
            path = self._folder / f"reference{len(self._captures)}.py"
            path.write_text(text)
            target = find_target(text.encode(), str(path), name)
            workload = find_workload(str(path), text.encode(), target)
            self._captures[text] = run_capture(workload, text.encode(), self._worker, 120)
        return self._captures[text]

    def reference(self, text: str, name: str, run_seconds: float) -> Reference:
        """The reference's side, made once for all its candidates."""
        with self._lock:
            key = (text, run_seconds)
            if key not in self._references:
                capture = self.capture(text, name)
                self._references[key] = Reference(
                    capture, text, sys.executable, seed=5, run_seconds=run_seconds, worker=self._worker
                )
            return self._references[key]

    def __call__(
        self,
        text: str,
        name: str,
        candidate: str,
        its_name: str,
        memory_bytes: int = 8 << 30,
        run_seconds: float = 60.0,
        needs_kernel: bool = True,
        **more: Any,
    ) -> Verdict:
        """The verdict on a candidate's text."""
        reference = self.reference(text, name, run_seconds)
        with self._lock:
            self._judged += 1
            file = self._folder / f"candidate{self._judged}.py"
        file.write_text(candidate)
        target = find_target(candidate.encode(), str(file), its_name)
        foreign = ForeignCandidate(reference.capture, target, candidate, needs_kernel)
        process = CandidateProcess(
            sys.executable,
            str(self._folder),
            reference.capture.environment,
            has_gpu=self._has_gpu,
            hidden=reference.hidden,
            fork_server=self._fork_server,
            memory_bytes=memory_bytes,
        )
        try:
            return verify_foreign(foreign, reference, process=process, **more)[0].verdict
        finally:
            process.close()

    def close(self) -> None:
        """Remove what the references keep."""
        for reference in self._references.values():
            reference.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What every locked-in process of the tests is a copy of."""
    with ForkServer(sys.executable, {"TRITON_INTERPRET": "1"}, preload=True) as one:
        one.start()
        yield one


@pytest.fixture(scope="session")
def judge(
    interpreter_worker: Worker, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PairJudge]:
    """Judges any pair of texts."""
    one = PairJudge(interpreter_worker, fork_server, tmp_path_factory.mktemp("pairs"))
    yield one
    one.close()


@pytest.fixture(scope="session")
def gpu_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairJudge]:
    """The same on a CUDA GPU."""
    folder = tmp_path_factory.mktemp("gpu-pairs")
    with (
        ForkServer(sys.executable) as fork_server,
        Worker(sys.executable, cwd=str(folder), fork_server=fork_server) as worker,
    ):
        one = PairJudge(worker, fork_server, folder, has_gpu=True)
        yield one
        one.close()


@pytest.fixture
def scratch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
