"""A host whose search results are scripted in the user's file: ``# fake f: better wrong sleep far`` at the top.

Planner and measurer are fake. The store, the greedy search, the composition of files and the protocol are real.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "search"))
from fakes import FakeMeasurer, FakePlanner, action, capture

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.target_file import OpenTarget, Request, open_target
from mtmc_lsp.codegen.standalone import placed
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.protocols import CannotCode, Coder, Planner
from mtmc_lsp.core.results import Check, CheckStatus, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, GeneratedCode, Placement, Step
from mtmc_lsp.core.settings import Settings, override_settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve import keeping
from mtmc_lsp.server.host import Job, serve, text_of
from mtmc_lsp.source.compose import compose
from mtmc_lsp.source.dependencies import with_definitions
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.delivery import GUARD_ACCEPTS

GAIN = {"better": 0.8, "needs-two": 0.8, "far": 0.8, "sleep": 0.8, "nap": 0.5, "same": 1.0, "slower": 1.5}
FIRST = "nap-first"
"""Twice as fast on the user's code, and slower after another action. Its verification takes as long as a nap's."""


class ComposingCoder:
    """Coder that adds one line to the kernel body for each action."""

    def __init__(self, place: Placement) -> None:
        self._place = place

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
        code = placed(code, self._place, own.encode())
        target = find_target(own.encode(), capture.workload.target.path, name)
        gain = GAIN["slower" if schedule["lines"] else "nap"] if outcome == FIRST else GAIN.get(outcome, 1.0)
        us = schedule["us"] * gain
        return Candidate(
            f"{candidate.id}/{action.text}",
            candidate.id,
            action,
            compose(own.encode(), target, code).decode(),
            code,
            {"us": us, "outcome": outcome, "lines": lines, "own": own},
        )


class SleepingMeasurer(FakeMeasurer):
    """Sleeps if the outcome is ``sleep``, and a short time if it is ``nap``."""

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        if isinstance(candidate.schedule, dict) and candidate.schedule["outcome"] == "sleep":
            time.sleep(60)
        if isinstance(candidate.schedule, dict) and candidate.schedule["outcome"] in ("nap", FIRST):
            time.sleep(2)
        if isinstance(candidate.schedule, dict) and candidate.schedule["outcome"] == "needs-two":
            is_correct = len(candidate.schedule["lines"]) > 2
            return super().verify(_with_outcome(candidate, "better" if is_correct else "wrong"))
        # What the editor holds of a file that says so is wrong.
        if candidate.id == "current" and "incorrect" in candidate.source:
            return Verdict(VerdictStatus.INCORRECT, (), "gpu", 0.5, 1e-7, "values: relative error 0.5")
        if candidate.id == "current" and "# refused" in candidate.source:
            check = Check(GUARD_ACCEPTS, CheckStatus.FAILED, "", "x is float16; the kernels were made for float32")
            return Verdict(VerdictStatus.RUNTIME_ERROR, (check,), "gpu", reason=check.detail)
        return super().verify(timed(candidate))

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        return super().time(timed(candidate), previous)

    def time_with_baselines(
        self, candidate: Candidate, previous: Candidate | None, wait: float | None
    ) -> Timing | None:
        return self.time(candidate, previous)


def _with_outcome(candidate: Candidate, outcome: str) -> Candidate:
    return replace(candidate, schedule={**candidate.schedule, "outcome": outcome})  # type: ignore[dict-item]


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


class FakePipeline(Pipeline):
    """See the module."""

    def _start_fork_server(self) -> None:
        return None

    def _run_capture(self) -> Capture:
        if "broken" in self._outcomes:
            raise RequestError("the target raises ValueError", remedy="Correct it.")
        target, path = self.target, str(self.target.path)
        made = capture(path)
        # A worker finds what the target reads by running the file; here the file says it: ``# reads f: K=3 helper cfg.SCALE=2.0``.
        reads = re.search(rf"# reads {re.escape(target.qualname)}: ([^\r\n]*)", target.text.decode())
        recorded = [_dependency(word, path) for word in (reads[1].split() if reads else [])]
        known = with_definitions(recorded, target.definition, target.plain, [str(target.project)])
        graph = replace(made.graph, dependencies=known)
        return replace(made, workload=replace(made.workload, target=target.definition), graph=graph)

    def _open_measurer(self, capture: Capture) -> FakeMeasurer:
        return FarSeeingMeasurer() if "far" in self._outcomes else SleepingMeasurer()

    def _open_backends(self, model: object, steps: Sequence[Step]) -> tuple[Planner, Coder]:
        return FakePlanner(self._actions), ComposingCoder(Placement(self.target.settings.place))

    def plan(self) -> tuple[list[MacroAction], DeviceModel]:
        self.capture()
        return self._actions, FakeMeasurer().device()

    @property
    def _outcomes(self) -> Sequence[str]:
        name = re.escape(self.target.qualname)
        match = re.search(rf"# fake {name}: ([^\r\n]*)", self.target.text.decode("utf-8", "replace"))
        return match[1].split() if match else ["better", "better", "better"]

    @property
    def _actions(self) -> list[MacroAction]:
        return [action(number, outcome) for number, outcome in enumerate(self._outcomes, 1)]


class FakeJob(Job):
    """A job whose target needs no interpreter with torch."""

    def open_target(self, request: dict[str, Any]) -> OpenTarget:
        settings = {"budget_seconds": 60.0, "max_steps": 20, **request["settings"]}
        settings.pop("python", None)
        archs = settings.pop("archs", None)
        chosen = override_settings(Settings(), archs=tuple(archs) if archs else None, **settings)
        return open_target(Request(Path(request["path"]), request["target"], chosen, sys.executable), text_of(request))


if __name__ == "__main__":
    # Versions of evolutions are written by the same coder.
    keeping.BuiltinCoder = lambda device, place: ComposingCoder(place)  # type: ignore[assignment,misc]
    serve(FakeJob(FakePipeline))
