"""The process that does one job for the server: a run, a plan, a measurement, a verification.

How the process begins and ends is in ``child.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.app.kernels.opening import is_kernel_target, open_kernel
from mtmc_lsp.app.kernels.optimize import KernelOptimization
from mtmc_lsp.app.kernels.repair import repair_kernel
from mtmc_lsp.app.kernels.repair_run import store_repair
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.run_recorder import Revision
from mtmc_lsp.app.stored_runs import find_unfinished, keep_search, open_store
from mtmc_lsp.app.target_file import OpenTarget, open_target, parse_request
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.settings import override_settings, read_settings
from mtmc_lsp.evolve.keeping import keep_version
from mtmc_lsp.evolve.stored import stored_evolution
from mtmc_lsp.search.components import Events
from mtmc_lsp.server.child import begin, report


class Job:
    """Does the job of one request; its progress and its result are events."""

    def __init__(self, pipeline: type[Pipeline] = Pipeline) -> None:
        """Prepare; ``pipeline`` runs the job."""
        self._pipeline_type = pipeline
        self._pipeline: Pipeline | None = None
        self._repairing: KernelSession | None = None
        self._optimization: KernelOptimization | None = None

    def run(self, request: dict[str, Any], out: TextIO) -> None:
        """Do the job; an error that is meant for the user is an event too."""
        jobs = {
            "optimize": self._optimize,
            "resume": self._optimize,
            "certify": self._optimize,
            "undo": self._optimize,
            "another": self._optimize,
            "plan": self._plan,
            "measure": self._measure,
            "verify": self._verify,
        }
        self._request, self._out = request, out
        try:
            target = self.open_target(request)
            if request["kind"] == "repair":
                self._repair(target)
                return
            if request["kind"] == "keepVersion":
                self._keep_version(target)
                return
            if request["kind"] == "optimize" and is_kernel_target(target):
                self._optimize_kernels(target)
                return
            options = self._options(target)
            if options.resumed is not None:
                target = keep_search(target, options.resumed)
            self._pipeline = self._pipeline_type(target, options, self._events())
            with self._pipeline as pipeline:
                jobs[request["kind"]](pipeline)
        except MtmcError as error:
            self._report("error", error=error.to_json())

    def kill(self) -> None:
        """End every process of the job without waiting; also called by a signal handler."""
        if self._pipeline is not None:
            self._pipeline.kill()
        if self._repairing is not None:
            self._repairing.kill()
        if self._optimization is not None:
            self._optimization.kill()

    def open_target(self, request: dict[str, Any]) -> OpenTarget:
        """The target in the text that the editor holds."""
        settings, path = dict(request["settings"]), Path(request["path"])
        archs = settings.pop("archs", None)
        python = settings.pop("python", None) or ""
        project_settings = override_settings(
            read_settings(path.parent), archs=tuple(archs) if archs else None, **settings
        )
        return open_target(parse_request(f"{path}::{request['target']}", project_settings, python), text_of(request))

    def _options(self, target: OpenTarget) -> RunOptions:
        request, kind = self._request, self._request["kind"]
        has_consent = request.get("consented") is True
        chosen = Backends.from_settings(target.settings)
        backends = chosen if has_consent else chosen.without_model
        resumed, revision = None, None
        if kind in ("resume", "certify"):
            with open_store(target.path) as store:
                resumed = find_unfinished(store, run=request["run"])
        if kind in ("undo", "another"):
            revision = Revision(kind, request["run"], int(request["step"]), str(request.get("remark") or ""))
        return RunOptions(backends, resumed=resumed, revision=revision)

    def _report(self, event: str, **values: Any) -> None:
        report(self._out, event, **values)

    def _events(self) -> Events:
        return Events(
            on_action=lambda index, action: self._report("action", step=index, text=action.text or action.kind.value),
            on_stage=lambda text: self._report("stage", text=text),
            on_step=lambda step: self._report("step", step=to_json(step)),
            on_replayed=lambda step: self._report("step", step=to_json(step)),
            on_withdrawn=lambda step: self._report("changed", step=to_json(step)),
            on_retimed=lambda step: self._report("changed", step=to_json(step)),
            on_switched=lambda step: self._report("changed", step=to_json(step)),
        )

    def _optimize(self, pipeline: Pipeline) -> None:
        self._report("budget", seconds=pipeline.target.settings.budget_seconds)
        self._report("result", result=to_json(pipeline.optimize()))

    def _optimize_kernels(self, target: OpenTarget) -> None:
        self._report("budget", seconds=target.settings.budget_seconds)
        self._optimization = KernelOptimization(target, self._events(), only=self._request.get("only", ()))
        self._report("result", result=to_json(self._optimization.run(target.settings.budget_seconds)))

    def _keep_version(self, target: OpenTarget) -> None:
        with open_store(target.path) as store:
            stored = stored_evolution(store, self._request["run"])
        result = keep_version(stored, self._request["version"], target, self._events(), self._opened)
        self._report("result", result=to_json(result))

    def _opened(self, target: OpenTarget, options: RunOptions, events: Events) -> Pipeline:
        self._pipeline = self._pipeline_type(target, options, events)
        return self._pipeline

    def _plan(self, pipeline: Pipeline) -> None:
        actions, device = pipeline.plan()
        self._report("plan", actions=to_json(actions), device=to_json(device))

    def _measure(self, pipeline: Pipeline) -> None:
        timing, capture = pipeline.time_file(), pipeline.capture()
        self._report("measured", timing=to_json(timing), flops=capture.flops, bytes=capture.bytes)

    def _verify(self, pipeline: Pipeline) -> None:
        self._report("verified", verdict=to_json(pipeline.verify_file()))

    def _repair(self, target: OpenTarget) -> None:
        self._repairing = KernelSession(open_kernel(target), lambda text: self._report("stage", text=text))
        with self._repairing as session:
            report = repair_kernel(session)
            # A repair that the user confirms is a kept step, which can be undone.
            result = store_repair(session, report, 0.0)
        text = report.result.text.decode() if report.is_repaired else None
        run = result.id if result is not None else None
        self._report("repaired", summary=report.summary, text=text, run=run)


def text_of(request: dict[str, Any]) -> bytes:
    """The text of the file as the editor holds it."""
    return str(request["text"]).encode("utf-8", "surrogatepass")


def serve(job: Job) -> None:
    """Do the one job that standard input requests."""
    request, out = begin(job.kill)
    try:
        job.run(request, out)
    finally:
        job.kill()


if __name__ == "__main__":
    serve(Job())
