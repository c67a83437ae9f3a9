"""A target whose captures and measurements run in services on the workers of a cluster."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from typing import Any

from mtmc_lsp.app.bench.jobs import Jobs, Place, WorkerLost
from mtmc_lsp.app.remote.messages import CaptureRequest, Opening
from mtmc_lsp.core.errors import FailureKind, WorkerFailed, error_from_json
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.protocol import Answer, Request, typed_answer

SERVICE = "mtmc_lsp.app.remote.service"
CALL_SECONDS = 3600.0
"""Time limit of a request without a deadline; its stages have limits that are much shorter."""


@dataclass(frozen=True)
class Pending:
    """A request in progress."""

    request: Request[Any]
    future: Future[dict[str, Any]]


class RemoteTarget:
    """Sends requests about one target to the workers of a cluster. Each worker answers one at a time."""

    def __init__(self, jobs: Jobs, opening: Opening, program: str | tuple[str, ...] = SERVICE) -> None:
        """Prepare.

        Args:
            jobs: the workers, all with the same GPU.
            opening: the target, with the paths of this machine.
            program: the module or the command line of the service.
        """
        self._jobs, self._opening, self._program = jobs, opening, program

    @property
    def count(self) -> int:
        """How many requests run at the same time."""
        return self._jobs.count

    def captures(self, seconds: float) -> tuple[Capture, ...]:
        """The graphs of the target, from one of the workers. The services of all further requests begin with them.

        Raises:
            MtmcError: the target cannot be captured.
        """
        # The first request also starts the service.
        captures = self.call(CaptureRequest(), time.monotonic() + seconds).captures
        self._opening = replace(self._opening, captures=captures)
        return captures

    def submit(self, request: Request[Any], deadline: float | None) -> Pending:
        """Send a request to a worker that is free.

        Args:
            deadline: time of the monotonic clock after which nobody waits for the answer; None for no limit.
        """
        seconds = min(CALL_SECONDS, _seconds_until(deadline))
        data = (to_json(self._opening), request.command, to_json(request))
        return Pending(request, self._jobs.submit(answer_request, self._program, *data, seconds))

    def call(self, request: Request[Answer], deadline: float | None) -> Answer:
        """The answer to a request.

        Raises:
            MtmcError: the error that the request led to.
            WorkerFailed: of kind ``DEADLINE`` after the deadline; of kind ``CRASHED`` if its workers were lost.
        """
        answer: Answer = self.result(self.submit(request, deadline), deadline)
        return answer

    def result(self, pending: Pending, deadline: float | None) -> Any:
        """The answer to a request that :meth:`submit` sent. Errors are those of :meth:`call`."""
        command = pending.request.command
        try:
            pending.future.exception(min(threading.TIMEOUT_MAX, _seconds_until(deadline)))
            answer = self._jobs.result(pending.future)
        except TimeoutError:
            pending.future.cancel()
            raise WorkerFailed(f"the time was over before {command} ended", kind=FailureKind.DEADLINE) from None
        except WorkerLost as lost:
            raise WorkerFailed(str(lost), kind=FailureKind.CRASHED) from None
        if "error" in answer:
            error = error_from_json(answer["error"])
            if error.kind is FailureKind.TIMEOUT and deadline is not None and time.monotonic() >= deadline:
                error = WorkerFailed(error.message, kind=FailureKind.DEADLINE)
            raise error
        return typed_answer(pending.request, answer["result"])


def answer_request(
    place: Place, program: str | tuple[str, ...], opening: Any, command: str, data: Any, seconds: float
) -> dict[str, Any]:
    """The job on a worker: ask the service of a target."""
    known = from_json(Opening, place.moved(opening))
    settings = replace(known.settings, policy_file=place.here(known.settings.policy_file))
    here = replace(known, python=place.python or known.python, settings=settings, cores=place.slot.cores)
    try:
        # The service that captured the target has its graphs.
        key = json.dumps([program, to_json(replace(here, captures=()))], sort_keys=True)
        answer = place.ask(program, key, to_json(here), command, place.moved(data), seconds)
    except WorkerFailed as error:
        answer = {"error": error.to_json()}
    moved: dict[str, Any] = place.there(answer)
    return moved


def _seconds_until(deadline: float | None) -> float:
    """Seconds until a time of the monotonic clock; infinite without a deadline."""
    return math.inf if deadline is None else max(0.0, deadline - time.monotonic())
