"""Job queue for runs, plans and measurements. One job runs at a time, in a separate process that can be stopped at any time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

END_SECONDS = 5.0
"""Time for the supervisor of a stopped job to end it with everything that it started."""
MAX_EVENT_BYTES = 1 << 28
"""Maximum size of an event in bytes: a step contains the complete source of its candidate."""
MAX_STDERR_LINES = 20
"""Number of lines kept from the standard error of a job, to report why it failed."""


class JobState(Enum):
    """State of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass
class Job:
    """One job for a target."""

    kind: str
    """``optimize``, ``resume``, ``plan``, ``measure``, ``verify``, ``record``, ``undo``, ``another``, ``certify``, or
    ``repair``."""
    uri: str
    path: str
    target: str
    title: str
    request: dict[str, Any]
    """The request as the process reads it."""
    command: tuple[str, ...] = ()
    """Command of the process that runs the job; empty for the host."""
    id: int = 0
    state: JobState = JobState.QUEUED
    stage: str = "waiting"
    began: float = 0.0
    """Time of the monotonic clock when it started to run."""
    budget_seconds: float | None = None
    """For a run: its time limit, once it is known."""
    step: int = 0
    """For a run: the number of the current step."""
    action: str = ""
    """For a run: the action of the current step as text."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The final event of the job: ``result``, ``plan``, ``error``, ..."""
    stop_reason: str = ""
    """Why it was cancelled, as a sentence; empty if the user cancelled it."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For a run: the steps so far, as JSON data."""
    process: asyncio.subprocess.Process | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after all listeners were notified of the end."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


Listener = Callable[[Job], Awaitable[None]]
Offer = tuple[dict[str, str], tuple[int, ...]]
"""Environment variables and file descriptors for a process."""
Lend = Callable[[], contextlib.AbstractContextManager[Offer | None]]


class Jobs:
    """The job queue."""

    def __init__(self, command: Sequence[str], on_change: Listener, lend: Lend = contextlib.nullcontext) -> None:
        """Create a queue.

        Args:
            command: starts the host process.
            on_change: called when the state of a job changes.
            lend: lends a fork server to the host process; yields variables and descriptors for it, or None.
        """
        self._command, self._lend = list(command), lend
        self._on_change = on_change
        self._numbers = itertools.count(1)
        self._queue: list[Job] = []
        self._running: Job | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def active(self) -> list[Job]:
        """The running job, followed by the queued jobs."""
        return [*([self._running] if self._running is not None else []), *self._queue]

    def find(self, job_id: int) -> Job | None:
        """The active job with this id."""
        return next((job for job in self.active if job.id == job_id), None)

    def for_target(self, path: str, target: str) -> Job | None:
        """The first active job for this target."""
        return next((job for job in self.active if (job.path, job.target) == (path, target)), None)

    def submit(self, job: Job) -> Job:
        """Append a job to the queue."""
        job.id = next(self._numbers)
        ahead = self.active
        job.stage = f"waiting for {ahead[0].title}" if ahead else "starting"
        self._queue.append(job)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._work())
        return job

    async def cancel(self, job: Job) -> None:
        """Cancel a queued or running job. Returns after its process has ended."""
        if job in self._queue:
            self._queue.remove(job)
            job.state = JobState.CANCELLED
            await self._on_change(job)
            job.over.set()
        elif job is self._running and not job.is_over:
            job.state = JobState.CANCELLED
            if job.process is not None:
                await _end(job.process)

    async def close(self) -> None:
        """Cancel all jobs without notifying listeners."""
        self._queue.clear()
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump

    async def _work(self) -> None:
        while self._queue:
            self._running = job = self._queue.pop(0)
            try:
                await self._run(job)
            finally:
                self._running = None
            await self._on_change(job)
            job.over.set()

    async def _run(self, job: Job) -> None:
        job.state, job.stage, job.began = JobState.RUNNING, "starting", time.monotonic()
        await self._on_change(job)
        if job.state is not JobState.RUNNING:
            return
        try:
            with self._lend() as offer:
                variables, descriptors = offer or ({}, ())
                job.process = process = await asyncio.create_subprocess_exec(
                    *(job.command or self._command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    limit=MAX_EVENT_BYTES,
                    env={**os.environ, **variables},
                    pass_fds=descriptors,
                    start_new_session=True,
                )
        except OSError as error:
            job.state = JobState.FAILED
            job.answer = _failure(f"the process cannot be started: {error}")
            return
        tail = asyncio.create_task(_last_lines(process))
        try:
            if job.state is JobState.RUNNING:
                await self._converse(job, process)
        finally:
            await _end(process)
            lines = await tail
        if job.state is JobState.RUNNING:
            job.state = JobState.FAILED
            detail = f": {lines[-1]}" if lines else ""
            job.answer = _failure(f"the process ended with exit code {process.returncode}{detail}")

    async def _converse(self, job: Job, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        # Keep standard input open: the host exits when it closes, for example when this process dies.
        with contextlib.suppress(ConnectionError):
            process.stdin.write((json.dumps(job.request) + "\n").encode())
            await process.stdin.drain()
        async for line in process.stdout:
            if job.state is not JobState.RUNNING:
                return
            event = json.loads(line)
            kind = event["event"]
            if kind == "stage":
                job.stage = event["text"]
            elif kind == "budget":
                job.budget_seconds = event["seconds"]
            elif kind == "action":
                job.step, job.action, job.stage = event["step"], event["text"], "starting"
            elif kind == "step":
                job.steps.append(event["step"])
            elif kind == "changed":
                last = event["step"]
                job.steps[:] = [last if step["index"] == last["index"] else step for step in job.steps]
            else:
                job.answer = event
                job.state = JobState.FAILED if kind == "error" else JobState.DONE
                return
            await self._on_change(job)


def _failure(message: str) -> dict[str, Any]:
    return {"event": "error", "error": {"code": "worker", "message": message, "remedy": "See the server's log."}}


async def _last_lines(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stderr is not None
    lines: list[str] = []
    async for line in process.stderr:
        lines = [*lines, line.decode("utf-8", "replace").rstrip()][-MAX_STDERR_LINES:]
    return lines


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a job. Its supervisor ends everything that it started."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except asyncio.TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
