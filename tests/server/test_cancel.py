"""A cancelled run ends soon at any stage, with all its processes."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from editor import REAL, Editor, editor
from lsprotocol import types as lsp
from test_fuzz import LONG

pytestmark = pytest.mark.asyncio

MODEL = """\
import torch


# mtmc: x=f32[8,48]
def f(x):
    return torch.softmax(torch.relu(x) + 1, -1)
"""
STAGES = ["starting", "capturing", "writing", "compiling", "verifying"]
"""Stages of a run without a GPU, in order; the planner runs between capturing and writing."""
POINTS = [(stage, delay) for stage in STAGES for delay in ((0.0, 0.1, 0.3, 0.6, 1.0, 2.0) if LONG else (0.0,))]
LIMIT = 10.0
"""Seconds. On an idle machine, a run ends within two."""


@pytest.mark.timeout(3000 if LONG else 600)
async def test_a_run_is_cancelled_at_every_stage(tmp_path: Path) -> None:
    async with editor(tmp_path, REAL, settings={"archs": ["sm_90"]}) as ide:
        uri = ide.open(MODEL)
        for stage, delay in POINTS:
            took = await _cancelled(ide, uri, "optimize", stage, delay)
            print(f"{stage} + {delay} s: {took:.2f} s")
            assert took < LIMIT, f"{stage} + {delay} s"


@pytest.mark.timeout(3000 if LONG else 600)
async def test_every_kind_of_job_is_cancelled(tmp_path: Path) -> None:
    draw = random.Random(0)
    async with editor(tmp_path, REAL, settings={"archs": ["sm_90"]}) as ide:
        uri = ide.open(MODEL)
        for kind in ("plan", "measure", "verify"):
            for _ in range(5 if LONG else 1):
                delay = draw.uniform(0, 3)
                took = await _cancelled(ide, uri, kind, "starting", delay)
                assert took < LIMIT, f"{kind} + {delay:.2f} s"


async def _cancelled(ide: Editor, uri: str, kind: str, stage: str, delay: float) -> float:
    """Cancel a job ``delay`` seconds after a stage began. Returns the seconds until its end was reported."""
    server = ide.client._server.pid
    job = (await ide.command(kind, uri, "f"))["job"]
    await ide.until(lambda: any(stage in words for words in ide.stages(job)) or ide._end_of(job), 300)
    until = time.monotonic() + delay
    await ide.until(lambda: time.monotonic() >= until or ide._end_of(job))
    processes = set(descendants(server))
    began = time.monotonic()
    ide.client.window_work_done_progress_cancel(lsp.WorkDoneProgressCancelParams(f"mtmc-{job}"))
    end = await ide.finished(job)
    took = time.monotonic() - began
    # A job may finish before it is cancelled, unless it just started.
    assert end == "cancelled" or delay, end
    # A worker checks once per second whether its parent process exists.
    # The server's warm fork server stays. It is recognised here, because a process that has just started has no command yet.
    await ide.until(lambda: not {p for p in processes if is_alive(p) and not _is_warm_fork_server(p, server)}, 60)
    assert await ide.command("jobs") == []
    return took


def descendants(process: int) -> Iterator[int]:
    """All descendants of a process."""
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        # A thread may have ended in the meantime.
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def _is_warm_fork_server(process: int, server: int) -> bool:
    """Whether a process is the fork server that the language server prepares for all runs, or its supervisor."""
    with contextlib.suppress(OSError):
        parent = _parent(process)
        is_near = parent == server or _parent(parent) == server
        return is_near and b"--fork-server" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def is_alive(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
