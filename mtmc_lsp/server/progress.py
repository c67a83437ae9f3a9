"""What the user sees of a job while it goes on: progress, and messages where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from lsprotocol import types as lsp

from mtmc_lsp.capture.recorded_calls import RecordedTarget
from mtmc_lsp.core.errors import NoWorkload
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.results import Timing, Verdict
from mtmc_lsp.core.run import RunResult
from mtmc_lsp.report.phrases import headline, ratio_text, verdict_line
from mtmc_lsp.server.jobs import Job, JobState

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

RUN_STATE = "mtmc/runState"


@attrs.define
class RunState:
    """Parameters of ``mtmc/runState``: a job with the whole run so far."""

    job: int
    kind: str
    uri: str
    target: str
    state: str
    stage: str
    step: int
    action: str
    result: str
    """What it came to, in words; empty where it did not come to its end, or a question follows that says it."""
    run: dict[str, Any] | None
    answer: dict[str, Any] | None


class Reporter:
    """Tells the client about jobs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._began: dict[int, lsp.ProgressToken] = {}
        self._jobs: dict[lsp.ProgressToken, int] = {}

    async def begin(self, job: Job, token: lsp.ProgressToken | None) -> None:
        """Open the job's progress: the client's own token, or one of ours where the client shows such."""
        window = self._server.client_capabilities.window
        if token is None and window is not None and window.work_done_progress:
            token = f"mtmc-{job.id}"
            await self._server.work_done_progress.create_async(token)
        if token is not None and not job.is_over:
            self._began[job.id] = token
            self._jobs[token] = job.id
            begin = lsp.WorkDoneProgressBegin(title=job.title, cancellable=True, message=_message(job))
            self._server.work_done_progress.begin(token, begin)
        self._tell_state(job)

    def job_of(self, token: lsp.ProgressToken) -> int | None:
        """The number of the job that a progress is about."""
        return self._jobs.get(token)

    async def report(self, job: Job) -> None:
        """Say what is new."""
        token = self._began.get(job.id)
        if not job.is_over:
            if token is not None:
                report = lsp.WorkDoneProgressReport(message=_message(job), cancellable=True)
                self._server.work_done_progress.report(token, report)
        else:
            words, kind = _outcome(job)
            if token is not None:
                self._server.work_done_progress.end(token, lsp.WorkDoneProgressEnd(message=words))
                self._jobs.pop(self._began.pop(job.id), None)
                self._server.work_done_progress.tokens.pop(token, None)
            is_client_telling = self._server.options.tells_results and job.state is JobState.DONE
            if job.state is not JobState.CANCELLED and not _is_asked(job) and not is_client_telling:
                self._server.window_show_message(lsp.ShowMessageParams(kind, words))
        self._tell_state(job)

    def _tell_state(self, job: Job) -> None:
        if not self._server.options.run_state:
            return
        review = self._server.reviews.get(job.path, job.target)
        state = RunState(
            job.id,
            job.kind,
            job.uri,
            job.target,
            job.state.value,
            job.stage,
            job.step,
            job.action,
            _outcome(job)[0] if job.state is JobState.DONE and not _is_asked(job) else "",
            review.to_json() if review is not None else None,
            job.answer if job.is_over and job.answer.get("event") != "result" else None,
        )
        self._server.protocol.notify(RUN_STATE, state)


def _is_asked(job: Job) -> bool:
    """Whether the question that follows says it, ours or the client's own: what was recorded, or that there is no workload."""
    return answer_calls(job.answer) is not None or lacks_workload(job)


def _message(job: Job) -> str:
    return f"step {job.step}: {job.action}: {job.stage}" if job.step else job.stage


def _outcome(job: Job) -> tuple[str, lsp.MessageType]:
    """How a job ended, in words."""
    answer = job.answer
    if job.state is JobState.CANCELLED:
        return "cancelled", lsp.MessageType.Info
    if answer["event"] == "error":
        error = answer["error"]
        place = f"{error['path']}:{error['line']}: " if error.get("path") and error.get("line") else ""
        return f"{job.target}: {place}{error['message']}. {error.get('remedy') or ''}".rstrip(), lsp.MessageType.Error
    return f"{job.target}: {_answer_words(answer)}", lsp.MessageType.Info


def _answer_words(answer: dict[str, Any]) -> str:
    kind = answer["event"]
    if kind == "result":
        return headline(from_json(RunResult, answer["result"]))
    if kind == "plan":
        actions = answer["actions"]
        if not actions:
            return "no action is predicted to be worth trying"
        lines = [
            f"{n}. {a['text']} (about {a['expected']['saved_us']:.0f} us saved, an estimate)"
            for n, a in enumerate(actions, 1)
        ]
        return "\n".join([f"the plan for {answer['device']['name']}:", *lines])
    if kind == "verified":
        return verdict_line(from_json(Verdict, answer["verdict"]))
    return recorded_words(answer) if kind == "recorded" else _measured_words(answer)


def lacks_workload(job: Job) -> bool:
    """Whether a job ended because nothing says what its target is called with."""
    return job.answer.get("event") == "error" and job.answer["error"].get("code") == NoWorkload.code


def answer_calls(answer: dict[str, Any]) -> RecordedTarget | None:
    """The calls that a recording ended with, where a workload can be made of them."""
    calls = from_json(RecordedTarget, answer["calls"]) if answer.get("calls") else None
    return calls if calls is not None and not calls.calls[0].unusable else None


def recorded_words(answer: dict[str, Any]) -> str:
    """What a recorded program called."""
    ended = f"; the program ended with exit code {answer['exit_code']}" if answer["exit_code"] else ""
    if answer["calls"] is None:
        why = "" if answer["python_seen"] else ": no Python ran in it, or it was told to ignore PYTHONPATH"
        return f"the program did not call it with a tensor{why}{ended}"
    target = from_json(RecordedTarget, answer["calls"])
    times = "once" if target.count == 1 else f"{target.count} times"
    kinds = "" if target.count == 1 else f", in {len(target.calls)} ways" if len(target.calls) > 1 else ", all the same"
    first = target.calls[0]
    return f"called {times}{kinds}: {first.unusable or first.directive}{ended}"


def _measured_words(answer: dict[str, Any]) -> str:
    if answer["timing"] is None:
        moved = answer["bytes"] / 1e6
        return f"not timed: no CUDA GPU. One call moves at least {moved:.1f} MB"
    timing = from_json(Timing, answer["timing"])
    against = ", ".join(f"{b.name} {b.median_us:.1f} us ({ratio_text(b.speedup)})" for b in timing.baselines)
    return f"{timing.median_us:.1f} us, {timing.roofline:.0%} of the roofline; {against}"
