"""The permitted error of floating-point results, on one set of inputs and over several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE

FACTORS = {"budget": 8.0, "strict": 2.0}
"""A candidate's error may be this many times the reference's error on the same inputs."""
FLOAT64_FLOOR = 1e-12
"""float64 results have no more precise oracle, so this error is always permitted for another order of operations."""
SINGLE_ELEMENT_SLACK = 8.0
"""The error that is always permitted is up to ``1 + 8 / sqrt(n)`` times as large for ``n`` elements: their error varies more."""
NOISE = 0.01
"""If rounding moves the oracle by this relative distance, the result is rounding noise and proves nothing."""
LEAST = 1e-300
"""Avoids a division by a norm of 0."""
GRADIENT_OF = "gradient of "
"""How the names of gradients begin in messages."""
NEAR = 1.2
"""An error above the limit by less than this factor may be chance, and is measured on further inputs."""

NEAR_COUNT = 2.0
"""The same for a number of elements. One token whose rounding decides moves whole rows of a weight's gradient."""


class Draws(IntEnum):
    """How often the oracle runs with random rounding. Each draw can only raise limits, so few candidates need them."""

    NONE = 0
    """The limits follow from the reference's error alone."""
    FEW = 1
    """Those that most candidates need."""
    ALL = 2


@dataclass(frozen=True)
class Measurement:
    """How one result differs from the float64 oracle's."""

    name: str
    """Of the check."""
    dtype: str
    error: float
    """Relative L2 error of the candidate."""
    reference_error: float
    sensitivity: float
    """How far rounding moves the oracle, as a relative L2 distance. If the function magnifies rounding (it normalises a constant
    row, or a sum cancels), the reference's error may be small by chance, so it counts as at least this."""
    broken: int
    """Elements that are NaN or infinite and should not be."""
    not_nan: int
    """Elements that are not NaN and should be."""
    not_infinite: int
    """Elements that are not infinite and should be."""
    finite: int
    """Elements that the error covers."""
    checked: int
    """All elements that were compared."""
    conditioning: float = 0.0
    """How far rounding of the inputs alone moves the oracle: no code of the user's precision avoids an error of this size."""

    @staticmethod
    def of(
        name: str, dtype: str, sensitivity: float, values: Sequence[float], conditioning: float = 0.0
    ) -> Measurement:
        """From five counts of elements and the L2 norms of the candidate's error, the reference's error and the result."""
        broken, not_nan, not_infinite, finite, checked = map(int, values[:5])
        error, reference_error = (norm / (values[7] + LEAST) for norm in values[5:7])
        return Measurement(
            name,
            dtype,
            error,
            reference_error,
            sensitivity,
            broken,
            not_nan,
            not_infinite,
            finite,
            checked,
            conditioning,
        )


@dataclass(frozen=True)
class ElementCount:
    """How many elements of a result differ by more than rounding explains."""

    name: str
    """Of the check."""
    outside: int
    limit: int

    @property
    def is_near(self) -> bool:
        """Whether the number is above the limit by so little that it may be chance."""
        return self.limit < self.outside <= NEAR_COUNT * self.limit


@dataclass(frozen=True)
class Agreement:
    """How one result compares with the oracle."""

    problem: str
    """Empty if the result is correct."""
    error: float = 0.0
    """Relative L2 error of the candidate."""
    reference_error: float = 0.0
    is_conclusive: bool = True
    """Whether zeros would fail; if they would pass, the check proves nothing."""
    is_near: bool = False
    """Whether the error is above the limit by so little that it may be chance."""
    limit: float = 0.0
    """The permitted error; 0 if there was nothing to compare."""


def judge(measurements: Sequence[Measurement], factor: float) -> Agreement:
    """Whether the error of a result is permitted, measured on one set of inputs or on several.

    On several, the root mean square of the candidate's errors is compared with the limit for that of the reference's errors.
    Both vary from input to input by chance, most of all with few elements, and their means over ``k`` inputs vary less by a
    factor of ``sqrt(k)``; the allowance for few elements shrinks accordingly. The factor between the two stays the same, so
    code that is less precise than permitted fails on average too, and an error that is large on one of the inputs dominates
    the mean.

    Args:
        measurements: of one result on different inputs.
        factor: how many times the reference's error is permitted.
    """
    dtype = measurements[0].dtype
    for count, problem in (
        (sum(item.broken for item in measurements), "are NaN or infinite, or were never written"),
        (sum(item.not_nan for item in measurements), "should be NaN"),
        (sum(item.not_infinite for item in measurements), "should be infinite"),
    ):
        if count:
            return Agreement(f"{count} elements {problem}", float("inf"))
    measurements = [item for item in measurements if item.finite] or measurements
    finite = sum(item.finite for item in measurements)
    if not finite:
        return Agreement("", is_conclusive=any(item.checked for item in measurements))
    error = _root_mean_square([item.error for item in measurements])
    reference_error = _root_mean_square([max(item.reference_error, item.sensitivity) for item in measurements])
    if _root_mean_square([item.sensitivity for item in measurements]) > NOISE:
        # Tolerances apply to well-conditioned results; rounding noise depends on the order of operations.
        limit = max(factor, FACTORS["budget"]) * reference_error
        return _agreement(error, reference_error, limit, is_noise=True)
    # With few elements, the reference's error may be tiny by chance; a sum in another order is not worse for that.
    slack = 1.0 + SINGLE_ELEMENT_SLACK / math.sqrt(finite)
    floor = FLOAT64_FLOOR if dtype == "float64" else 4 * EPSILON[dtype] * slack
    # Above the dtype tolerance, allow twice the reference's error. With few elements that error is mostly chance, so allow
    # more: the full factor for a single element.
    above_tolerance = 2.0 + (factor - 2.0) / math.sqrt(finite)
    # If the function magnifies rounding that much (a constant row in a layer norm), the reference's own error is one draw of
    # it, and so is the candidate's.
    conditioning = _root_mean_square([item.conditioning for item in measurements])
    magnified = factor * conditioning if exceeds_tolerance(conditioning, dtype) else 0.0
    highest = max(TOLERANCE[dtype], above_tolerance * reference_error, magnified)
    limit = min(max(factor * reference_error, floor), highest)
    return _agreement(error, reference_error, limit, is_noise=False)


def exceeds_tolerance(conditioning: float, dtype: str) -> bool:
    """Whether rounding of the inputs alone may move a result beyond its dtype's tolerance."""
    return FACTORS["budget"] * conditioning > TOLERANCE[dtype]


def _agreement(error: float, reference_error: float, limit: float, *, is_noise: bool) -> Agreement:
    problem = ""
    if error > limit:
        problem = f"relative L2 error {error:.2e}; your code has {reference_error:.2e}, the limit is {limit:.2e}"
    is_near = limit < error <= NEAR * limit
    if is_noise:
        return Agreement(problem, is_conclusive=limit < 1.0, is_near=is_near)
    return Agreement(problem, error, reference_error, limit < 1.0, is_near, limit)


def _root_mean_square(values: Sequence[float]) -> float:
    """Scaled, because squares of errors relative to a result of zeros overflow."""
    largest = max(values)
    if len(values) == 1 or not 0.0 < largest < math.inf:
        return largest
    return largest * math.sqrt(sum((value / largest) ** 2 for value in values) / len(values))
