"""How much time the interpreted programs of a foreign candidate's cases may take together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.verify.messages import CallPlan
from mtmc_lsp.verify.outcomes import CaseOutcome

SECONDS = 4.0
"""Processor time for the programs of all cases that may be sampled."""
PART = 8
"""All programs of a launch run if they take at most this part of the time that is left."""
SAMPLE_SECONDS = 0.125
"""Processor time for the programs of a sample."""
LEAST_ELEMENTS = 4096
"""Cases whose arguments have fewer elements run whole: they have few programs."""


@dataclass
class Samples:
    """The time that is left. Cases with more programs than it allows get a sample of them."""

    seconds: float = SECONDS
    are_comparable: bool = True
    """Whether what a sample stores can be compared: no later code reads it, and programs do not add to memory of others."""

    def plan(self, plan: CallPlan, elements: int) -> CallPlan:
        """The plan for a case whose arguments have so many elements."""
        if plan.repeats or elements < LEAST_ELEMENTS or not self.are_comparable:
            return plan
        whole = max(SAMPLE_SECONDS, self.seconds / PART)
        return replace(plan, sample_seconds=SAMPLE_SECONDS, whole_seconds=whole, must_compare=True)

    def record(self, outcome: CaseOutcome) -> None:
        """A case ran."""
        self.seconds -= outcome.program_seconds
        self.are_comparable = self.are_comparable and not outcome.needs_all_programs
