"""Progress of a running job, and messages at its end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import attrs
from lsprotocol import types as lsp

from mtmc_lsp.capture.recorded_calls import RecordedTarget
from mtmc_lsp.core.errors import NoWorkload
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.results import Timing, Verdict
from mtmc_lsp.core.run import RunResult, StepStatus
from mtmc_lsp.report.phrases import headline, ratio_text, recording_summary, stage_with_time, verdict_line
from mtmc_lsp.server.failures.failure import failure_text
from mtmc_lsp.server.jobs import Job, JobState

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

RUN_STATE = "mtmc/runState"
LENS_SECONDS = 1.0
"""How long a refresh of lenses waits for the client's request, before it is repeated."""
LENS_REPEATS = 3
"""How often it is repeated: a client that shows no file requests no lenses."""


@attrs.define
class RunState:
    """Parameters of ``mtmc/runState``: a job and its run so far."""

    job: int
    kind: str
    uri: str
    target: str
    state: str
    stage: str
    step: int
    action: str
    summary: str
    """``2 of 3 steps accepted · best 1.83x``; empty before the first step."""
    seconds: float
    """How long the job has run; 0 while it waits."""
    result: str
    """Summary of the result; empty if the job did not finish, or if a question with this text follows."""
    run: dict[str, Any] | None
    answer: dict[str, Any] | None
    failure: dict[str, Any] | None
    """Of a failed job: the ``text``, and the ``button`` and ``command`` that help."""


class Reporter:
    """Reports the progress of jobs to the client."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tokens: dict[int, lsp.ProgressToken] = {}
        self._jobs: dict[lsp.ProgressToken, int] = {}
        self._clocks: dict[int, asyncio.Task[None]] = {}

    async def begin(self, job: Job, token: lsp.ProgressToken | None) -> None:
        """Start progress reporting with the client's token, or with a new token if the client supports that."""
        window = self._server.client_capabilities.window
        if token is None and window is not None and window.work_done_progress:
            token = f"mtmc-{job.id}"
            await self._server.work_done_progress.create_async(token)
        if token is not None and not job.is_over:
            self._tokens[job.id] = token
            self._jobs[token] = job.id
            begin = lsp.WorkDoneProgressBegin(title=job.title, cancellable=True, message=_message(job))
            self._server.work_done_progress.begin(token, begin)
            self._clocks[job.id] = asyncio.create_task(self._tick(job, token))
        self._notify_state(job)

    def job_of(self, token: lsp.ProgressToken) -> int | None:
        """The id of the job that belongs to a progress token."""
        return self._jobs.get(token)

    async def report(self, job: Job) -> None:
        """Report the current state of the job."""
        token = self._tokens.get(job.id)
        if not job.is_over:
            if token is not None:
                self._report_progress(job, token)
        else:
            if (clock := self._clocks.pop(job.id, None)) is not None:
                clock.cancel()
            message, kind = _outcome(job)
            end = "cancelled" if job.state is JobState.CANCELLED else message
            if token is not None:
                self._server.work_done_progress.end(token, lsp.WorkDoneProgressEnd(message=end))
                self._jobs.pop(self._tokens.pop(job.id), None)
                self._server.work_done_progress.tokens.pop(token, None)
            client_shows_result = self._server.options.shows_results
            if not _is_followed_by_question(job) and not client_shows_result:
                self._server.window_show_message(lsp.ShowMessageParams(kind, message))
        self._notify_state(job)

    def _report_progress(self, job: Job, token: lsp.ProgressToken) -> None:
        report = lsp.WorkDoneProgressReport(message=_message(job), cancellable=True)
        self._server.work_done_progress.report(token, report)

    async def _tick(self, job: Job, token: lsp.ProgressToken) -> None:
        """Show the time each second, also while nothing else changes."""
        while not job.is_over:
            await asyncio.sleep(1.0)
            if job.budget_seconds is not None and not job.is_over:
                self._report_progress(job, token)

    def _notify_state(self, job: Job) -> None:
        if not self._server.options.run_state:
            return
        review = self._server.reviews.get(job.path, job.target)
        failure = self._server.failures.get((job.path, job.target))
        state = RunState(
            job.id,
            job.kind,
            job.uri,
            job.target,
            job.state.value,
            job.stage,
            job.step,
            job.action,
            trials_text(job),
            time.monotonic() - job.began if job.began else 0.0,
            _outcome(job)[0]
            if job.state in (JobState.DONE, JobState.CANCELLED) and not _is_followed_by_question(job)
            else "",
            review.to_json() if review is not None else None,
            job.answer if job.is_over and job.answer.get("event") != "result" else None,
            failure.to_json() if job.is_over and failure is not None else None,
        )
        self._server.protocol.notify(RUN_STATE, state)


class Lenses:
    """Asks the client to refresh lenses.

    VS Code requests lenses 250 ms after the last refresh, so a refresh is not repeated while a request is expected. But VS Code
    forgets the refresh if the editor loses the focus meanwhile.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._timer: asyncio.TimerHandle | None = None
        """Runs while a request of the client is expected."""

    def refresh(self) -> None:
        """Have the client request lenses, unless it will do so anyway."""
        workspace = self._server.client_capabilities.workspace
        can_refresh = workspace is not None and workspace.code_lens is not None and workspace.code_lens.refresh_support
        if can_refresh and self._timer is None:
            self._ask(LENS_REPEATS)

    def requested(self) -> None:
        """The client requested lenses, so they are up to date until the next change."""
        self.close()

    def close(self) -> None:
        """Expect no request any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask(self, repeats: int) -> None:
        self._server.workspace_code_lens_refresh(None)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LENS_SECONDS, self._ask, repeats - 1) if repeats else None


def _is_followed_by_question(job: Job) -> bool:
    """Whether a question that reports the result follows: recorded inputs, or a missing workload."""
    return answer_calls(job.answer) is not None or lacks_workload(job)


def trials_text(job: Job) -> str:
    """``2 of 3 steps accepted · best 1.83x``: what a run did so far; empty before its first step ended."""
    if not job.steps:
        return ""
    accepted = [step for step in job.steps if step["status"] == StepStatus.ACCEPTED.value]
    text = f"{len(accepted)} of {len(job.steps)} {'step' if len(job.steps) == 1 else 'steps'} accepted"
    timing = from_json(Timing, accepted[-1]["timing"]) if accepted and accepted[-1].get("timing") else None
    eager = timing.against("eager") if timing is not None else None
    return f"{text} · best {eager.ratio:.2f}x" if eager is not None else text


def progress_line(job: Job) -> str:
    """What a job does now and what it has found, for one line in the editor."""
    trials = trials_text(job)
    return f"{_stage(job)} · {trials}" if trials else _stage(job)


def _stage(job: Job) -> str:
    return f"step {job.step}: {job.action}: {job.stage}" if job.step else job.stage


def _message(job: Job) -> str:
    stage = _stage(job)
    if job.budget_seconds is None:
        return stage
    return stage_with_time(stage, time.monotonic() - job.began, job.budget_seconds)


def _outcome(job: Job) -> tuple[str, lsp.MessageType]:
    """The result of a job as a message, and its severity."""
    answer = job.answer
    if job.state is JobState.CANCELLED:
        title = f"{job.title[:1].lower()}{job.title[1:]}"
        steps = " Its steps so far are pending." if job.steps else ""
        return job.stop_reason or f"Cancelled {title}.{steps}", lsp.MessageType.Info
    if answer["event"] == "error":
        error = answer["error"]
        line = f", line {error['line']}" if error.get("path") == job.path and error.get("line") else ""
        return f"{job.target}{line}: {failure_text(error, job.path)}", lsp.MessageType.Error
    return f"{job.target}: {_answer_text(answer)}", lsp.MessageType.Info


def _answer_text(answer: dict[str, Any]) -> str:
    kind = answer["event"]
    if kind == "result":
        return headline(from_json(RunResult, answer["result"]))
    if kind == "plan":
        actions = answer["actions"]
        if not actions:
            return "no action is predicted to be worth trying"
        lines = [
            f"{n}. {a['text']} (estimated saving {a['expected']['saved_us']:.0f} us)" for n, a in enumerate(actions, 1)
        ]
        return "\n".join([f"the plan for {answer['device']['name']}:", *lines])
    if kind == "verified":
        return verdict_line(from_json(Verdict, answer["verdict"]))
    if kind == "repaired":
        return str(answer["summary"])
    return recording_text(answer) if kind == "recorded" else _measurement_text(answer)


def lacks_workload(job: Job) -> bool:
    """Whether a job failed because its target has no example inputs."""
    return job.answer.get("event") == "error" and job.answer["error"].get("code") == NoWorkload.code


def answer_calls(answer: dict[str, Any]) -> RecordedTarget | None:
    """The recorded calls, if a workload can be derived from them."""
    calls = from_json(RecordedTarget, answer["calls"]) if answer.get("calls") else None
    return calls if calls is not None and calls.calls and not calls.calls[0].unusable else None


def recording_text(answer: dict[str, Any]) -> str:
    """Summary of a recording."""
    ended = f"; the program ended with exit code {answer['exit_code']}" if answer["exit_code"] else ""
    if answer["calls"] is None:
        reason = "" if answer["python_seen"] else ": it started no Python interpreter, or one that ignores PYTHONPATH"
        return f"the program did not call it with a tensor{reason}{ended}"
    target = from_json(RecordedTarget, answer["calls"])
    if not target.calls:
        return f"called {recording_summary(target)}{ended}"
    times = "once" if target.count == 1 else f"{target.count} times"
    kinds = "" if target.count == 1 else f", in {len(target.calls)} ways" if len(target.calls) > 1 else ", all the same"
    first = target.calls[0]
    return f"called {times}{kinds}: {first.unusable or first.directive}{ended}"


def _measurement_text(answer: dict[str, Any]) -> str:
    if answer["timing"] is None:
        megabytes = answer["bytes"] / 1e6
        return f"not timed: no CUDA GPU. One call moves at least {megabytes:.1f} MB"
    timing = from_json(Timing, answer["timing"])
    baselines = ", ".join(
        f"{b.name} {b.median_us:.1f} us ({ratio_text(b.speedup)})" if b.speedup else b.note for b in timing.baselines
    )
    return f"{timing.median_us:.1f} us, {timing.roofline:.0%} of the roofline; {baselines}"
