"""Runs one process for each problem of a suite, several at a time, each with a GPU and CPU cores of its share.

A process reads its request as JSON from standard input and writes its answer to the file that is its last argument. If it crashes
or takes too long, the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.conversation import Conversation
from mtmc_lsp.core.errors import WorkerFailed
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.parent_watch import with_parent
from mtmc_lsp.process.priority import cores_for_job, usable_cores

END_SECONDS = 10.0
"""How long a problem's process may take to end by itself after its time limit."""
STOP_SECONDS = 5.0
"""How long a problem's process may take to close its workers after SIGINT."""
OUTPUT_LINES = 3
"""How many of the last lines of a crashed process's output are reported."""


class TookTooLong(Exception):
    """A process exceeded its time limit and was ended."""


class Crashed(Exception):
    """A process ended without an answer; the message says how."""


@dataclass(frozen=True)
class Slot:
    """The resources of one of the problems that run in parallel."""

    device: str
    """The value of ``CUDA_VISIBLE_DEVICES`` for the process; empty without a GPU."""
    cores: tuple[int, ...]


class Processes:
    """Runs processes, at most as many at a time as there are slots."""

    def __init__(self, jobs: int, devices: Sequence[str] = (), fork_server: ForkServer | None = None) -> None:
        """Prepare.

        Args:
            devices: the GPUs, which the slots share evenly; empty without a GPU.
            fork_server: starts the workers of all processes; the caller closes it.
        """
        self._fork_server = fork_server
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        cores = usable_cores()
        for job in range(jobs):
            device = devices[job % len(devices)] if devices else ""
            self._slots.put(Slot(device, tuple(cores_for_job(job, jobs, cores))))
        self._running: set[subprocess.Popen[bytes]] = set()
        self._conversation: tuple[str, Conversation] | None = None
        """The process that stays open, and its key."""
        self._closing = threading.Lock()

    @contextlib.contextmanager
    def slot(self) -> Iterator[Slot]:
        """A slot that no other problem uses meanwhile; waits for one."""
        slot = self._slots.get()
        try:
            yield slot
        finally:
            self._slots.put(slot)

    def answer(self, command: Sequence[str], request: object, slot: Slot, seconds: float) -> dict[str, Any]:
        """The answer of a new process.

        Args:
            command: without the file of the answer.
            request: a dataclass.
            seconds: the time limit that the process knows; it is ended a few seconds later.

        Raises:
            TookTooLong: the process exceeded the time limit.
            Crashed: it ended without an answer.
        """
        with tempfile.TemporaryDirectory(prefix="mtmc-bench-") as folder:
            answer, output = Path(folder) / "answer.json", Path(folder) / "output"
            with output.open("wb") as stream, self._lent() as (variables, descriptors):
                process = subprocess.Popen(
                    [*command, str(answer)],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={**_environment(slot), **variables},
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            self._running.add(process)
            try:
                process.communicate(json.dumps(to_json(request)).encode(), timeout=seconds + END_SECONDS)
            except subprocess.TimeoutExpired:
                _stop(process)
                raise TookTooLong from None
            finally:
                self._running.discard(process)
            try:
                result: dict[str, Any] = json.loads(answer.read_bytes())
            except (OSError, ValueError):
                last = " / ".join(output.read_text("utf-8", "replace").strip().splitlines()[-OUTPUT_LINES:])
                text = f"its process ended with code {process.returncode}: {last or 'it printed nothing'}"
                raise Crashed(text) from None
            return result

    def ask(
        self, program: Sequence[str], key: str, opening: object, command: str, data: object, slot: Slot, seconds: float
    ) -> dict[str, Any]:
        """The answer of a process that stays open for further requests with the same key.

        There is one such process; another key ends it. Only one thread asks at a time.

        Args:
            opening: JSON data, for a new process.
            data: JSON data of the request.

        Raises:
            WorkerFailed: the process ended, or took longer.
        """
        if self._conversation is not None and (self._conversation[0] != key or not self._conversation[1].is_open):
            self.close_conversation()
        if self._conversation is None:
            with self._lent() as (variables, descriptors):
                environment = {**_environment(slot), **variables}
                self._conversation = (key, Conversation(program, opening, environment, descriptors))
        conversation = self._conversation[1]
        try:
            return conversation.ask(command, data, seconds)
        except WorkerFailed:
            # A late answer must not be read as the answer to the next request.
            self.close_conversation()
            raise

    def close_conversation(self) -> None:
        """End the process that stays open, if there is one."""
        with self._closing:
            ended, self._conversation = self._conversation, None
        if ended is not None:
            ended[1].close(STOP_SECONDS)

    def stop(self) -> None:
        """End all processes that run. A request in progress fails."""
        for process in list(self._running):
            _stop(process)
        conversation = self._conversation
        if conversation is not None:
            conversation[1].stop(STOP_SECONDS)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
        """Environment variables and file descriptors by which a problem's process uses the fork server."""
        if self._fork_server is None:
            yield {}, ()
            return
        with self._fork_server.lend() as offer:
            yield offer


def _environment(slot: Slot) -> dict[str, str]:
    """The environment variables of a process that ends with this one."""
    return {**os.environ, **({"CUDA_VISIBLE_DEVICES": slot.device} if slot.device else {}), **with_parent()}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a problem's process: with SIGINT, so that it closes its workers, then with SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Its workers end by themselves when their parent is gone.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
