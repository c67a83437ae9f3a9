"""Observations of a text count for a version that only launches its kernels directly."""

from __future__ import annotations

from typing import Any

import pytest

from mtmc_lsp.kernels.messages import Access, CaseTrace, TraceCase
from mtmc_lsp.kernels.moved import moved_trace
from tests.kernels.proposing import applied
from tests.kernels.test_direct_launch import SCALE
from tests.kernels.test_gpu_observation import Session, tools_of


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def trace_of(text: str) -> CaseTrace:
    lines = [line_of(text, part) for part in ("tl.load(", "tl.store(out_ptr")]
    accesses = (Access("scale_kernel", line, "load", "x_ptr", "contiguous", True, 1, 4) for line in lines)
    return CaseTrace(TraceCase({}), accesses=tuple(accesses))


def test_accesses_move_with_their_lines() -> None:
    direct = applied(SCALE, "direct-launch")
    moved = moved_trace(trace_of(SCALE), SCALE.encode(), direct.encode())
    assert moved is not None
    for access, part in zip(moved.accesses, ("tl.load(", "tl.store(out_ptr"), strict=True):
        assert part in direct.splitlines()[access.line - 1]
        assert access.line > line_of(SCALE, part)


@pytest.mark.parametrize("change", [("tl.load(", "tl.load( "), ("import torch\n", "import torch\nimport math\n")])
def test_a_version_that_differs_otherwise_is_observed_itself(change: tuple[str, str]) -> None:
    direct = applied(SCALE, "direct-launch")
    assert moved_trace(trace_of(SCALE), SCALE.encode(), direct.replace(*change).encode()) is None
    assert moved_trace(trace_of(SCALE), SCALE.replace(*change).encode(), direct.encode()) is None


def test_the_interpreter_does_not_run_a_version_with_the_same_kernels_again(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, observed = applied(SCALE, "direct-launch"), list[bytes]()
    tools: Any = tools_of(Session(), monkeypatch)

    def work(text: bytes) -> CaseTrace:
        observed.append(text)
        return trace_of(text.decode())

    tools._work = work
    assert tools.work(SCALE.encode()) == trace_of(SCALE)
    assert tools.work(direct.encode()) == trace_of(direct)
    changed = direct.replace("tl.load(", "tl.load( ").encode()
    tools.work(changed)
    assert observed == [SCALE.encode(), changed]
