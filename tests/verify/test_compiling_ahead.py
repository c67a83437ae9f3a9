"""What is compiled for other sizes keeps neither the next candidate nor the end of a run waiting."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from handwritten import RMS

from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.measure.local_measurer import LocalMeasurer


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


@pytest.fixture
def measurer(capture_of: Any) -> LocalMeasurer:
    return LocalMeasurer(capture_of(RMS), sys.executable, archs=("sm_90",))


def test_the_next_candidate_and_the_end_stop_it(measurer: LocalMeasurer) -> None:
    slow: Any = Slow()
    measurer._ahead = slow
    for _ in range(2):
        measurer._compiling = measurer._background.submit(
            measurer._compile_more, CompileRequest("m.py", "m", "", (), ("sm_90",), 1.0)
        )
        while not slow.calls:
            time.sleep(0.01)
        began = time.monotonic()
        measurer._stop_compiling()
        assert measurer._compiling.done() and time.monotonic() - began < 5
        slow.calls = 0
    measurer._compiling = measurer._background.submit(
        measurer._compile_more, CompileRequest("m.py", "m", "", (), ("sm_90",), 1.0)
    )
    measurer.close()
    assert measurer._compiling.done()
