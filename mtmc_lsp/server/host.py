"""The process that does one job of the server's: a run, a plan, a measurement.

How it begins and ends is in ``child.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mtmc_lsp.app import pipeline as session
from mtmc_lsp.app import review
from mtmc_lsp.app.backends import BUILTIN, Backends
from mtmc_lsp.app.pipeline import OpenTarget
from mtmc_lsp.app.search_components import Revision, SearchComponents
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import Timing, Verdict
from mtmc_lsp.core.run import Candidate, RunResult, Step
from mtmc_lsp.core.settings import override_settings, read_settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.search.greedy import Events
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.server.child import begin, tell


class Engine(Protocol):
    """What a job needs of search. :class:`SearchEngine` is the real one; tests of the server alone bring a fake."""

    def open(self, path: Path, qualname: str, text: bytes, settings: dict[str, Any]) -> OpenTarget:
        """The target in the text that the editor holds."""

    def capture(self, opened: OpenTarget) -> Capture:
        """Its graph."""

    def plan(self, opened: OpenTarget, capture: Capture) -> tuple[list[MacroAction], DeviceModel]:
        """What could come first."""

    def optimize(
        self,
        opened: OpenTarget,
        capture: Capture,
        store: Store,
        events: Events,
        resumed: RunRecord | None,
        *,
        consented: bool,
    ) -> RunResult:
        """A run; ``consented`` is whether the user agreed that a model is asked."""

    def tools(
        self, opened: OpenTarget, capture: Capture, steps: Sequence[Step] = (), *, consented: bool = False
    ) -> SearchComponents:
        """What a search works with, also one that revises ``steps``; its measurer is to be closed."""

    def end(self) -> None:
        """Leave no process behind, whatever is going on; called at the end, and from a signal's handler."""


class SearchEngine:
    """The search as the command line does it; it serves one job."""

    def __init__(self) -> None:
        self._fork_server: ForkServer | None = None

    def open(self, path: Path, qualname: str, text: bytes, settings: dict[str, Any]) -> OpenTarget:
        archs = settings.pop("archs", None)
        python = settings.pop("python", None) or ""
        chosen = override_settings(read_settings(path.parent), archs=tuple(archs) if archs else None, **settings)
        request = session.parse_request(f"{path}::{qualname}", chosen, python)
        opened = session.open_target(request, text)
        self._fork_server = session.warmed(opened)
        return opened

    def capture(self, opened: OpenTarget) -> Capture:
        return session.capture_target(opened, self._fork_server)

    def plan(self, opened: OpenTarget, capture: Capture) -> tuple[list[MacroAction], DeviceModel]:
        return session.plan(opened, capture, self._fork_server)

    def optimize(
        self,
        opened: OpenTarget,
        capture: Capture,
        store: Store,
        events: Events,
        resumed: RunRecord | None,
        *,
        consented: bool,
    ) -> RunResult:
        makers = self._makers(opened, consented=consented)
        return session.optimize(
            opened, capture, store, events, resumed=resumed, makers=makers, fork_server=self._fork_server
        )

    def tools(
        self, opened: OpenTarget, capture: Capture, steps: Sequence[Step] = (), *, consented: bool = False
    ) -> SearchComponents:
        makers = self._makers(opened, consented=consented)
        measurer = session.open_measurer(opened, capture, fork_server=self._fork_server)
        return session.open_tools(opened, capture, makers, steps=steps, measurer=measurer)

    def end(self) -> None:
        # It may be importing, and would look up only afterwards; and whoever waits for a copy waits for it.
        if self._fork_server is not None:
            self._fork_server.kill()

    @staticmethod
    def _makers(opened: OpenTarget, *, consented: bool) -> Backends:
        return Backends.of(opened.request.settings) if consented else BUILTIN


class Job:
    """One request and where its events go."""

    def __init__(self, engine: Engine, request: dict[str, Any], out: Any) -> None:
        self._engine = engine
        self._request = request
        self._out = out

    def run(self) -> None:
        """Do it; errors that are meant for the user are an event too."""
        kinds = {
            "optimize": self._optimize,
            "resume": self._optimize,
            "plan": self._plan,
            "measure": self._measure,
            "verify": self._verify,
            "undo": self._review,
            "another": self._review,
        }
        try:
            request = self._request
            text = str(request["text"]).encode("utf-8", "surrogatepass")
            opened = self._engine.open(Path(request["path"]), request["target"], text, dict(request["settings"]))
            self._tell("stage", text="capturing the target")
            capture = self._engine.capture(opened)
            kinds[request["kind"]](opened, capture)
        except MtmcError as error:
            self._tell("error", error=error.to_json())

    def _tell(self, event: str, **values: Any) -> None:
        tell(self._out, event, **values)

    def _events(self) -> Events:
        return Events(
            on_action=lambda index, action: self._tell("action", step=index, text=action.text or action.kind.value),
            on_stage=lambda text: self._tell("stage", text=text),
            on_step=lambda step: self._tell("step", step=to_json(step)),
            on_replayed=lambda step: self._tell("step", step=to_json(step)),
            on_withdrawn=lambda step: self._tell("withdrawn", step=to_json(step)),
        )

    def _optimize(self, opened: OpenTarget, capture: Capture) -> None:
        with session.open_store(opened.request.path) as store:
            resumed = session.unfinished(store, run=self._request["run"]) if self._request["kind"] == "resume" else None
            consented = self._request.get("consented") is True
            result = self._engine.optimize(opened, capture, store, self._events(), resumed, consented=consented)
        self._tell("result", result=to_json(result))

    def _plan(self, opened: OpenTarget, capture: Capture) -> None:
        actions, device = self._engine.plan(opened, capture)
        self._tell("plan", actions=to_json(actions), device=to_json(device))

    def _review(self, opened: OpenTarget, capture: Capture) -> None:
        asked = self._request
        revision = Revision(asked["kind"], asked["run"], int(asked["step"]), str(asked.get("remark") or ""))
        with session.open_store(opened.request.path) as store:
            steps = store.steps(revision.run)
            tools = self._engine.tools(opened, capture, steps, consented=asked.get("consented") is True)
            try:
                result = review.revised(opened, capture, store, self._events(), revision, tools)
            finally:
                tools.measurer.close()
        self._tell("result", result=to_json(result))

    # Of the code as it is in the editor now ------------------------------------------------------------------------

    def _measure(self, opened: OpenTarget, capture: Capture) -> None:
        self._tell("stage", text="timing")
        timing: Timing | None = self._with_measurer(opened, capture, "time")
        self._tell("measured", timing=to_json(timing), flops=capture.flops, bytes=capture.bytes)

    def _verify(self, opened: OpenTarget, capture: Capture) -> None:
        self._tell("stage", text="verifying")
        verdict: Verdict = self._with_measurer(opened, capture, "verify")
        self._tell("verified", verdict=to_json(verdict))

    def _with_measurer(self, opened: OpenTarget, capture: Capture, what: str) -> Any:
        present = Candidate("present", None, None, opened.text.decode(), None, None)
        measurer = self._engine.tools(opened, capture).measurer
        try:
            return measurer.verify(present) if what == "verify" else measurer.time(present, None)
        finally:
            measurer.close()


def serve(engine: Engine) -> None:
    """Do the one job that standard input asks for."""
    request, out = begin(engine.end)
    try:
        Job(engine, request, out).run()
    finally:
        engine.end()


if __name__ == "__main__":
    serve(SearchEngine())
