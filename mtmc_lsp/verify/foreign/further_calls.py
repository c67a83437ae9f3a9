"""Calls of a foreign candidate after all its cases passed: on more values, and in other surroundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.verify.case_runner import CaseRunner
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.messages import CallPlan, Surroundings
from mtmc_lsp.verify.outcomes import CaseOutcome
from mtmc_lsp.verify.reference import PreparedCase
from mtmc_lsp.verify.use.check import use_case

CALLS_AT_OTHER_TIMES = 16
"""Repeats with other clocks, chance and addresses. What happens once in eight calls is missed once in nine verifications."""
MORE_VALUES = 32
"""Further values for a candidate that reads contents in Python. What one of ten draws decides is missed once in 29 times."""
DISTRIBUTIONS = (
    "normal",
    "zero rows",
    "uniform",
    "mixed",
    "ties",
    "zero rows",
    "extreme",
    "low",
    "constant",
    "normal",
    "offset",
)
SURROUNDINGS = "surroundings"
"""The name of the check."""
WHERE = {
    Surroundings.EARLY: "at other times, with other random numbers and addresses",
    Surroundings.LATE: "at other times, with other random numbers and addresses, after calls of another instance",
    Surroundings.PROGRAM: "in a process that looks like a user's program",
    Surroundings.PROGRAM_ON_GPU: "in a process that looks like a user's program",
}


@dataclass(frozen=True)
class FurtherCalls:
    """What the further calls need."""

    runner: CaseRunner
    prepare: Callable[[Case], PreparedCase]
    next_process: Callable[[], None]
    """Ends the candidate's process, so that a new one starts."""
    interpreted: bool
    repeat_seconds: float

    def outcomes(self, passed: Sequence[CaseOutcome], first: Case, smallest: Case) -> Iterator[CaseOutcome]:
        """The outcomes of the further calls.

        Args:
            passed: the outcomes of all cases.
            first: the workload's case.
            smallest: a case that may be called often.
        """
        if any(outcome.host_reads for outcome in passed):
            capture = self.runner.trial.capture
            several_rows = use_case([outcome.case for outcome in passed if outcome.ran], capture, smallest.seed)
            yield from self._with_more_values((smallest, several_rows))
        for kind in (Surroundings.EARLY, Surroundings.LATE):
            is_late = kind is Surroundings.LATE
            plan = CallPlan(True, CALLS_AT_OTHER_TIMES, self.repeat_seconds, adds_instance=is_late, surroundings=kind)
            yield from self._elsewhere(smallest, plan)
        yield from self._in_program(first)
        self.next_process()

    def _with_more_values(self, cases: Sequence[Case]) -> Iterator[CaseOutcome]:
        for i in range(MORE_VALUES):
            distribution = DISTRIBUTIONS[i % len(DISTRIBUTIONS)]
            case = replace(cases[i % len(cases)], distribution=distribution, seed=cases[0].seed + 1 + i)
            outcome = self.runner.outcome(self.prepare(case), CallPlan())
            if outcome is not None:
                yield outcome

    def _in_program(self, first: Case) -> Iterator[CaseOutcome]:
        """As a user's program on a GPU, if the interpreter manages the unchanged text, or else without names of a GPU."""
        if self.interpreted:
            # Two calls, on the default stream and on another one.
            plan = CallPlan(repeats=1, surroundings=Surroundings.PROGRAM_ON_GPU)
            outcomes = list(self._elsewhere(first, plan))
            if all(outcome.is_correct or outcome.status is VerdictStatus.INCORRECT for outcome in outcomes):
                yield from outcomes
                return
        yield from self._elsewhere(first, CallPlan(surroundings=Surroundings.PROGRAM))

    def _elsewhere(self, case: Case, plan: CallPlan) -> Iterator[CaseOutcome]:
        self.next_process()
        outcome = self.runner.outcome(self.prepare(case), plan)
        if outcome is None:
            return
        where = WHERE[plan.surroundings]
        if outcome.is_correct:
            check = Check(SURROUNDINGS, CheckStatus.PASSED, case.label)
            yield replace(outcome, checks=(*outcome.checks, check), is_elsewhere=True)
            return
        reason = f"{outcome.reason}, {where}; in the verification it is right"
        check = Check(SURROUNDINGS, CheckStatus.FAILED, case.label, reason)
        yield replace(outcome, checks=(*outcome.checks, check), reason=reason, is_elsewhere=True)
