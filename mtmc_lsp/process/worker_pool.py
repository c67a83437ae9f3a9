"""The worker processes of one task: the deadline of their calls, the GPU lock that calls hold, and their end."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar

from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.process.gpu_lock import alone, filling, lock_folder, shared
from mtmc_lsp.process.protocol import Answer, GpuLock, Request


class Process(Protocol):
    """A process that answers requests."""

    def call(
        self, request: Request[Answer], seconds: float, lock: GpuLock | None = None, end: float = float("inf")
    ) -> Answer:
        """The answer to a request, within a time limit; see :meth:`~mtmc_lsp.process.worker_process.Worker.call`."""

    def release_memory(self, seconds: float) -> None:
        """Let the process free GPU memory for others, if it runs and is idle."""

    def kill(self) -> None:
        """End the process now."""

    def close(self) -> None:
        """End the process and release what it holds."""


RELEASE_SECONDS = 30.0
"""Time limit for freeing the memory of one process."""

P = TypeVar("P", bound=Process)


class WorkerPool:
    """Owns worker processes. On a GPU, a call holds the GPU lock: shared, or exclusively while something is timed."""

    def __init__(self, *, has_gpu: bool, deadline: float | None = None) -> None:
        """Create a pool without processes.

        Args:
            has_gpu: whether the processes use a GPU.
            deadline: time of the monotonic clock after which no call continues.
        """
        self.has_gpu = has_gpu
        if has_gpu:
            lock_folder()
        self._deadline = deadline
        self._processes: list[Process] = []
        self._others: list[Process] = []
        """Processes that somebody else owns and that hold GPU memory, too."""
        self._gpu: Future[str] = Future()
        self._fills_gpu = False
        """Whether this run may fill the GPU's memory."""
        self._sharing = 0
        """The number of calls that run and share the GPU."""
        self._is_cleared = False
        """Whether a call that had too little memory is repeated without others of this run."""
        self._is_closed = False
        self._changed = threading.Condition()

    def add(self, process: P) -> P:
        """Own a process, which :meth:`close` ends."""
        self._processes.append(process)
        return process

    def share_memory_with(self, process: Process) -> None:
        """Let a process of somebody else free GPU memory when a call has none."""
        self._others.append(process)

    def set_gpu(self, uuid: str) -> None:
        """Set the UUID of the GPU, known after a process created its context; empty if that failed."""
        if not self._gpu.done():
            self._gpu.set_result(uuid)

    @property
    def gpu(self) -> str:
        """The UUID of the GPU; waits for :meth:`set_gpu`."""
        return self._gpu.result() if self.has_gpu else ""

    @functools.cached_property
    def _lock(self) -> GpuLock | None:
        """The lock that calls share; ``None`` without a GPU."""
        return GpuLock(self.gpu, lock_folder(self.gpu)) if self.gpu else None

    def call(self, process: Process, request: Request[Answer], seconds: float) -> Answer:
        """The answer to a request, with the shared GPU lock: no timing runs meanwhile.

        A command that runs out of GPU memory is repeated as by :meth:`call_with_room`, and then as by :meth:`call_alone`.

        Args:
            seconds: time limit, without the wait for the lock.

        Raises:
            MtmcError: the error that the command raised.
            WorkerFailed: the process did not answer; of kind ``DEADLINE`` if the deadline of the task passed.
        """
        return self._call(process, request, seconds, self._lock)

    def call_with_room(self, process: Process, request: Request[Answer], seconds: float) -> Answer:
        """As :meth:`call`, after the other calls of this run ended and its processes freed the memory they can do without."""
        with self._without_others():
            self._release_all()
            return self._call_once(process, request, seconds, self._lock)

    def call_alone(self, process: Process, request: Request[Answer], seconds: float) -> Answer:
        """As :meth:`call_with_room`, with the GPU alone, so that no other command of this machine needs memory meanwhile."""
        with contextlib.ExitStack() as locks:
            if self._lock is not None:
                if not self._fills_gpu:
                    locks.enter_context(filling(self.gpu, self._end))
                locks.enter_context(self._without_others())
                locks.enter_context(self.exclusive_gpu())
            self._release_all()
            return self._call_once(process, request, seconds, None)

    def call_unlocked(self, process: Process, request: Request[Answer], seconds: float) -> Answer:
        """As :meth:`call`, for requests that do not use the GPU or whose caller holds its lock."""
        return self._call(process, request, seconds, None)

    def call_locking(self, process: Process, request: Request[Answer], seconds: float) -> Answer:
        """As :meth:`call`, for requests whose process locks the GPU itself."""
        try:
            return self._call_once(process, request, seconds, None)
        except MtmcError as error:
            if error.kind is not FailureKind.GPU_OUT_OF_MEMORY:
                raise
        # Another run may fill the memory at present. The process shares the GPU again and again, so nothing is locked for it.
        with filling(self.gpu, self._end):
            pass
        return self._with_room(process, request, seconds)

    def _call(self, process: Process, request: Request[Answer], seconds: float, lock: GpuLock | None) -> Answer:
        try:
            with self._counted() if lock is not None else contextlib.nullcontext():
                return self._call_once(process, request, seconds, lock)
        except MtmcError as error:
            if error.kind is not FailureKind.GPU_OUT_OF_MEMORY:
                raise
        if lock is None:
            return self._with_room(process, request, seconds)
        try:
            return self.call_with_room(process, request, seconds)
        except MtmcError as error:
            if error.kind is not FailureKind.GPU_OUT_OF_MEMORY:
                raise
        return self.call_alone(process, request, seconds)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a call that shares the GPU. It waits while another call is repeated without others."""
        with self._changed:
            self._wait_until(lambda: not self._is_cleared)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _without_others(self) -> Iterator[None]:
        """Wait for the calls of this run that share the GPU, and let no further one begin.

        A process that computes pauses for timings and keeps its memory meanwhile, so only its end frees it. The caller holds no
        lock of the GPU, because these calls may wait for it.
        """
        with self._changed:
            self._wait_until(lambda: not self._is_cleared)
            self._is_cleared = True
        try:
            with self._changed:
                self._wait_until(lambda: not self._sharing)
            yield
        finally:
            with self._changed:
                self._is_cleared = False
                self._changed.notify_all()

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for a condition, at most until the deadline of the task.

        Raises:
            WorkerFailed: the pool was closed meanwhile; a call would start a process again.
        """
        seconds = None if self._deadline is None else max(0.0, self.seconds_left)
        self._changed.wait_for(lambda: self._is_closed or is_true(), seconds)
        if self._is_closed:
            raise WorkerFailed("the run has ended", kind=FailureKind.CANCELLED)

    def _with_room(self, process: Process, request: Request[Answer], seconds: float) -> Answer:
        self._release_all()
        return self._call_once(process, request, seconds, None)

    def _release_all(self) -> None:
        # The process itself keeps results of earlier commands, too.
        for each in (*self._processes, *self._others):
            each.release_memory(RELEASE_SECONDS)

    def _call_once(self, process: Process, request: Request[Answer], seconds: float, lock: GpuLock | None) -> Answer:
        expired = WorkerFailed(
            f"the time limit of the whole run was reached during {request.command}", kind=FailureKind.DEADLINE
        )
        if self._end <= time.monotonic():
            raise expired
        try:
            return process.call(request, seconds, lock, self._end)
        except WorkerFailed as error:
            if error.kind is FailureKind.TIMEOUT and time.monotonic() >= self._end:
                raise expired from None
            raise

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline of the task; infinite without one."""
        return self._end - time.monotonic()

    @property
    def _end(self) -> float:
        return float("inf") if self._deadline is None else self._deadline

    @contextlib.contextmanager
    def sharing_gpu(self) -> Iterator[None]:
        """Use the GPU together with other processes, while nothing is timed on it."""
        with shared(self.gpu) if self.gpu else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def exclusive_gpu(self) -> Iterator[None]:
        """Hold the GPU exclusively. The caller uses :meth:`call_unlocked`."""
        with alone(self.gpu):
            yield

    @contextlib.contextmanager
    def filling_gpu(self, reserve: float = 0.0) -> Iterator[bool]:
        """Fill the GPU's memory, one run at a time; calls share the GPU as usual.

        Args:
            reserve: seconds before the deadline of the task at which the wait for other runs ends.

        Yields:
            Whether it is this run's turn; false if the wait ended first.
        """
        with filling(self.gpu, self._end - reserve) as is_held:
            self._fills_gpu = is_held
            try:
                yield is_held
            finally:
                self._fills_gpu = False

    def close(self) -> None:
        """End all processes."""
        self.set_gpu("")
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
            process.close()
