"""A planner, a coder and a measurer that need no torch: an action's parameters say what will come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction, Stop
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, MtmcError, ResultsDiffer, TargetRaises, WorkerFailed
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import (
    BaselineTime,
    CompileReport,
    KernelReport,
    Ratio,
    Speed,
    Timing,
    Verdict,
    VerdictStatus,
)
from mtmc_lsp.core.run import Candidate, RunResult, Step
from mtmc_lsp.core.workload import Capture, Environment, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch

SOURCE = "def f(x):\n    return x + 1\n"
EAGER_US = 100.0
PEAK_BYTES = 48_000_000
"""Of every version and of the user's code."""
OUTCOMES = ("better", "same", "slower", "uncoded", "uncompiled", "wrong", "wrong elsewhere", "crash", "hang", "no-op")
"""``wrong`` differs on the inputs that are timed, ``wrong elsewhere`` only on others."""
ENVIRONMENT = Environment(python="3.11", torch="2.13", triton="3.9", gpu="Fake GPU", capability="sm_90")
WRONG = "values: relative error 0.5"
GAIN = {"better": 0.8, "wrong elsewhere": 0.8, "same": 1.0, "nearly": 1.25, "slower": 1.5}


def capture(path: str = "/project/model.py", environment: Environment = ENVIRONMENT, operations: int = 9) -> Capture:
    """What a capture of ``f`` would be, as far as a search looks."""
    nodes = tuple(Node(f"n{number}", "aten.relu.default", (), {}, ()) for number in range(operations))
    target = Target(path, "f", TargetKind.FUNCTION, 1, 2)
    workload = Workload(target, WorkloadSource.DIRECTIVE)
    return Capture(
        workload, Graph((), nodes, (), "tensor", {}), (), environment, flops=1.0, bytes=1.0, module_name="model"
    )


def action(number: int, outcome: str, **params: object) -> MacroAction:
    """An action whose outcome is known."""
    tuning = "variants" in params
    return MacroAction(
        kind=ActionKind.AUTOTUNE if tuning else ActionKind.FUSE,
        region=(f"n{number}",),
        lines=(2, 2),
        params={"outcome": outcome, **params},
        rationale=f"reason {number}",
        expected=Expected(10.0),
        text=f"action {number}",
    )


class FakePlanner:
    """Proposes the given actions in turn, each once."""

    def __init__(self, actions: Sequence[MacroAction]) -> None:
        self._actions = actions
        self.seen: list[State] = []

    def propose(self, state: State) -> MacroAction | Stop:
        self.seen.append(state)
        tried = {step.action.key for step in state.history}
        return next((item for item in self._actions if item.key not in tried), Stop("no action is left"))


class FakeCoder:
    """A version is the source with a line per action; its schedule is the time it will take and its outcome."""

    def start(self, capture: Capture, source: str) -> Candidate:
        return Candidate("root", None, None, source, None, {"us": EAGER_US, "outcome": "root"})

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        outcome = str(action.params["outcome"])
        if outcome == "uncoded":
            raise CannotCode("there is no such thing")
        if outcome == "no-op":
            return candidate
        us = candidate.schedule["us"] * GAIN.get(outcome, 1.0)  # type: ignore[index]
        text = f"{candidate.source}# {'+'.join(action.region)} {outcome}\n"
        return Candidate(f"{candidate.id}/{outcome}", candidate.id, action, text, None, {"us": us, "outcome": outcome})


class FakeMeasurer:
    """Finds out what the schedule says, and counts how often it was asked."""

    def __init__(self, *, has_gpu: bool = True, broken: MtmcError | None = None, verifies_beside: bool = True) -> None:
        self.has_gpu = has_gpu
        self.verifies_beside = has_gpu and verifies_beside
        self.calls = {"verify": 0, "compile": 0, "time": 0, "quick": 0}
        self._broken = broken

    def device(self) -> DeviceModel:
        return replace(model_of_arch("sm_90"), name="Fake GPU")

    def compile(self, candidate: Candidate) -> CompileReport:
        self.calls["compile"] += 1
        error = "too many registers" if _outcome(candidate) == "uncompiled" else ""
        return CompileReport((KernelReport("f_kernel", "sm_90", error=error),))

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        self.calls["verify"] += 1
        if self._broken is not None:
            raise self._broken
        if _outcome(candidate) == "crash":
            raise WorkerFailed("the process ended with signal SIGSEGV", kind=FailureKind.CRASHED)
        if _outcome(candidate) == "late":
            reason = "the time limit of the whole run was reached during verify.run_case"
            raise WorkerFailed(reason, kind=FailureKind.DEADLINE)
        if _outcome(candidate) in ("wrong", "wrong elsewhere"):
            return Verdict(VerdictStatus.INCORRECT, (), "gpu", 0.5, 1e-7, WRONG)
        if _outcome(candidate) == "no memory":
            reason, kind = "it ran out of memory", FailureKind.GPU_OUT_OF_MEMORY
            return Verdict(VerdictStatus.RUNTIME_ERROR, (), "gpu", reason=reason, failure=kind)
        if _outcome(candidate) == "too large":
            reason, kind = "the workload is too large for Triton's interpreter", FailureKind.TOO_LARGE
            return Verdict(VerdictStatus.UNCERTIFIABLE, (), "interpreter", reason=reason, failure=kind)
        return Verdict(VerdictStatus.CORRECT, (), "gpu", 1e-7, 1e-7)

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        self.calls["time"] += 1
        if _outcome(candidate) == "hang":
            raise WorkerFailed("timing.time took longer than 300 s", kind=FailureKind.TIMEOUT)
        if not self.has_gpu:
            return None
        if _outcome(candidate) == "wrong":
            raise ResultsDiffer(WRONG)
        us = _us(candidate)
        return timing(us, eager=EAGER_US, previous=_us(previous) if previous and previous.id != "root" else None)

    def compile_variants(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        return [CompileReport() for _ in candidates]

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        self.calls["quick"] += 1
        return [None if _outcome(candidate) == "crash" else _us(candidate) for candidate in candidates]

    def close(self) -> None:
        """Nothing to end."""


def timing(us: float, **baselines_us: float | None) -> Timing:
    """The timing of a version against baselines; those without a time are left out."""
    times = [_baseline(name, other, us) for name, other in baselines_us.items() if other is not None]
    best = min((b for b in times if b.name != "previous"), key=lambda b: b.median_us).name
    return Timing(us, tuple(times), best, Ratio(1.0, 0.99, 1.01), 50, "a fake", 20.0 / us, peak_bytes=PEAK_BYTES)


def _baseline(name: str, other_us: float, us: float) -> BaselineTime:
    ratio = other_us / us
    speed = Speed.FASTER if ratio > 1.03 else Speed.SAME if ratio > 0.97 else Speed.SLOWER
    return BaselineTime(name, other_us, _ratio(ratio), speed, peak_bytes=PEAK_BYTES)


def _ratio(value: float) -> Ratio:
    return Ratio(value, value * 0.995, value * 1.005)


def _us(candidate: Candidate) -> float:
    return float(candidate.schedule["us"])  # type: ignore[index]


def _outcome(candidate: Candidate) -> str:
    return str(candidate.schedule["outcome"])  # type: ignore[index]


def search(
    actions: Sequence[MacroAction],
    *,
    has_gpu: bool = True,
    done: Sequence[Step] = (),
    limits: Limits | None = None,
    measurer: FakeMeasurer | None = None,
    planner: FakePlanner | None = None,
    told: list[str] | None = None,
    operations: int = 9,
    baseline: str = "eager",
) -> RunResult:
    """One run of the greedy search over fakes; ``told`` collects what it tells while it goes."""
    said = told if told is not None else []
    events = Events(
        on_action=lambda index, item: said.append(f"action {index}"),
        on_stage=said.append,
        on_step=lambda step: said.append(f"step {step.index}"),
        on_replayed=lambda step: said.append(f"replayed {step.index}"),
        on_withdrawn=lambda step: said.append(f"withdrawn {step.index}"),
    )
    environment = ENVIRONMENT if has_gpu else replace(ENVIRONMENT, gpu="", capability="")
    run = GreedySearch(
        capture(environment=environment, operations=operations),
        SOURCE,
        SearchComponents(
            planner or FakePlanner(actions),
            FakeCoder(),
            measurer or FakeMeasurer(has_gpu=has_gpu),
            has_gpu,
            limits or Limits(seconds=60.0, steps=50),
            baseline,
        ),
        events,
    )
    return run.run("run", "hash", done)


BROKEN_TARGET = TargetRaises("f raises ValueError")
"""An error of the user's own code, which no step can help."""


def run_until_killed(folder: str) -> None:
    """A process that stores three steps and is then ended as ``kill -9`` does it."""
    import os
    import signal

    from mtmc_lsp.search.store import Store

    store = Store(Path(folder))
    run_id = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)

    def on_step(step: Step) -> None:
        store.add_step(run_id, step)
        if step.index == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    events = Events(on_step=on_step)
    actions = [action(i, outcome) for i, outcome in enumerate(("better", "wrong", "better", "better", "same"))]
    components = SearchComponents(FakePlanner(actions), FakeCoder(), FakeMeasurer(), True, Limits())
    GreedySearch(capture(), SOURCE, components, events).run(run_id, "hash")
