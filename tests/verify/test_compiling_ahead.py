"""What is compiled for other sizes keeps neither the next candidate nor the end of a run waiting."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from handwritten import RMS
from triton.runtime.cache import triton_key

from mtmc_lsp.compile.messages import PrepareCompilerRequest
from mtmc_lsp.compile.worker import commands
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.measure.compilation import KernelCompiler
from mtmc_lsp.process.worker_pool import WorkerPool


class Slow:
    """Stands for the worker that compiles ahead: a call lasts until it is killed."""

    def __init__(self) -> None:
        self.calls, self._ended = 0, threading.Event()

    def call(self, *_: Any) -> dict[str, Any]:
        self.calls += 1
        self._ended.clear()
        if not self._ended.wait(30):
            raise AssertionError("nobody ended it")
        raise WorkerFailed("killed", kind=FailureKind.CANCELLED)

    def kill(self) -> None:
        self._ended.set()

    def close(self) -> None:
        """As a worker has it."""


def test_the_next_candidate_and_the_end_stop_it(capture_of: Any) -> None:
    slow: Any = Slow()
    pool = WorkerPool(has_gpu=False)
    with ThreadPoolExecutor(1) as background:
        compiler = KernelCompiler(capture_of(RMS), pool, slow, slow, background, archs=("sm_90",), seconds=60.0)
        for _ in range(2):
            compiler.compile_in_background(RMS.candidate(), [])
            while not slow.calls:
                time.sleep(0.01)
            began = time.monotonic()
            compiler.stop_background()
            assert time.monotonic() - began < 20
            slow.calls = 0


def test_the_compiler_starts_once_before_there_is_anything_to_compile(capture_of: Any) -> None:
    """Its errors are left to the first compilation."""
    requests: list[Any] = []

    class Refusing(Slow):
        def call(self, request: Any, *_: Any) -> Any:
            requests.append(request)
            raise WorkerFailed("no interpreter", kind=FailureKind.CRASHED)

    with ThreadPoolExecutor(1) as background:
        worker: Any = Refusing()
        capture = capture_of(RMS)
        compiler = KernelCompiler(
            capture, WorkerPool(has_gpu=False), worker, worker, background, archs=("sm_90",), seconds=60.0
        )
        compiler.prepare()
        compiler.prepare()
    assert requests == [PrepareCompilerRequest()]


def test_a_prepared_compiler_has_imported_and_hashed_triton() -> None:
    triton_key.cache_clear()
    commands.prepare(PrepareCompilerRequest())
    assert triton_key.cache_info().currsize == 1
