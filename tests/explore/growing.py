"""Actions, a coder and a measurer that need no torch: the name of an operation says what comes of an action on it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.core.learning.transitions import Outcome, Program
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import CompileReport, KernelReport
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture, Environment, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.explore.choices import variants_of
from mtmc_lsp.explore.growth import Grower, Growth
from mtmc_lsp.explore.identity import portable, program_id
from mtmc_lsp.explore.judgement import Judgement, timed_outcome
from mtmc_lsp.explore.parquet import Writer, read_transitions, read_versions

SOURCE = "def f(x):\n    return x + 1  # SECRET\n"
SPEEDUPS = {"fast": 1.25, "same": 1.0, "slow": 0.5}
ENVIRONMENT = "torch 2.13.0, triton 3.9.0, mtmc 0.1.0 (abc)"


def capture(gpu: bool = False, path: str = "/project/model.py", name: str = "f") -> Capture:
    """What a capture of ``f`` would be, as far as exploring looks."""
    environment = Environment("3.11", "2.13.0", "3.9.0", *(("Fake GPU", "sm_90") if gpu else ()))
    workload = Workload(Target(path, name, TargetKind.FUNCTION, 1, 2), WorkloadSource.DIRECTIVE)
    nodes = (Node("n0", "aten.relu.default", (), {}, ()),)
    return Capture(workload, Graph((), nodes, (), "tensor", {}), (), environment, 1.0, 1.0, "model")


def program(captured: Capture, family: str = "norm", source: str = "") -> Program:
    """The program of a capture as it is stored."""
    return Program(program_id(captured), "suite/f", family, "generated", portable(captured), source)


def action(name: str, **params: object) -> MacroAction:
    """An action whose outcome is the part of its name before the colon."""
    kind = ActionKind.AUTOTUNE if "variants" in params else ActionKind.FUSE
    return MacroAction(kind, (name,), (2, 2), {"name": name, **params}, "why", Expected(1.0), f"do {name}")


class FakeActions:
    """The same actions in every state, each once on a path."""

    def __init__(self, listed: Sequence[MacroAction], unlisted: Sequence[MacroAction] = ()) -> None:
        self._listed, self._unlisted = listed, unlisted
        self.calls = 0

    def legal(
        self, state: State, tried: Collection[str], count: int, rng: random.Random
    ) -> tuple[list[tuple[int, MacroAction]], list[MacroAction]]:
        self.calls += 1
        known = {*tried, *(step.action.key for step in state.history)}
        listed = [item for item in self._listed if item.key not in known]
        return list(enumerate(listed)), [item for item in self._unlisted if item.key not in known]


class FakeCoder:
    """A version is the set of actions on its path: their order does not matter."""

    def start(self, capture: Capture, source: str) -> Candidate:
        return self._candidate(source, [])

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        name = str(action.params["name"])
        if name.startswith("illegal"):
            raise CannotCode("it is not possible\n  more in /project/model.py")
        names = candidate.schedule["kernels"]  # type: ignore[index]
        return self._candidate(candidate.source, names if name.startswith("nothing") else [*names, name])

    def rewrite(self, capture: Capture, source: str, schedule: object) -> Candidate:
        return self._candidate(source, schedule["kernels"])  # type: ignore[index]

    @staticmethod
    def _candidate(source: str, names: list[str]) -> Candidate:
        return Candidate(" ".join(names), None, None, source, None, {"kernels": names, "kernel_names": [len(names)]})


class FakeMeasurer:
    """Judges a version by the last action on its path, and counts its calls."""

    def __init__(self, *, has_gpu: bool = False, most_at_once: int = 100) -> None:
        self.has_gpu, self.most_at_once = has_gpu, most_at_once
        self.compiled: Counter[str] = Counter()
        self.judged: Counter[tuple[str, str]] = Counter()
        """Pairs of the version before and the version."""

    def device(self) -> DeviceModel:
        return replace(model_of_arch("sm_90"), name="Fake GPU")

    def compile(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        self.compiled.update(candidate.id for candidate in candidates)
        return [self._report(_last(candidate)) for candidate in candidates]

    def judge(self, before: Candidate, groups: Sequence[Sequence[Candidate]]) -> list[list[Judgement]]:
        self.judged.update((before.id, candidate.id) for group in groups for candidate in group)
        return [[self._judgement(_last(candidate)) for candidate in group] for group in groups]

    @staticmethod
    def _report(name: str) -> CompileReport:
        if name.startswith("endless"):
            return CompileReport((KernelReport("f_kernel", "sm_90", error="took too long", ran_out_of_time=True),))
        error = "no such function" if name.startswith("uncompiled") else ""
        return CompileReport((KernelReport("f_kernel", "sm_90", error=error),))

    def _judgement(self, name: str) -> Judgement:
        kind = name.partition(":")[0]
        if kind == "wrong":
            return Judgement(Outcome.WRONG, "values differ in /project/model.py\nhere: x + 1")
        if not self.has_gpu:
            return Judgement(Outcome.CORRECT)
        ratio = SPEEDUPS[kind]
        return Judgement(timed_outcome(ratio, 0.01), "", 100.0, 100.0 / ratio, ratio, 0.01)


def _last(candidate: Candidate) -> str:
    names: list[str] = candidate.schedule["kernels"]  # type: ignore[index]
    return names[-1]


ACTIONS = [action(name) for name in ("fast:a", "slow:b", "wrong:c", "uncompiled:d", "illegal:e", "nothing:f", "same:g")]
UNLISTED = [action("fast:random"), action("wrong:random")]
TUNING = action("tune", variants=[{"name": "slow:v1"}, {"name": "fast:v2"}, {"name": "uncompiled:v3"}])
assert len(variants_of(TUNING)) == 3


class Clock:
    """A clock that runs on by a second with each look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def grow(
    folder: Path,
    *,
    listed: Sequence[MacroAction] = ACTIONS,
    unlisted: Sequence[MacroAction] = UNLISTED,
    has_gpu: bool = False,
    seconds: float = 1e9,
    depth: int = 2,
    width: int = 9,
    seed: int = 0,
    measurer: FakeMeasurer | None = None,
    writer: Writer | None = None,
    source: str = "",
) -> FakeMeasurer:
    """Grow the tree of ``f`` in a folder, which may hold a part of it; returns what measured."""
    captured, measurer = capture(has_gpu), measurer or FakeMeasurer(has_gpu=has_gpu)
    stored = program(captured, source=source)
    with writer or Writer(folder) as rows:
        versions, earlier = read_versions(folder, stored.id), read_transitions(folder, stored.id)
        rows.add_program(stored)
        grower = Grower(
            stored.id,
            captured,
            SOURCE,
            actions=FakeActions(listed, unlisted),
            coder=FakeCoder(),
            measurer=measurer,
            rows=rows,
            growth=Growth(depth, width, seconds, seed, ENVIRONMENT),
            clock=Clock(),
        )
        grower.load(versions, earlier)
        grower.run()
    return measurer
