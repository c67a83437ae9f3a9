"""Runs of the user's code on one case: in float64, with perturbed inputs and rounding, or with noise. Runs in workers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import FORWARD, VALUES, Case
from mtmc_lsp.verify.worker.choices import Choice, ChoiceRecorder
from mtmc_lsp.verify.worker.comparison.batched_reads import numbers
from mtmc_lsp.verify.worker.comparison.distances import oracle_distance
from mtmc_lsp.verify.worker.float64_execution import Float64Mode
from mtmc_lsp.verify.worker.gradients.rounding_noise import RoundingNoise
from mtmc_lsp.verify.worker.oracle import SharedRandomMode, Tf32Products, draw_seeds
from mtmc_lsp.verify.worker.oracle_runs.host import Host
from mtmc_lsp.verify.worker.oracle_runs.tensors import (
    ResultKey,
    finest_epsilon,
    in_float64,
    perturbed,
    tensors_by_key,
)
from mtmc_lsp.verify.worker.run_target import copies, outcome, run_case

MOST_KEPT = 1 << 22
"""Most elements of the results of a run that is kept for another attempt."""


@dataclass
class CaseRuns:
    """Runs the user's code on the inputs of one case."""

    module: Any
    capture: Capture
    inputs: dict[str, torch.Tensor]
    device: str
    case: Case
    known: dict[str, Any] | None = None
    """The run in the user's dtypes, if it was made before."""
    reference: dict[str, Any] = field(init=False)
    """The run in the user's dtypes, as :func:`run_case` returns it."""
    expected: dict[ResultKey, torch.Tensor] = field(init=False)
    """Its tensors."""
    seconds: float = field(init=False, default=0.0)
    """How long the call of the code took in that run."""

    def __post_init__(self) -> None:
        """Run the code in the user's dtypes, unless that run is known."""
        mode, case = self._timed(self.random_mode()), self.case
        self.reference = self.known or run_case(
            self.module, self.capture, copies(self.inputs), self.device, mode, case.seed, case.kind, before=self.inputs
        )
        self.expected = tensors_by_key(self.reference)

    @contextlib.contextmanager
    def _timed(self, mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        with mode:
            began = perf_counter()
            yield
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.seconds = perf_counter() - began

    def random_mode(self) -> contextlib.AbstractContextManager[Any]:
        """The random numbers that a candidate draws too."""
        # In other cases the guard refuses, so the reference's code runs, with torch's random numbers.
        if self.case.kind not in (VALUES, FORWARD) or not self.capture.uses_random:
            return contextlib.nullcontext()
        dropouts = sum("dropout" in node.op for node in self.capture.graph.nodes)
        mode: contextlib.AbstractContextManager[Any] = SharedRandomMode(
            draw_seeds(self.case.seed, dropouts, self.device)
        )
        return mode

    def changed_inputs(self) -> dict[str, torch.Tensor]:
        """The inputs that the run in the user's dtypes changed."""
        return {name: self.inputs[name] for name in self.reference["after"]}

    def unobserved(self, inputs: dict[str, torch.Tensor], before: dict[str, torch.Tensor] | None) -> dict[str, Any]:
        """Run the code on other inputs. The state that it changes is known from the reference's run.

        Args:
            before: copies of inputs, by which changed inputs are detected; ``None`` for all.
        """
        mode, case = self.random_mode(), self.case
        return run_case(
            self.module,
            self.capture,
            inputs,
            self.device,
            mode,
            case.seed,
            case.kind,
            before=before,
            observes_state=False,
        )


@dataclass(frozen=True)
class KeptRun:
    """A run that another attempt may use again."""

    run: dict[str, Any]
    choices: ChoiceRecorder | None
    """The choices of the run; None if they were not recorded."""


@dataclass
class OracleRuns:
    """Runs in float64 of the code of a case, and their distances from the exact one."""

    runs: CaseRuns
    float64_mode: Float64Mode = field(default_factory=lambda: Float64Mode(torch.get_default_dtype()))
    recorder: ChoiceRecorder = field(default_factory=ChoiceRecorder)
    """The choices by index that the code makes in the exact run."""
    rounded_choices: list[dict[int, Choice]] = field(default_factory=list)
    """The choices of the runs with rounding errors that make as many."""
    exact: dict[ResultKey, torch.Tensor] = field(default_factory=dict)
    """The tensors of the exact run."""
    ignores_integers: bool = False
    """Whether distances are those of floating-point results alone."""
    keeps: bool = False
    """Whether results of runs with rounding errors are kept, for another attempt with more draws."""
    kept: dict[tuple[object, ...], KeptRun] = field(default_factory=dict)
    """By the arguments of the run."""
    host: Host | None = None
    """Where runs in float64 that record no choices are made, if that is faster."""

    def begin(self, earlier: OracleRuns | None) -> None:
        """Begin an attempt, with the runs that an earlier one kept. Runs without the choices that are needed are made again."""
        self.rounded_choices = []
        if earlier is not None:
            self.kept = earlier.kept

    def exact_run(self, choosing: contextlib.AbstractContextManager[Any], *, is_first: bool = False) -> dict[str, Any]:
        """Run without rounding errors.

        Args:
            choosing: a mode that records or changes choices.
            is_first: whether inputs that change are not known yet.
        """

        def run(runs: CaseRuns) -> dict[str, Any]:
            inputs = runs.inputs
            before: dict[str, torch.Tensor] | None = runs.changed_inputs()
            if is_first and before:
                # The oracle may change other inputs, too. If the reference changes none, it changes none either.
                before = None
            wide = {name: in_float64(tensor) for name, tensor in inputs.items()}
            with _float64_default(), choosing, self.float64_mode, self.float64_mode.with_inputs(wide, inputs):
                return runs.unobserved(wide, before)

        return self._run_where_faster(run)

    def perturbed_run(
        self,
        seed: int,
        mode: contextlib.AbstractContextManager[Any],
        *,
        rounds_results: bool = False,
        shares_draw: bool = False,
    ) -> dict[ResultKey, torch.Tensor]:
        """Run with perturbed inputs; random numbers that the code draws stay the same.

        Args:
            rounds_results: whether operations round stochastically, too.
            shares_draw: whether elements round alike.
        """
        key = ("perturbed", seed, _mode_key(mode), rounds_results, shares_draw)
        known = self.kept.get(key)
        if known is not None and (known.choices is not None or not self.recorder.choices):
            if known.choices is not None and self.recorder.choices:
                self._keep_choices(known.choices)
            return self.comparable_results(known.run)
        rounding_seed = seed if rounds_results else None
        choosing = ChoiceRecorder(self.recorder.choices) if self.recorder.choices else None

        def run_perturbed(runs: CaseRuns) -> dict[str, Any]:
            others = perturbed(runs.inputs, seed, finest_epsilon(outcome(self.runs.reference)))
            bound = self.float64_mode.with_inputs(
                others, runs.inputs, rounding_seed=rounding_seed, shares_draw=shares_draw
            )
            with _float64_default(), choosing or contextlib.nullcontext(), self.float64_mode, bound, mode:
                return runs.unobserved(others, runs.changed_inputs())

        run = self._run_where_faster(run_perturbed, rounds=rounds_results)
        if choosing is not None:
            self._keep_choices(choosing)
        self._keep(key, run, choosing)
        return self.comparable_results(run)

    def noisy_run(self, draw: int) -> dict[ResultKey, torch.Tensor]:
        """Run in the user's dtypes, with rounding errors of up to one unit in the last place."""
        key = ("noisy", draw)
        if key not in self.kept:
            with RoundingNoise(self.runs.case.seed + draw):
                run = self.runs.unobserved(copies(self.runs.inputs), self.runs.changed_inputs())
            self._keep(key, run, None)
            return self.comparable_results(run)
        return self.comparable_results(self.kept[key].run)

    def coarse_run(self, draw: int) -> dict[ResultKey, torch.Tensor]:
        """Run in float64, with the largest noise: terms that cancel hardly ever stay equal, as numbers of 16 bits often do.

        An odd draw has the opposite noise of the even one before it.
        """
        key, is_opposite = ("coarse", draw), bool(draw % 2)
        if key not in self.kept:
            noise = RoundingNoise(self.runs.case.seed + draw - is_opposite, math.inf, is_opposite=is_opposite)
            run = self.exact_run(noise)
            self._keep(key, run, None)
            return self.comparable_results(run)
        return self.comparable_results(self.kept[key].run)

    def record_reference_choices(self) -> None:
        """Run in the user's dtypes, for the choices alone."""
        with ChoiceRecorder(self.recorder.choices) as choosing:
            self.runs.unobserved(copies(self.runs.inputs), self.runs.changed_inputs())
        self._keep_choices(choosing)

    def comparable_results(self, run: Mapping[str, Any]) -> dict[ResultKey, torch.Tensor]:
        """The tensors of a run that the reference and the exact run have, too."""
        expected, exact = self.runs.expected, self.exact
        return {i: value for i, value in tensors_by_key(run).items() if i in expected and i in exact}

    def distances(self, results: Mapping[ResultKey, torch.Tensor]) -> dict[ResultKey, float]:
        """How far results are from the exact ones."""
        expected = self.runs.expected
        if self.ignores_integers:
            results = {i: value for i, value in results.items() if expected[i].is_floating_point()}
        values = numbers([oracle_distance(value, expected[i], self.exact[i]) for i, value in results.items()])
        return dict(zip(results, values, strict=True))

    def _run_where_faster(self, run: Callable[[CaseRuns], dict[str, Any]], *, rounds: bool = False) -> dict[str, Any]:
        """A run on the host if that is faster, or else where the case runs."""
        found = self.host.run(run, self.float64_mode, rounds=rounds) if self.host is not None else None
        if found is None:
            self.host = None
            return run(self.runs)
        return found

    def _keep(self, key: tuple[object, ...], run: dict[str, Any], choosing: ChoiceRecorder | None) -> None:
        tensors = tensors_by_key(run)
        if self.keeps and sum(tensor.numel() for tensor in tensors.values()) <= MOST_KEPT:
            self.kept[key] = KeptRun({"results": run["results"], "after": run["after"]}, choosing)

    def _keep_choices(self, choosing: ChoiceRecorder) -> None:
        if choosing.count == self.recorder.count:
            self.rounded_choices.append(choosing.choices)


def _mode_key(mode: contextlib.AbstractContextManager[Any]) -> tuple[object, ...]:
    """Equal for modes that change the same operations."""
    return type(mode), mode.names if isinstance(mode, Tf32Products) else None


@contextlib.contextmanager
def _float64_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
