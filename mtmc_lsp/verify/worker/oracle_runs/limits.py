"""How far rounding moves the results of a case, which determines the error that a candidate may have. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.verify.cases import AUTOGRAD, FORWARD, VALUES
from mtmc_lsp.verify.error_limits import FACTORS, NOISE, Draws, exceeds_tolerance
from mtmc_lsp.verify.sizes.case_sizes import elements_of, has_long_loop, has_slow_loop, is_larger
from mtmc_lsp.verify.worker.choices import TiedChoices
from mtmc_lsp.verify.worker.comparison.batched_reads import numbers
from mtmc_lsp.verify.worker.comparison.discrete import Ties
from mtmc_lsp.verify.worker.comparison.distances import oracle_distance
from mtmc_lsp.verify.worker.comparison.draws import has_loops, keeps_runs, loops_without_indices
from mtmc_lsp.verify.worker.comparison.finer_precision import finer_share
from mtmc_lsp.verify.worker.comparison.ill_conditioned import IllConditioned
from mtmc_lsp.verify.worker.comparison.scan_errors import has_equal_values, scan_errors
from mtmc_lsp.verify.worker.gradients.cancellation import Cancellation, cancellation
from mtmc_lsp.verify.worker.oracle_runs import tf32
from mtmc_lsp.verify.worker.oracle_runs.choices import following_results, with_integers_of
from mtmc_lsp.verify.worker.oracle_runs.host import host_of
from mtmc_lsp.verify.worker.oracle_runs.runs import CaseRuns, OracleRuns
from mtmc_lsp.verify.worker.oracle_runs.tensors import ResultKey, dtype_name, finest_epsilon, tensors_by_key
from mtmc_lsp.verify.worker.run_target import outcome

FEW, FEW_DRAWS = 32, 3
"""Rounding errors of results with at most this many elements vary by chance, so they are estimated from several draws. The L2
norm of n independent errors has a relative standard deviation of about 1 / sqrt(2 n), 12 % for 32."""
MANY_DRAWS, SMALL = 8, 1 << 22
"""The number of draws if all values of a call have at most ``SMALL`` elements: the largest of eight is unlikely to be too
small."""
CERTAIN = {name: NOISE if tolerance <= FACTORS["budget"] * NOISE else -1.0 for name, tolerance in TOLERANCE.items()}
"""By dtype: results with at most this error, and that rounding moves by at most this distance, are no noise. The limits of noise
are higher than all others for these dtypes."""
LEAST_DRAWS = 1
"""The number of draws that most candidates need."""
SUSPECT = 0.02
"""A reference error above this exceeds every tolerance except float8's: either rounding is magnified, or the oracle differs."""


class _TooFewDraws(Exception):
    """The results need more draws of rounding."""

    def __init__(self, needed: Draws) -> None:
        super().__init__(needed.name)
        self.needed = needed


@dataclass
class Attempt:
    """What a later attempt with more draws uses again: the plain run, the exact run, and draws. In loops each takes seconds."""

    limits: Limits | None = None
    """Of the last attempt; None if nothing is kept, or if all draws were made."""

    @property
    def runs(self) -> CaseRuns | None:
        """The plain run of the last attempt."""
        return self.limits.runs if self.limits is not None else None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it keeps in addition to the expected results."""
        return self.limits.kept_tensors if self.limits is not None else []


def oracle_of(runs: CaseRuns, *, is_first: bool, wanted: Draws, attempt: Attempt | None = None) -> dict[str, Any]:
    """The oracle's results, and how far rounding moves them.

    Args:
        is_first: whether the case is the workload itself.
        wanted: the draws of rounding; more are made where the results need them.
        attempt: the last attempt for the same case; it becomes this one.

    Returns:
        The entries of :func:`mtmc_lsp.verify.worker.expectations.expected_of` that depend on the oracle; none if the code returns
        another number of results in float64.
    """
    attempt = attempt or Attempt()
    while True:
        limits = Limits(runs, is_first=is_first, wanted=wanted, earlier=attempt.limits)
        attempt.limits = None
        try:
            entries = limits.entries()
        except _TooFewDraws as few:
            attempt.limits, wanted = limits, few.needed
        else:
            if entries.get("omits_draws", False) and keeps_runs(runs.capture.graph):
                attempt.limits = limits
            return entries


class Limits:
    """Measures how far rounding moves the oracle's results."""

    def __init__(self, runs: CaseRuns, *, is_first: bool, wanted: Draws, earlier: Limits | None) -> None:
        self._runs = runs
        self._exact: dict[str, Any] | None = None
        """The exact run, if it has been made."""
        self._graph = runs.capture.graph
        self._is_first = is_first
        self._uses_tf32 = tf32.uses_tf32(runs, is_first=is_first)
        self._mode = tf32.rounding_mode(runs) if self._uses_tf32 else contextlib.nullcontext()
        has_gradients = runs.case.kind == AUTOGRAD or self._graph.backward is not None
        self._wanted = max(wanted, Draws.FEW if has_gradients or self._uses_tf32 else Draws.NONE)
        # Autograd uses indices that the graph does not show.
        may_choose = runs.case.kind == AUTOGRAD or not loops_without_indices(self._graph)
        # To record choices waits for the GPU at each index.
        fewest = Draws.FEW if has_loops(self._graph) else Draws.NONE
        self._has_strict_integers = may_choose and not has_gradients and self._wanted <= fewest
        self._records_choices = may_choose and not self._has_strict_integers
        # Choices follow from scores on the device of the case.
        host = None if self._records_choices else host_of(runs)
        self._oracle = OracleRuns(runs, keeps=keeps_runs(self._graph), host=host)
        self._is_small = sum(tensor.numel() for tensor in runs.inputs.values()) <= SMALL
        self._has_few = _has_few_elements(outcome(runs.reference))
        # The values of a network, also intermediate ones, are many more than its inputs.
        sizes = {**self._graph.sizes, **runs.case.sizes}
        has_few_values = self._is_small and elements_of(self._graph, sizes) <= SMALL
        self._draws = MANY_DRAWS if has_few_values else FEW_DRAWS
        self._leaves_out = self._wanted < Draws.ALL and is_larger(self._graph, sizes)
        """Whether a single draw of rounding is made at first, because each takes seconds and much memory."""
        self._sensitivity = dict[ResultKey, float]()
        self._conditioning = dict[ResultKey, float]()
        self._ties = dict[ResultKey, Ties]()
        self._following = dict[ResultKey, IllConditioned]()
        self._errors = dict[ResultKey, float]()
        if earlier is not None and earlier._records_choices == self._records_choices:
            # More draws of rounding follow from the same exact run, which may take seconds.
            self._oracle, self._exact = earlier._oracle, earlier._exact
        self._oracle.begin(earlier._oracle if earlier is not None else None)

    @property
    def runs(self) -> CaseRuns:
        """The plain run."""
        return self._runs

    @property
    def kept_tensors(self) -> list[torch.Tensor]:
        """The results of runs that are kept, and the scores of their choices."""
        runs, recorders = self._oracle.kept.values(), [self._oracle.recorder]
        recorders += [run.choices for run in runs if run.choices is not None]
        scores = [choice.scores for recorder in recorders for choice in recorder.choices.values()]
        return [tensor for run in runs for tensor in tensors_by_key(run.run).values()] + scores

    def entries(self) -> dict[str, Any]:
        """The results of :func:`oracle_of`."""
        runs, oracle, case = self._runs, self._oracle, self._runs.case
        exact = self._exact_run()
        if case.kind == FORWARD or (case.kind == VALUES and self._graph.backward is None):
            # Autograd saves indices for the backward pass without an operation.
            oracle.recorder.drop_unused(outcome(exact))
        if len(exact["results"]) != len(runs.reference["results"]):
            # Some torch modules have fast paths that they skip under a function mode, with another number of results.
            return {}
        self._errors = _reference_errors(runs.expected, tensors_by_key(exact))
        self._require_ordinary_errors()
        if self._has_strict_integers:
            # Which other index of a score is right follows from choices, so without them it must be the reference's.
            exact = with_integers_of(runs.reference, exact)
            oracle.ignores_integers = True
        oracle.exact = tensors_by_key(exact)
        of_scans = scan_errors(self._graph, case, runs.expected)
        found: dict[str, Any] = {"oracle": exact["results"], "oracle_after": exact["after"], "draws": int(self._wanted)}
        if self._wanted is Draws.NONE:
            return {**found, "sensitivity": of_scans, "omits_draws": True}
        tf32_distances = tf32.observe(oracle) if self._is_first and self._graph.runs_tf32 else {}
        self._perturb_inputs()
        self._raise_sensitivity(of_scans)
        if oracle.recorder.choices:
            self._follow_choices()
        noise = self._find_cancellation()
        ill_conditioned, omits_draws = self._round_operations(noise)
        for i, result in ill_conditioned.items():
            explained = max(self._sensitivity.get(i, 0.0), tf32_distances.get(i, 0.0))
            # A result that is exactly 0 has no relative error: the reference's is its rounding.
            is_zero = not bool(oracle.exact[i].any())
            result.is_unexplained = not is_zero and self._errors[i] > max(SUSPECT, FACTORS["budget"] * explained)
        if self._leaves_out and any(result.is_unexplained for result in ill_conditioned.values()):
            # More draws may explain it.
            raise _TooFewDraws(Draws.ALL)
        if not has_equal_values(case) and not self._following:
            # Equal values may cancel exactly in the reference, whatever its precision.
            self._excuse_only_the_precision_of_the_reference()
        return {
            **found,
            "sensitivity": self._sensitivity,
            "conditioning": self._conditioning,
            # Plain mappings, because they may go through a file.
            "ties": {i: vars(result) for i, result in self._ties.items() if result.choices or result.alternatives},
            "ill_conditioned": {i: vars(result) for i, result in ill_conditioned.items()},
            "zeros": noise.zeros,
            "omits_draws": omits_draws or self._has_strict_integers,
        }

    def _exact_run(self) -> dict[str, Any]:
        """The run without rounding errors. One on the host stands only if the reference's errors are ordinary.

        The code may depend on the device, and compute something else on the host.
        """
        runs, oracle = self._runs, self._oracle
        choosing = oracle.recorder if self._records_choices else contextlib.nullcontext()
        if self._exact is None:
            self._exact = oracle.exact_run(choosing, is_first=True)
            if oracle.host is not None:
                errors = _reference_errors(runs.expected, tensors_by_key(self._exact))
                floats = {i for i, value in runs.expected.items() if value.is_floating_point()}
                is_same = len(self._exact["results"]) == len(runs.reference["results"]) and floats == errors.keys()
                if not is_same or any(
                    not error <= _largest_ordinary_error(self._dtype(i)) for i, error in errors.items()
                ):
                    oracle.host = None
                    self._exact = oracle.exact_run(choosing, is_first=True)
        return self._exact

    def _require_ordinary_errors(self) -> None:
        """Without draws, and with strict integers, the reference's errors need no explanation."""
        if self._wanted is not Draws.NONE and not self._has_strict_integers:
            return
        if any(error > _largest_ordinary_error(self._dtype(i)) for i, error in self._errors.items()):
            raise _TooFewDraws(Draws.ALL if self._has_strict_integers else Draws.FEW)

    def _perturb_inputs(self) -> None:
        """Measure how far rounding of inputs, and TF32 products, move the results."""
        has_more = self._oracle.recorder.choices or (self._has_few and not self._leaves_out)
        for draw in range(FEW_DRAWS if has_more else 1):
            self._raise_sensitivity(
                self._distances(self._oracle.perturbed_run(self._runs.case.seed + draw, self._mode))
            )
        # The error of TF32 products is the reference's choice, not a property of its function.
        self._conditioning = {} if self._uses_tf32 else dict(self._sensitivity)

    def _follow_choices(self) -> None:
        """Measure how far other choices among tied scores move the results."""
        runs, oracle, seed = self._runs, self._oracle, self._runs.case.seed
        oracle.record_reference_choices()
        # The error of 16-bit scores is measured.
        epsilon = min(finest_epsilon(list(runs.inputs.values())), EPSILON["float32"])
        choices = TiedChoices(oracle.recorder.choices, oracle.rounded_choices, epsilon)
        numbers_of_noise = range(self._draws if choices.is_ambiguous else 0)
        others = (oracle.comparable_results(oracle.exact_run(choices.noise(seed, draw))) for draw in numbers_of_noise)
        exact, expected = oracle.exact, runs.expected
        self._ties = {
            i: choices.ties_of(value) for i, value in exact.items() if i in expected and i not in self._errors
        }
        following, moved = following_results(others, exact, self._ties, self._errors, self._distances)
        # The ordinary draws may have swapped ties too, so their distance alone does not tell.
        self._following = {
            i: result
            for i, result in following.items()
            if moved[i] > min(FACTORS["budget"] * self._sensitivity.get(i, 0.0), TOLERANCE[self._dtype(i)])
            and moved[i] > FACTORS["budget"] * EPSILON[self._dtype(i)]
        }
        self._raise_sensitivity({i: moved[i] for i in self._following})

    def _find_cancellation(self) -> Cancellation:
        """Find results that are 0 by chance, because in the reference rounding errors of terms that cancel are equal."""
        if self._graph.backward is None and has_slow_loop(self._graph):
            return Cancellation((), {})
        expected, exact = self._runs.expected, self._oracle.exact
        outputs = len(self._runs.reference["facts"])
        # A result that is exactly 0 everywhere, or an element of a gradient.
        zero_results = {i for i in self._errors if expected[i].numel() and not bool(exact[i].any())}
        cancels: dict[ResultKey, torch.Tensor] = {
            i: expected[i]
            for i in self._errors
            if i in zero_results or (self._is_small and isinstance(i, int) and i >= outputs)
        }
        magnified = self._magnified()
        doubtful = [
            i
            for i in cancels
            if i in magnified or i in zero_results or self._errors[i] > _largest_ordinary_error(self._dtype(i))
        ]
        noise = cancellation(cancels, exact, doubtful, self._oracle.noisy_run, self._oracle.coarse_run, self._draws)
        for noisy in noise.draws:
            moved = self._distances(noisy).items()
            self._raise_sensitivity({i: far for i, far in moved if exceeds_tolerance(far, self._dtype(i))})
        return noise

    def _round_operations(self, noise: Cancellation) -> tuple[dict[ResultKey, IllConditioned], bool]:
        """Measure how far stochastic rounding of operations moves the results.

        Returns:
            The facts about results with large errors, and whether draws are left out that may permit larger errors.
        """
        oracle, errors, magnified = self._oracle, self._errors, self._magnified()
        rounding_epsilon = oracle.float64_mode.rounding_epsilon
        suspects = [i for i in errors if errors[i] > SUSPECT or self._sensitivity.get(i, 0.0) > NOISE]
        # A higher limit for the whole must not excuse single elements. The candidate's error is one more draw, so it is the
        # largest as often as each of the others and the reference's.
        chance = 1.0 / (self._draws + 2)
        ill_conditioned = {
            **{
                i: IllConditioned(is_uneven=True, is_partial=True, outliers=chance, edge=rounding_epsilon)
                for i in magnified
            },
            **{i: IllConditioned() for i in suspects},
            **self._following,
        }
        # Further draws can only raise the limits of a result that is no noise, also of single elements.
        is_certain = all(max(errors[i], self._sensitivity.get(i, 0.0)) <= CERTAIN[self._dtype(i)] for i in errors)
        # In a result with many elements, the errors average out, so one draw is enough. The reference's error of a few elements
        # is mostly chance where operations round more coarsely than the result, as a product in bfloat16 before a loss does.
        varies = self._has_few and (self._is_small or self._rounds_few_coarsely())
        has_draws = bool(ill_conditioned or rounding_epsilon or varies)
        is_ordinary = is_certain and not suspects and not self._following
        may_omit = is_ordinary or (self._leaves_out and not self._following)
        omits_draws = (has_draws or self._leaves_out) and self._wanted < Draws.ALL and may_omit
        if self._has_strict_integers and suspects:
            raise _TooFewDraws(Draws.ALL)
        if omits_draws and has_long_loop(self._graph):
            # Without any draw of the rounding of operations, limits are not raised for these.
            for i in magnified:
                del ill_conditioned[i], self._conditioning[i]
            magnified = []
        if omits_draws:
            for result in ill_conditioned.values():
                # The part of these elements may be another one with all draws.
                result.outliers = 0.0 if result.is_partial else result.outliers
        fewest = LEAST_DRAWS if magnified or (self._leaves_out and has_draws) else 0
        for draw in range((fewest if omits_draws else self._draws) if has_draws else 0):
            # Start with independent rounding of each element, which most operations do.
            seed = self._runs.case.seed + draw
            try:
                rounded = oracle.perturbed_run(seed, self._mode, rounds_results=True, shares_draw=draw % 2 == 1)
            except torch.OutOfMemoryError:
                if not self._leaves_out:
                    raise
                # Rounding needs more memory than the exact run. Without it, the limits are lower.
                break
            self._raise_sensitivity(self._distances(rounded))
            _add_draw(ill_conditioned, rounded, oracle.exact)
        for noisy in noise.draws:
            _add_draw(ill_conditioned, noisy, oracle.exact)
        return ill_conditioned, omits_draws

    def _excuse_only_the_precision_of_the_reference(self) -> None:
        """Lower the limits of results that the reference computes in a finer precision than its dtype."""
        for i, error in self._errors.items():
            share = finer_share(self._runs.expected[i], error, self._conditioning.get(i, 0.0))
            if share < 1.0 and not bool(self._oracle.exact[i].any()):
                # Terms that cancel exactly in the reference tell nothing about its precision.
                continue
            for moved in (self._sensitivity, self._conditioning):
                if i in moved:
                    moved[i] *= share

    def _magnified(self) -> list[ResultKey]:
        """The results that rounding of inputs alone moves beyond the tolerance."""
        return [i for i in self._errors if exceeds_tolerance(self._conditioning.get(i, 0.0), self._dtype(i))]

    def _rounds_few_coarsely(self) -> bool:
        """Whether operations round to a coarser dtype than that of a result with few elements."""
        coarsest = self._oracle.float64_mode.result_epsilon
        return any(
            0 < self._runs.expected[i].numel() <= FEW and EPSILON[self._dtype(i)] < coarsest for i in self._errors
        )

    def _distances(self, results: Mapping[ResultKey, torch.Tensor]) -> dict[ResultKey, float]:
        return self._oracle.distances(results)

    def _raise_sensitivity(self, measured: Mapping[ResultKey, float]) -> None:
        for i, distance in measured.items():
            self._sensitivity[i] = max(self._sensitivity.get(i, 0.0), distance)

    def _dtype(self, i: ResultKey) -> str:
        return dtype_name(self._runs.expected[i])


def _add_draw(
    ill_conditioned: Mapping[ResultKey, IllConditioned],
    results: Mapping[ResultKey, torch.Tensor],
    exact: Mapping[ResultKey, torch.Tensor],
) -> None:
    for i, result in ill_conditioned.items():
        if i in results:
            result.add_draw(results[i], exact[i])


def _reference_errors(
    expected: Mapping[ResultKey, torch.Tensor], exact: Mapping[ResultKey, torch.Tensor]
) -> dict[ResultKey, float]:
    """The relative L2 errors of the reference's floating-point results."""
    keys = [
        i for i, value in expected.items() if i in exact and value.is_floating_point() and value.shape == exact[i].shape
    ]
    errors = numbers([oracle_distance(expected[i], expected[i], exact[i]) for i in keys])
    return dict(zip(keys, errors, strict=True))


def _largest_ordinary_error(dtype: str) -> float:
    """The relative error up to which a gradient needs no explanation: a few roundings, and an error within the tolerance."""
    return min(SUSPECT, max(TOLERANCE[dtype] / FACTORS["budget"], 4 * EPSILON[dtype]))


def _has_few_elements(results: list[Any]) -> bool:
    floats = (result for result in results if isinstance(result, torch.Tensor) and result.is_floating_point())
    return any(0 < result.numel() <= FEW for result in floats)
