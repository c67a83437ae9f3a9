"""Evolutions over a landscape: each set of actions has a time on two workloads and an outcome. Nothing runs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.evolve.evolution import Evolution, Limits, Parts, Progress
from mtmc_lsp.evolve.lineage import Generation, Lineage, Operator, Setup, Version
from mtmc_lsp.evolve.operators.base import VaryingOperator
from mtmc_lsp.evolve.operators.catalogue import CatalogueOperator
from mtmc_lsp.evolve.start import start_versions
from mtmc_lsp.evolve.stored import read_evolution, storing
from mtmc_lsp.evolve.supervisor import Supervisor
from mtmc_lsp.evolve.trials import Measured, Stage, TrialRequest, TrialResult
from mtmc_lsp.search.store import Store
from tests.search.fakes import ENVIRONMENT, SOURCE, action, capture

EAGER_US = 100.0
WORKLOADS = (("N=64", {"N": 64}), ("N=4096", {"N": 4096}))
MOST_ACTIONS = 8
CAPTURE = capture()


@dataclass(frozen=True)
class Landscape:
    """What becomes of sets of actions, by a seed."""

    seed: int = 1
    wrong: float = 0.15
    """Part of the sets that are wrong or cannot be written."""

    def times(self, numbers: Sequence[int]) -> tuple[float, float]:
        """Microseconds of a set on both workloads. An action helps one workload more than the other, and may hurt it."""
        first = second = EAGER_US
        for number in sorted(numbers):
            chance = random.Random(f"{self.seed} {number} {len(numbers)}")
            first *= chance.uniform(0.75, 1.1)
            second *= chance.uniform(0.75, 1.1)
        return round(first, 3), round(second, 3)

    def outcome(self, numbers: Sequence[int]) -> str:
        chance = random.Random(f"outcome {self.seed} {sorted(numbers)}")
        if chance.random() >= self.wrong or not numbers:
            return "correct"
        return chance.choice(["wrong", "uncoded", "uncompiled"])


def numbers_of(candidate: Candidate) -> list[int]:
    schedule = candidate.schedule
    assert isinstance(schedule, dict)
    return list(schedule["set"])


class FakeCoder:
    """Writes the numbers of the actions in order, so the order of the steps does not matter."""

    def __init__(self, landscape: Landscape) -> None:
        self._landscape = landscape

    def start(self, capture: Capture, source: str) -> Candidate:
        return Candidate("v", None, None, source, None, {"set": []})

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        number = int(action.region[0].removeprefix("n"))
        numbers = sorted({*numbers_of(candidate), number})
        if self._landscape.outcome(numbers) == "uncoded":
            raise CannotCode("there is no such thing")
        name = "+".join(map(str, numbers))
        return Candidate(f"v{name}", candidate.id, action, f"{SOURCE}# {name}\n", None, {"set": numbers})


class FakeActions:
    """All actions that are not in the version yet; every second one is not listed by the planner."""

    def legal(
        self, state: State, tried: Sequence[str], count: int, rng: random.Random
    ) -> tuple[list[tuple[int, MacroAction]], list[MacroAction]]:
        done = set(numbers_of(state.candidate))
        actions = [action(number, "step") for number in range(1, MOST_ACTIONS + 1) if number not in done]
        actions = [item for item in actions if item.key not in tried]
        return list(enumerate(actions[::2])), actions[1::2]

    def propose(self, state: State) -> MacroAction | Stop:
        return Stop("not asked")


class FakeRunner:
    """Tries versions by the landscape."""

    def __init__(
        self, landscape: Landscape, *, has_gpu: bool = True, seconds: float = 0.0, told: list[str] | None = None
    ) -> None:
        self.has_gpu = has_gpu
        self._landscape, self._seconds = landscape, seconds
        self.tried: list[str] = told if told is not None else []

    def device(self) -> DeviceModel:
        return replace(model_of_arch("sm_90"), name="Fake GPU")

    def baseline(self, root: Candidate) -> tuple[float, ...]:
        return (EAGER_US, EAGER_US)

    def resources(self, candidate: Candidate) -> tuple[float, int]:
        count = len(numbers_of(candidate))
        return 1e6 / (1 + count % 3), MOST_ACTIONS + 1 - count

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        return ()

    def close(self) -> None:
        """Nothing to end."""

    def run(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        return [self._tried(request) for request in requests]

    def _tried(self, request: TrialRequest) -> TrialResult:
        self.tried.append(request.candidate.id)
        if self._seconds:
            time.sleep(self._seconds)
        outcome = self._landscape.outcome(numbers_of(request.candidate))
        memory, launches = self.resources(request.candidate)
        result = TrialResult(
            Outcome.FASTER, memory=memory, launches=launches, compiled="f_kernel: 32 registers", seconds=1.0
        )
        if outcome == "uncompiled":
            return replace(result, outcome=Outcome.COMPILE_ERROR, detail="f_kernel does not compile")
        if outcome == "wrong":
            return replace(result, outcome=Outcome.WRONG, detail="values differ")
        if request.stage is not Stage.SCORE:
            return result
        after, before = (self._landscape.times(numbers_of(v)) for v in (request.candidate, request.parent))
        return replace(
            result, workloads=tuple(Measured(us, old / us, 0.001) for us, old in zip(after, before, strict=True))
        )


@dataclass
class Clock:
    """Advances by a second each time it is read, so costs do not depend on the machine."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class World:
    """Everything that an evolution needs, with a store."""

    store: Store
    landscape: Landscape = field(default_factory=Landscape)
    islands: int = 2
    seed: int = 0
    generations: int = 12
    seconds: float = 0.0
    """Of each trial."""
    has_gpu: bool = True
    operators: dict[Operator, VaryingOperator] | None = None
    kinds: tuple[str, ...] = ("fuse", "autotune")
    limit: float = 1e9
    on_store: Callable[[str], None] = lambda when: None
    """Called before and after each transaction."""
    told: list[str] = field(default_factory=list)

    def setup(self) -> Setup:
        return Setup(
            "catalogue",
            self.islands,
            self.seed,
            WORKLOADS,
            self.has_gpu,
            "Fake GPU",
            plain_hash="hash",
            kinds=self.kinds,
        )

    def runner(self) -> FakeRunner:
        return FakeRunner(self.landscape, has_gpu=self.has_gpu, seconds=self.seconds, told=self.told)

    def begin(self) -> str:
        run = self.store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        root = FakeCoder(self.landscape).start(CAPTURE, SOURCE)
        self.store.add_evolution(run, self.setup())
        storing(self.store, run)(Generation(0), start_versions(root, [], self.runner(), self.setup()))
        return run

    def stored(self, run: str) -> Lineage:
        record = next(item for item in self.store.runs() if item.id == run)
        return read_evolution(self.store, record).lineage

    def go(self, run: str) -> Lineage:
        """Evolve from what is stored to the end."""
        runner, add = self.runner(), storing(self.store, run)

        def store(generation: Generation, versions: Sequence[Version]) -> None:
            self.on_store("before")
            add(generation, versions)
            self.on_store("after")

        coder, actions = FakeCoder(self.landscape), FakeActions()
        catalogue = CatalogueOperator(CAPTURE, actions=actions, planner=actions, coder=coder, device=runner.device())
        parts = Parts(
            self.setup(),
            self.operators or {Operator.CATALOGUE: catalogue},
            runner,
            Supervisor(self.kinds),
            store,
            Limits(self.limit, self.generations),
            Progress(),
            Clock(),
        )
        return Evolution(parts, self.stored(run)).run()


def comparable(lineage: Lineage) -> Lineage:
    """The lineage as it is stored."""
    return Lineage(lineage.versions, lineage.generations)


def evolve(folder: Path, **changes: object) -> Lineage:
    """One evolution in a new store."""
    with Store(folder) as store:
        world = World(store, **changes)  # type: ignore[arg-type]
        return world.go(world.begin())
