"""Measures an error that is slightly above its limit on further inputs, before it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.error_limits import FACTORS, Agreement, ElementCount, Measurement, judge
from mtmc_lsp.verify.outcomes import CaseOutcome

FURTHER_SEEDS = 4
BY_CHANCE = (" by element", " against your code")
"""Ends of names of checks whose limits are those of several draws of rounding."""
SEED_STEP = 7919
"""Between the seeds of these inputs; other cases use consecutive seeds."""


def is_near_miss(outcome: CaseOutcome, precision: str) -> bool:
    """Whether a case failed, and only because of errors that are slightly above their limits."""
    failed = _failed(outcome)
    near = {item.name for item in outcome.measurements if judge([item], FACTORS[precision]).is_near}
    near |= {item.name for item in outcome.counts if item.is_near}
    return outcome.status is VerdictStatus.INCORRECT and bool(failed) and failed <= near


def fails_by_errors(outcome: CaseOutcome) -> bool:
    """Whether a case failed, and only because of errors of floating-point results."""
    failed = _failed(outcome)
    measured = {item.name for item in outcome.measurements}
    return outcome.status is VerdictStatus.INCORRECT and bool(failed) and failed <= measured


def confirmed(outcome: CaseOutcome, run: Callable[[Case], CaseOutcome | None], precision: str) -> CaseOutcome | None:
    """A failure of a case that was chosen because of its error; ``None`` if it was chance.

    Args:
        outcome: the failure.
        run: as for :func:`settle`.
        precision: as for :func:`settle`.
    """
    failed = _failed(outcome)
    if fails_by_errors(outcome):
        return settle(outcome, run, precision)
    if not failed or not all(
        name.endswith(BY_CHANCE) for name in failed - {item.name for item in outcome.measurements}
    ):
        return outcome
    seeds = (outcome.case.seed + number * SEED_STEP for number in range(1, FURTHER_SEEDS + 1))
    others = (run(replace(outcome.case, seed=seed)) for seed in seeds)
    return next((other for other in others if other is not None and not other.is_correct), None)


def settle(outcome: CaseOutcome, run: Callable[[Case], CaseOutcome | None], precision: str) -> CaseOutcome:
    """The outcome of a near miss, by its errors on four further seeds together with the first; see :func:`judge`.

    The first seed stays in the mean, so repeating it cannot only help. On the further ones, too, nothing but errors of values
    may fail. The same applies to numbers of elements that differ.

    Args:
        outcome: a near miss.
        run: runs the candidate on a case; ``None`` if the reference does not accept it.
        precision: ``budget`` or ``strict``, as in the settings.
    """
    measured, counted = [outcome.measurements], [*outcome.counts]
    for number in range(1, FURTHER_SEEDS + 1):
        seed = outcome.case.seed + number * SEED_STEP
        other = run(replace(outcome.case, seed=seed, has_all_draws=True))
        if other is None:
            continue
        may_fail = {item.name for item in other.measurements} | {item.name for item in other.counts}
        if not _failed(other) <= may_fail or (not other.is_correct and not _failed(other)):
            return other
        measured.append(other.measurements)
        counted += other.counts
    agreements = {name: _over_all(name, measured, precision) for name in _names(measured)}
    wrong = {name: agreement.problem for name, agreement in agreements.items() if agreement.problem}
    wrong |= _too_many(counted)
    if wrong:
        name, problem = next(iter(wrong.items()))
        return replace(outcome, reason=f"{name}: {problem}, over {len(measured)} seeds")
    checks = tuple(
        Check(check.name, CheckStatus.PASSED, check.case, f"over {len(measured)} seeds; on one alone: {check.detail}")
        if check.status is CheckStatus.FAILED
        else check
        for check in outcome.checks
    )
    return replace(outcome, status=VerdictStatus.CORRECT, checks=checks, reason="")


def _failed(outcome: CaseOutcome) -> set[str]:
    return {check.name for check in outcome.checks if check.status is CheckStatus.FAILED}


def _names(measured: list[tuple[Measurement, ...]]) -> list[str]:
    return list(dict.fromkeys(item.name for items in measured for item in items))


def _too_many(counted: Sequence[ElementCount]) -> dict[str, str]:
    """By check, what is wrong if more elements differ on average than may."""
    wrong = {}
    for name in dict.fromkeys(item.name for item in counted):
        outside, limit = (
            sum(numbers) for numbers in zip(*[(i.outside, i.limit) for i in counted if i.name == name], strict=True)
        )
        if outside > limit:
            wrong[name] = f"{outside} elements differ by more than rounding explains, the limit is {limit}"
    return wrong


def _over_all(name: str, measured: list[tuple[Measurement, ...]], precision: str) -> Agreement:
    return judge([item for items in measured for item in items if item.name == name], FACTORS[precision])
