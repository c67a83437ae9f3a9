"""Compares a candidate's results with the reference's and the float64 oracle's. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from mtmc_lsp.core.dtypes import ITEMSIZE, TOLERANCE
from mtmc_lsp.verify.error_limits import (
    FACTORS,
    GRADIENT_OF,
    LEAST,
    NOISE,
    Agreement,
    ElementCount,
    Measurement,
    judge,
)
from mtmc_lsp.verify.worker.comparison.batched_reads import computable, numbers
from mtmc_lsp.verify.worker.comparison.discrete import discrete_difference
from mtmc_lsp.verify.worker.comparison.distances import (
    Distances,
    are_all_comparable,
    comparable,
    pieces,
    sums_piece,
)
from mtmc_lsp.verify.worker.comparison.ill_conditioned import (
    distance_from_reference,
    elementwise_counts,
    judge_counts,
)
from mtmc_lsp.verify.worker.comparison.small_results import LEAST as LEAST_VALUE
from mtmc_lsp.verify.worker.comparison.small_results import imprecise_elements

CLOSER, MOST_ROUNDING = 0.5, 0.2
"""A candidate with at most this part of the reference's error against float64 is right, if that error is at most the second."""


class Comparison:
    """Collects the checks of one case."""

    def __init__(self, precision: str) -> None:
        self._factor = FACTORS[precision]
        self._checks: list[dict[str, str]] = []
        self._worst = (0.0, 0.0)
        self._pending: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []
        self.measurements: list[Measurement] = []
        """Of the floating-point results; complete after :meth:`finish`."""
        self.counts: list[ElementCount] = []
        """Of elements that differ; complete after :meth:`finish`."""
        self._errors: dict[str, tuple[float, float]] = {}
        """By result: the errors of the candidate and of the reference against the oracle."""
        self.compared: set[str] = set()
        """Floating-point results that were compared."""
        self.inconclusive: set[str] = set()
        """Floating-point results for which the checks prove nothing; complete after :meth:`finish`."""

    def finish(self) -> tuple[list[dict[str, str]], tuple[float, float]]:
        """The checks, and the worst relative errors of the candidate and the reference. Reads all pending values at once."""
        values = iter(numbers([value for tensor, _ in self._pending for value in tensor.unbind()]))
        for tensor, decide in self._pending:
            decide([next(values) for _ in range(len(tensor))])
        self._pending = []
        return self._checks, self._worst

    def check(self, name: str, problem: str) -> None:
        """Add one check; it has failed if ``problem`` is not empty."""
        self._checks.append({"name": name, "status": "failed" if problem else "passed", "detail": problem})

    def _pending_check(self, name: str) -> dict[str, str]:
        """Add a check whose outcome is read from the device later, with all others."""
        self.check(name, "")
        return self._checks[-1]

    def _decide(self, check: dict[str, str], problem: str) -> None:
        check.update(status="failed" if problem else "passed", detail=problem)

    def _drop(self, dropped: dict[str, str]) -> None:
        self._checks = [check for check in self._checks if check is not dropped]

    def facts(self, name: str, candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> None:
        """Compare the properties of a result besides its values."""
        for fact in reference:
            differs = candidate.get(fact) != reference[fact]
            self.check(f"{name} {fact}", f"{candidate.get(fact)} instead of {reference[fact]}" if differs else "")

    def tensor(
        self,
        name: str,
        candidate: Any,
        reference: Any,
        oracle: Any,
        sensitivity: float,
        ties: Any,
        ill_conditioned: Mapping[str, Any] | None = None,
        conditioning: float = 0.0,
        *,
        any_layout: bool = False,
    ) -> None:
        """Compare one result with the reference's and the oracle's; the arguments are as in :func:`expected_of`.

        With ``any_layout``, the strides may differ: autograd promises none for gradients.
        """
        if not isinstance(candidate, torch.Tensor) or not isinstance(reference, torch.Tensor):
            is_equal = candidate is reference or candidate == reference
            self.check(f"{name} value", "" if is_equal else f"{candidate!r} instead of {reference!r}")
            return
        for attribute in ("dtype", "shape"):
            a, b = getattr(candidate, attribute), getattr(reference, attribute)
            self.check(f"{name} {attribute}", "" if a == b else f"{_text(a)} instead of {_text(b)}")
        if candidate.dtype != reference.dtype or candidate.shape != reference.shape:
            return
        # The stride of a dimension of size 1 is never used.
        strides = zip(reference.shape, candidate.stride(), reference.stride(), strict=True)
        is_equal = any_layout or candidate.numel() == 0 or all(a == b or size == 1 for size, a, b in strides)
        self.check(f"{name} stride", "" if is_equal else f"{candidate.stride()} instead of {reference.stride()}")
        if reference.is_complex():
            candidate, reference, oracle = (
                torch.view_as_real(value.resolve_conj()) for value in (candidate, reference, oracle)
            )
        if not reference.is_floating_point():
            difference = discrete_difference(candidate, reference, oracle, sensitivity, ties, self._factor)
            self.check(f"{name} values", difference)
            return
        check, dtype = self._pending_check(f"{name} values"), str(reference.dtype).removeprefix("torch.")
        is_empty = not reference.numel()
        self.compared.add(name)

        def judge_values(values: list[float]) -> None:
            measurement = Measurement.of(check["name"], dtype, sensitivity, values, conditioning)
            self.measurements.append(measurement)
            self._errors[name] = (measurement.error, measurement.reference_error)
            agreement = judge([measurement], self._factor)
            self._decide(check, agreement.problem)
            self._note_conclusive(name, agreement.is_conclusive or is_empty)
            if agreement.error > self._worst[0]:
                self._worst = (agreement.error, agreement.reference_error)

        self._pending.append((measure(candidate, reference, oracle), judge_values))
        if ill_conditioned is not None:
            self._ill_conditioned(name, candidate, reference, oracle, sensitivity, ill_conditioned)

    def _ill_conditioned(
        self,
        name: str,
        candidate: torch.Tensor,
        reference: torch.Tensor,
        oracle: torch.Tensor,
        sensitivity: float,
        facts: Mapping[str, Any],
    ) -> None:
        """Further checks of a result that may be far from the oracle."""
        factor, dtype = max(self._factor, FACTORS["budget"]), str(reference.dtype).removeprefix("torch.")
        has_oracle = oracle.shape == reference.shape
        if facts["is_unexplained"]:
            check = self._pending_check(f"{name} against your code")

            def judge_distance(values: list[float]) -> None:
                distance, limit = values[0] / (values[1] + LEAST), max(TOLERANCE[dtype], factor * sensitivity)
                detail = (
                    f"{distance:.2e} from your code's result, the limit is {limit:.2e}: float64 gives another result"
                )
                error, reference_error = self._errors[name]
                # A kernel keeps in float32 what the user's code rounds to 16 bits, so it may be closer to float64.
                is_closer = ITEMSIZE[dtype] == 2 and error <= CLOSER * reference_error <= CLOSER * MOST_ROUNDING
                self._decide(check, detail if distance > limit and not is_closer else "")
                self._note_conclusive(name, limit < 1.0)

            self._pending.append((distance_from_reference(candidate, reference), judge_distance))
        elif facts["spread"] is not None and (sensitivity > NOISE or facts["is_uneven"]) and has_oracle:
            check = self._pending_check(f"{name} by element")

            def judge_elements(values: list[float]) -> None:
                problem, is_conclusive, number = judge_counts(
                    values, facts["outliers"], check["name"], is_partial=facts["is_partial"]
                )
                self.counts += [number] if number is not None else []
                self._decide(check, problem)
                self._note_conclusive(name, is_conclusive)

            counts = elementwise_counts(candidate, reference, oracle, facts["spread"], factor, edge=facts["edge"])
            self._pending.append((counts, judge_elements))

    def small_elements(self, name: str, candidate: Any, reference: Any, oracle: Any) -> None:
        """Check each element of a result. The reference must compute its small elements as precisely as its large ones."""
        if not isinstance(reference, torch.Tensor) or not reference.is_floating_point():
            return
        tensors = (candidate, oracle)
        if any(not isinstance(other, torch.Tensor) or other.shape != reference.shape for other in tensors):
            return
        check = self._pending_check(f"{name} small elements")

        def judge_small(values: list[float]) -> None:
            wrong, compared = map(int, values)
            detail = f"{wrong} of {compared} elements have a large relative error; those of your code have not"
            self._decide(check, detail if wrong else "")

        self._pending.append((imprecise_elements(candidate, reference, oracle), judge_small))

    def zeros(self, name: str, candidate: Any, mask: torch.Tensor) -> None:
        """Check the elements of a gradient that no rounding error makes other than 0, such as those of ignored labels."""
        if not isinstance(candidate, torch.Tensor) or candidate.shape != mask.shape:
            return
        check = self._pending_check(f"{name} zeros")

        def judge_zeros(values: list[float]) -> None:
            wrong, count = map(int, values)
            self._decide(check, f"{wrong} of {count} elements that are always 0 are not 0" if wrong else "")

        wrong = torch.count_nonzero(mask & ~(computable(candidate).abs() <= LEAST_VALUE))
        self._pending.append((torch.stack([wrong, torch.count_nonzero(mask)]).double(), judge_zeros))

    def _note_conclusive(self, name: str, is_conclusive: bool) -> None:
        (self.inconclusive.discard if is_conclusive else self.inconclusive.add)(name)

    def exact(self, name: str, candidate: Any, reference: Any, oracle: Any) -> None:
        """Check that there is no difference if the reference's arithmetic is exact: no rounding can explain one."""
        if not isinstance(reference, torch.Tensor):
            return
        has_same_shape = isinstance(candidate, torch.Tensor) and candidate.shape == reference.shape
        wide, count, device = reference.double(), reference.numel(), reference.device
        is_comparable = oracle.shape == reference.shape
        rounded = (wide != oracle.double()).any() if is_comparable else torch.ones((), device=device)
        differing = (candidate.double() != wide).sum() if has_same_shape else torch.tensor(count, device=device)
        check = self._pending_check(f"{name} exact")

        def judge_exact(values: list[float]) -> None:
            if values[0]:
                self._drop(check)
                return
            detail = f"{int(values[1])} of {count} elements differ on whole numbers, where arithmetic is exact"
            self._decide(check, detail if values[1] else "")

        self._pending.append((torch.stack([rounded.double(), differing.double()]), judge_exact))

    def unchanged(self, name: str, before: torch.Tensor, after: torch.Tensor | None) -> None:
        """Check that an input that the reference does not change is bitwise unchanged; ``after`` is None if it is."""
        problem = ""
        if after is not None:
            has_same_type = (after.shape, after.dtype) == (before.shape, before.dtype)
            count = int((before != after).sum()) if has_same_type else 0
            problem = f"{count} elements were overwritten" if has_same_type else "it is another tensor"
        self.check(f"input {name} unchanged", problem)


def compare_case(
    inputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, Any],
    observed: Mapping[str, Any],
    precision: str,
    *,
    exact: bool = False,
    precise: Container[int] = (),
) -> dict[str, Any]:
    """Every check of one case, the worst relative errors, the measurements, and the results that could not be judged.

    With ``exact``, results that the reference computes without error must have none. ``precise`` has the numbers of the results
    whose small elements must be right, too; see :mod:`~mtmc_lsp.verify.worker.comparison.small_results`.
    """
    comparison = Comparison(precision)
    count, expected_count = len(observed["results"]), len(expected["results"])
    comparison.check("number of results", f"{count} instead of {expected_count}" if count != expected_count else "")
    for i, (candidate, reference) in enumerate(zip(observed["facts"], expected["facts"], strict=False)):
        comparison.facts(f"result {i}", candidate, reference)
    outputs = len(expected["facts"])
    for i, (candidate, reference) in enumerate(zip(observed["results"], expected["results"], strict=False)):
        is_gradient = i >= outputs
        name = f"{GRADIENT_OF}{expected['gradients'][i - outputs]}" if is_gradient else f"result {i}"
        oracle, sensitivity = expected["oracle"][i], expected["sensitivity"].get(i, 0.0)
        ties, ill_conditioned = expected["ties"].get(i), expected["ill_conditioned"].get(i)
        conditioning = expected["conditioning"].get(i, 0.0)
        about = (oracle, sensitivity, ties, ill_conditioned, conditioning)
        comparison.tensor(name, candidate, reference, *about, any_layout=is_gradient)
        if exact and ties is None:
            comparison.exact(name, candidate, reference, oracle)
        if i in expected["zeros"]:
            comparison.zeros(name, candidate, expected["zeros"][i])
        if i in precise and not is_gradient:
            comparison.small_elements(name, candidate, reference, oracle)
    for name, before in inputs.items():
        candidate, reference = observed["after"].get(name), expected["after"].get(name)
        if reference is None:
            comparison.unchanged(name, before, candidate)
        else:
            oracle, sensitivity = expected["oracle_after"].get(name, reference), expected["sensitivity"].get(name, 0.0)
            candidate, ill_conditioned = (
                before if candidate is None else candidate,
                expected["ill_conditioned"].get(name),
            )
            ties, conditioning = expected["ties"].get(name), expected["conditioning"].get(name, 0.0)
            name = f"input {name} afterwards"
            comparison.tensor(name, candidate, reference, oracle, sensitivity, ties, ill_conditioned, conditioning)
    changed = sorted({*observed["changed_state"]} - {*expected["changed_state"]})
    comparison.check("global state", f"it changes {' and '.join(changed)}" if changed else "")
    checks, (error, reference_error) = comparison.finish()
    return {
        "checks": checks,
        "error": error,
        "reference_error": reference_error,
        "results": sorted(comparison.compared),
        "inconclusive": sorted(comparison.inconclusive),
        "measurements": comparison.measurements,
        "counts": comparison.counts,
    }


def agreement(
    candidate: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor, sensitivity: float, factor: float
) -> Agreement:
    """Whether the error of a floating-point result is permitted.

    Args:
        candidate: the candidate's result.
        reference: the reference's result.
        oracle: the float64 oracle's result.
        sensitivity: how far rounding moves the oracle, as a relative L2 distance. If the function magnifies rounding (it
            normalises a constant row, or a sum cancels), the reference's error may be small by chance, so it counts as at
            least this.
        factor: how many times the reference's error is permitted.
    """
    values = numbers(list(measure(candidate, reference, oracle).unbind()))
    return judge([Measurement.of("", str(reference.dtype).removeprefix("torch."), sensitivity, values)], factor)


def measure(candidate: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """The values of :meth:`Measurement.of`, still on the device: five counts of elements, and three L2 norms."""
    counts = torch.zeros(5, dtype=torch.float64, device=reference.device)
    distances = Distances(reference.device)
    for part, reference_part, oracle_part in pieces(candidate, reference, oracle, most=sums_piece(reference)):
        if are_all_comparable(reference_part, oracle_part, part):
            counts += counts.new_tensor([0, 0, 0, part.numel(), part.numel()])
            distances.add(oracle_part, None, part, reference_part)
            continue
        is_finite = comparable(reference_part, oracle_part)
        part, reference_part, oracle_part = map(computable, (part, reference_part, oracle_part))
        is_broken = is_finite & ~torch.isfinite(part)
        # If only one of reference and oracle overflows, the range of the dtype is the cause, and neither result is wrong.
        both_nan = torch.isnan(reference_part) & torch.isnan(oracle_part)
        both_infinite = torch.isinf(reference_part) & torch.isinf(oracle_part)
        both_infinite &= reference_part.double() == oracle_part.double()
        not_nan, not_infinite = both_nan & ~torch.isnan(part), both_infinite & (part != reference_part)
        masks = (is_broken, not_nan, not_infinite, is_finite, is_finite | both_nan | both_infinite)
        counts += torch.stack([torch.count_nonzero(mask) for mask in masks])
        distances.add(oracle_part, is_finite, part, reference_part)
    return torch.cat([counts, *(norm.reshape(1) for norm in (*distances.values, distances.norm))])


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
