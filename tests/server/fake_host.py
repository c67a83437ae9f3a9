"""A host whose search results are scripted in the user's file: ``# fake f: better wrong sleep far`` at the top.

Planner and measurer are fake. The store, the greedy search, the composition of files and the protocol are real.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "search"))
from fakes import ENVIRONMENT, FakeMeasurer, FakePlanner, action, capture

from mtmc_lsp.app import pipeline as session
from mtmc_lsp.app.pipeline import OpenTarget, Request
from mtmc_lsp.app.search_components import SearchComponents
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import Check, CheckStatus, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, GeneratedCode, RunResult, Step
from mtmc_lsp.core.settings import Settings, override_settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.greedy import Events, GreedySearch, Limits
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.server.host import serve
from mtmc_lsp.source.compose import compose
from mtmc_lsp.source.dependencies import with_definitions
from mtmc_lsp.source.targets import find_target

GAIN = {"better": 0.8, "far": 0.8, "same": 1.0, "slower": 1.5}


class ComposingCoder:
    """Coder that adds one line to the kernel body for each action."""

    def start(self, capture: Capture, source: str) -> Candidate:
        return Candidate("root", None, None, source, None, {"us": 100.0, "outcome": "root", "lines": [], "own": source})

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        outcome = str(action.params["outcome"])
        if outcome == "uncoded":
            raise CannotCode("there is no such thing")
        schedule: Any = candidate.schedule
        own, name = schedule["own"], capture.workload.target.qualname
        short = name.replace(".", "_")
        lines = [*schedule["lines"], f"    pass  # {action.text}"]
        block = "\n".join(["@triton.jit", f"def {short}_kernel():", *lines]) + "\n"
        code = GeneratedCode(("import triton",), block, f"if x is None:\n    return {short}_kernel(x)\n")
        target = find_target(own.encode(), capture.workload.target.path, name)
        us = schedule["us"] * GAIN.get(outcome, 1.0)
        return Candidate(
            f"{candidate.id}/{action.text}",
            candidate.id,
            action,
            compose(own.encode(), target, code).decode(),
            code,
            {"us": us, "outcome": outcome, "lines": lines, "own": own},
        )


class SleepingMeasurer(FakeMeasurer):
    """Sleeps if the outcome is ``sleep``."""

    def verify(self, candidate: Candidate) -> Verdict:
        if isinstance(candidate.schedule, dict) and candidate.schedule["outcome"] == "sleep":
            time.sleep(60)
        # The text in the editor is incorrect if it contains this word.
        if candidate.id == "present" and "incorrect" in candidate.source:
            return Verdict(VerdictStatus.INCORRECT, (), "gpu", 0.5, 1e-7, "values: relative error 0.5")
        return super().verify(timed(candidate))

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        return super().time(timed(candidate), previous)


class FarSeeingMeasurer(SleepingMeasurer):
    """Rejects the outcome ``far`` in the test with more than 2^31 elements."""

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        is_wrong = isinstance(candidate.schedule, dict) and candidate.schedule["outcome"] == "far"
        status = CheckStatus.FAILED if is_wrong else CheckStatus.PASSED
        return Check("offsets beyond 2^31", status, "s0=2^31", "values: all wrong" if is_wrong else "")


def timed(candidate: Candidate) -> Candidate:
    """The candidate; for the text in the editor, one that takes 50 us."""
    return replace(candidate, schedule=candidate.schedule or {"us": 50.0, "outcome": "better"})


def _dependency(word: str, path: str) -> Dependency:
    """``K=3`` is a value of the file, ``cfg.SCALE=2.0`` one of the file beside it, ``helper`` a function."""
    name, _, value = word.partition("=")
    module, _, qualname = name.rpartition(".")
    file = str(Path(path).parent / f"{module}.py") if module else path
    kind = DependencyKind.VALUE if value else DependencyKind.CODE
    return Dependency(name, kind, value=value, path=file, qualname=qualname)


class FakeEngine:
    """Engine with scripted results; see the module docstring."""

    def open(self, path: Path, qualname: str, text: bytes, settings: dict[str, Any]) -> OpenTarget:
        settings.pop("python", None)
        archs = settings.pop("archs", None)
        chosen = override_settings(Settings(), archs=tuple(archs) if archs else None, **settings)
        return session.open_target(Request(path, qualname, chosen, sys.executable), text)

    def capture(self, opened: OpenTarget) -> Capture:
        if "broken" in self._outcomes(opened):
            raise RequestError("the target raises ValueError", remedy="Fix it.")
        captured = capture(str(opened.request.path))
        path = str(opened.request.path)
        # A real worker records what the target reads. Here the text declares it: ``# reads f: K=3 helper cfg.SCALE=2.0``.
        reads = re.search(rf"# reads {re.escape(opened.target.qualname)}: ([^\r\n]*)", opened.text.decode())
        recorded = [_dependency(word, path) for word in (reads[1].split() if reads else [])]
        dependencies = with_definitions(recorded, opened.target, opened.plain, [str(opened.root)])
        graph = replace(captured.graph, dependencies=dependencies)
        return replace(captured, workload=replace(captured.workload, target=opened.target), graph=graph)

    def plan(self, opened: OpenTarget, capture: Capture) -> tuple[list[MacroAction], DeviceModel]:
        return self._actions(opened), FakeMeasurer().device()

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
        path, qualname = str(opened.request.path), opened.target.qualname
        done = store.steps(resumed.id) if resumed is not None else []
        run = resumed.id if resumed is not None else store.begin(path, qualname, opened.source_hash, ENVIRONMENT)

        def on_step(step: Any) -> None:
            store.add_step(run, step)
            events.on_step(step)

        tools = self.tools(opened, capture)
        search = GreedySearch(
            capture,
            opened.plain.decode(),
            tools.planner,
            tools.coder,
            tools.measurer,
            has_gpu=True,
            limits=tools.limits,
            events=replace(events, on_step=on_step),
        )
        result = search.run(run, opened.source_hash, done)
        store.finish(result)
        return result

    def tools(
        self, opened: OpenTarget, capture: Capture, steps: Sequence[Step] = (), *, consented: bool = False
    ) -> SearchComponents:
        measurer = FarSeeingMeasurer() if "far" in self._outcomes(opened) else SleepingMeasurer()
        return SearchComponents(FakePlanner(self._actions(opened)), ComposingCoder(), measurer, True, Limits(60.0, 20))

    def end(self) -> None:
        """There is no process to end."""

    @staticmethod
    def _outcomes(opened: OpenTarget) -> Sequence[str]:
        name = re.escape(opened.target.qualname)
        match = re.search(rf"# fake {name}: ([^\r\n]*)", opened.text.decode("utf-8", "replace"))
        return match[1].split() if match else ["better", "better", "better"]

    def _actions(self, opened: OpenTarget) -> list[MacroAction]:
        return [action(number, outcome) for number, outcome in enumerate(self._outcomes(opened), 1)]


if __name__ == "__main__":
    serve(FakeEngine())
