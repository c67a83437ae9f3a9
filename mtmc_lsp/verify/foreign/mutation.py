"""Searches for a case on which a candidate is wrong, by changing sizes and values of the one with the largest error.

The error is taken relative to its limit. A change that increases it is kept. All choices follow from the seed; the time limits
how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from time import monotonic

from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import VALUES, Case, argument_elements
from mtmc_lsp.verify.edge_cases import exceeds_workload
from mtmc_lsp.verify.error_limits import FACTORS, judge
from mtmc_lsp.verify.foreign.value_mix import VARIED, ValueMix
from mtmc_lsp.verify.outcomes import CaseOutcome, checked
from mtmc_lsp.verify.sizes.case_sizes import is_small_enough, raised_sizes

MOST_SECONDS, PART = 3.0, 0.4
"""Time for the search: at most this many seconds, and this part of the time that the fixed cases took."""
MOST_CASES = 48
"""Limit for the changed cases, which an idle machine tries in less time."""
CHILDREN, SIZES_PART = 4, 0.3
"""Changed cases that are tried before the best of them is changed further (the references of all are computed ahead), and the
part of them in which a size is changed instead of the values."""
LEAST_SIZE, LEAST_FINITE = 8, 64
"""Sizes are not changed to smaller ones, and cases with fewer elements in a result are no beginning: their errors are chance."""
MOST_ELEMENTS, GROWTH = 4096, 2
"""Cases have at most this many elements of arguments, or this many times those of the first one."""
NAMED = ("normal", "uniform", "mixed", "offset", "low", "negative", "ties", "zero rows", "extreme", "large", "tiny")
SEARCH = "search for a wrong case"
"""The name of the check."""


@dataclass(frozen=True)
class MutationSearch:
    """What the search needs."""

    prepare: Callable[[Case], object]
    """Begins to compute the reference of a case."""
    run: Callable[[Case], CaseOutcome | None]
    """Runs the candidate; ``None`` if the reference does not accept the case."""
    capture: Capture
    interpreted: bool
    """Whether Triton's interpreter runs the kernels."""
    precision: str
    """``budget`` or ``strict``, as in the settings."""
    seed: int
    """Of the first changed case, and of all choices."""

    def outcomes(self, passed: Sequence[CaseOutcome], seconds: float) -> Iterator[CaseOutcome]:
        """The first wrong case, or else one check about the whole search; nothing if no case can be changed, or if each is slow.

        Args:
            passed: the outcomes of the fixed cases.
            seconds: the time that they took.
        """
        beginning = self._beginning(passed)
        if beginning is None or seconds / len(passed) > MOST_SECONDS / CHILDREN:
            return
        random, end = Random(self.seed), monotonic() + min(MOST_SECONDS, PART * seconds)
        # The best case with a named distribution, and the best one with a mix of values: each is changed into its like.
        case, mixed = beginning.case, replace(beginning.case, distribution=ValueMix().name)
        best = {False: (self._share(beginning), case), True: (0.0, mixed)}
        count = 0
        while monotonic() < end and count < MOST_CASES:
            children = [self._changed(best[i % 2 == 0][1], random, count + i) for i in range(CHILDREN)]
            for child in children:
                self.prepare(child)
            for child in children:
                outcome = self.run(child)
                count += 1
                if outcome is None or not outcome.ran:
                    continue
                if not outcome.is_correct:
                    yield outcome
                    return
                # A larger error than its limit was chance, which other seeds did not confirm.
                kind, share = child.distribution.startswith(VARIED), self._share(outcome)
                if best[kind][0] < share <= 1.0:
                    best[kind] = share, child
        share, case = max(best.values(), key=lambda item: item[0])
        detail = f"{count} cases tried, the largest error is {share:.0%} of its limit"
        yield checked(case, [Check(SEARCH, CheckStatus.PASSED, case.label, detail)])

    def _beginning(self, passed: Sequence[CaseOutcome]) -> CaseOutcome | None:
        usable = [
            outcome
            for outcome in passed
            if outcome.ran
            and outcome.measurements
            and outcome.case.kind == VALUES
            and not (outcome.case.layout or outcome.case.numbers or outcome.is_elsewhere)
            and argument_elements(self.capture, outcome.case.sizes) <= MOST_ELEMENTS
        ]
        large = [outcome for outcome in usable if min(item.finite for item in outcome.measurements) >= LEAST_FINITE]
        return max(large or usable, key=self._share, default=None)

    def _share(self, outcome: CaseOutcome) -> float:
        """The largest error of a result as a part of its limit."""
        agreements = [judge([item], FACTORS[self.precision]) for item in outcome.measurements]
        return max((item.error / item.limit for item in agreements if item.limit), default=0.0)

    def _changed(self, case: Case, random: Random, number: int) -> Case:
        seed = self.seed + number
        sizes = self._changed_sizes(case, random) if random.random() < SIZES_PART else None
        if sizes is not None:
            return replace(case, sizes=sizes, seed=seed, may_be_refused=exceeds_workload(self.capture, sizes))
        return replace(case, distribution=_changed_values(case.distribution, random), seed=seed)

    def _changed_sizes(self, case: Case, random: Random) -> Mapping[str, int] | None:
        """The sizes with one of them changed; ``None`` if the changed sizes are not allowed."""
        graph = self.capture.graph
        variable = [name for name in self.capture.variable_sizes if case.sizes.get(name, 0) >= LEAST_SIZE]
        if not variable:
            return None
        name = random.choice(variable)
        size = case.sizes[name]
        power = 1 << size.bit_length()
        choices = (
            size + 1,
            size - 1,
            size // 2,
            2 * size + 1,
            power,
            power + 1,
            power - 1,
            random.randint(size // 2, 2 * size),
        )
        sizes = raised_sizes(graph, {**case.sizes, name: max(LEAST_SIZE, random.choice(choices))}, variable)
        most = max(MOST_ELEMENTS, GROWTH * argument_elements(self.capture, case.sizes))
        is_allowed = is_small_enough(graph, sizes, interpreted=self.interpreted)
        return sizes if is_allowed and argument_elements(self.capture, sizes) <= most else None


def _changed_values(distribution: str, random: Random) -> str:
    if distribution.startswith(VARIED):
        return ValueMix.of(distribution).changed(random).name
    return random.choice(NAMED)
