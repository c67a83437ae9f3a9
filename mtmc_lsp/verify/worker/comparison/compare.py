"""Compares a candidate's results with the reference's and the float64 oracle's. Runs in workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.verify.worker.comparison.batched_reads import computable, numbers
from mtmc_lsp.verify.worker.comparison.discrete import discrete_difference
from mtmc_lsp.verify.worker.comparison.distances import LEAST, NOISE, Distances, comparable, pieces
from mtmc_lsp.verify.worker.comparison.ill_conditioned import beside_own, singly, too_many

FACTORS = {"budget": 8.0, "strict": 2.0}
"""A candidate's error may be this many times the user's own code's error on the same inputs."""
FLOAT64_FLOOR = 1e-12
"""float64 results have no better oracle than the user's own code, so reassociation must fit in here."""


@dataclass(frozen=True)
class Agreement:
    """How one result compares: relative L2 errors against the oracle, and what is wrong (empty when nothing is)."""

    wrong: str
    error: float = 0.0
    own_error: float = 0.0
    tells: bool = True
    """Whether zeros would have been refused; where they would not, agreeing says nothing."""


class Comparison:
    """Collects the checks of one case."""

    def __init__(self, precision: str) -> None:
        self._factor = FACTORS[precision]
        self._checks: list[dict[str, str]] = []
        self._worst = (0.0, 0.0)
        self._left: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []
        self.compared: set[str] = set()
        """Results of floats whose values were compared."""
        self.silent: set[str] = set()
        """Those on which nothing can be said here; complete once :meth:`found` was called."""

    def found(self) -> tuple[list[dict[str, str]], tuple[float, float]]:
        """The checks, and the worst relative errors, the candidate's and the user's own; what they need is read at once."""
        facts = iter(numbers([value for values, _ in self._left for value in values.unbind()]))
        for values, judge in self._left:
            judge([next(facts) for _ in range(len(values))])
        self._left = []
        return self._checks, self._worst

    def check(self, name: str, wrong: str) -> None:
        """Note one check; it failed when ``wrong`` says something."""
        self._checks.append({"name": name, "status": "failed" if wrong else "passed", "detail": wrong})

    def _later(self, name: str) -> dict[str, str]:
        """The place of a check whose outcome is read from the device with all others."""
        self.check(name, "")
        return self._checks[-1]

    def _settle(self, place: dict[str, str], wrong: str) -> None:
        place.update(status="failed" if wrong else "passed", detail=wrong)

    def _drop(self, place: dict[str, str]) -> None:
        self._checks = [check for check in self._checks if check is not place]

    def facts(self, name: str, mine: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """What is seen of a result beside its values."""
        for fact in own:
            differs = mine.get(fact) != own[fact]
            self.check(f"{name} {fact}", f"{mine.get(fact)} instead of {own[fact]}" if differs else "")

    def tensor(
        self,
        name: str,
        mine: Any,
        own: Any,
        oracle: Any,
        near: float,
        ties: Any,
        doubt: Mapping[str, Any] | None = None,
    ) -> None:
        """One result against the reference's and the oracle's."""
        if not isinstance(mine, torch.Tensor) or not isinstance(own, torch.Tensor):
            self.check(f"{name} value", "" if mine is own or mine == own else f"{mine!r} instead of {own!r}")
            return
        for attribute in ("dtype", "shape"):
            a, b = getattr(mine, attribute), getattr(own, attribute)
            self.check(f"{name} {attribute}", "" if a == b else f"{_text(a)} instead of {_text(b)}")
        if mine.dtype != own.dtype or mine.shape != own.shape:
            return
        # The stride of a dimension of size 1 is never used.
        strides = zip(own.shape, mine.stride(), own.stride(), strict=True)
        same = mine.numel() == 0 or all(a == b or size == 1 for size, a, b in strides)
        self.check(f"{name} stride", "" if same else f"{mine.stride()} instead of {own.stride()}")
        if not own.is_floating_point():
            self.check(f"{name} values", discrete_difference(mine, own, oracle, near, ties, self._factor))
            return
        place, dtype = self._later(f"{name} values"), str(own.dtype).removeprefix("torch.")
        is_empty = not own.numel()
        self.compared.add(name)

        def judge(facts: list[float]) -> None:
            found = judged(facts, dtype, near, self._factor)
            self._settle(place, found.wrong)
            self._silence(name, tells=found.tells or is_empty)
            if found.error > self._worst[0]:
                self._worst = (found.error, found.own_error)

        self._left.append((measured(mine, own, oracle), judge))
        if doubt is not None:
            self._doubted(name, mine, own, oracle, near, doubt)

    def _doubted(
        self,
        name: str,
        mine: torch.Tensor,
        own: torch.Tensor,
        oracle: torch.Tensor,
        near: float,
        doubt: Mapping[str, Any],
    ) -> None:
        """What is asked of a result beyond its distance from the oracle's, which may be as large as it is."""
        factor, dtype = max(self._factor, FACTORS["budget"]), str(own.dtype).removeprefix("torch.")
        if doubt["is_strange"]:
            beside = self._later(f"{name} beside your own")

            def judge_beside(facts: list[float]) -> None:
                apart, allowed = facts[0] / (facts[1] + LEAST), max(TOLERANCE[dtype], factor * near)
                detail = f"{apart:.2e} from your own result, allowed is {allowed:.2e}: float64 gives another one than your code"
                self._settle(beside, detail if apart > allowed else "")
                self._silence(name, tells=allowed < 1.0)

            self._left.append((beside_own(mine, own), judge_beside))
        elif doubt["spread"] is not None and near > NOISE and oracle.shape == own.shape:
            place = self._later(f"{name} by element")

            def judge_singly(facts: list[float]) -> None:
                wrong, tells = too_many(facts)
                self._settle(place, wrong)
                self._silence(name, tells=tells)

            self._left.append((singly(mine, own, oracle, doubt["spread"], factor), judge_singly))

    def _silence(self, name: str, *, tells: bool) -> None:
        (self.silent.discard if tells else self.silent.add)(name)

    def exact(self, name: str, mine: Any, own: Any, oracle: Any) -> None:
        """Where arithmetic is exact for the reference, no rounding excuses a difference."""
        if not isinstance(own, torch.Tensor):
            return
        fits = isinstance(mine, torch.Tensor) and mine.shape == own.shape
        wide, count = own.double(), own.numel()
        rounded = (wide != oracle.double()).any() if oracle.shape == own.shape else torch.ones((), device=own.device)
        wrong = (mine.double() != wide).sum() if fits else torch.tensor(count, device=own.device)
        place = self._later(f"{name} exact")

        def judge(facts: list[float]) -> None:
            if facts[0]:
                self._drop(place)
                return
            detail = f"{int(facts[1])} of {count} elements differ on whole numbers, where arithmetic is exact"
            self._settle(place, detail if facts[1] else "")

        self._left.append((torch.stack([rounded.double(), wrong.double()]), judge))

    def untouched(self, name: str, before: torch.Tensor, mine: torch.Tensor | None) -> None:
        """An input that the user's own code leaves alone must be left alone, to the bit."""
        wrong = ""
        if mine is not None:
            fits = (mine.shape, mine.dtype) == (before.shape, before.dtype)
            wrong = f"{int((before != mine).sum())} elements were overwritten" if fits else "it is another tensor"
        self.check(f"input {name} unchanged", wrong)


def compare_case(
    inputs: Mapping[str, torch.Tensor],
    want: Mapping[str, Any],
    seen: Mapping[str, Any],
    precision: str,
    *,
    exact: bool = False,
) -> dict[str, Any]:
    """Every check of one case, the worst relative errors, and under ``silent`` the results on which nothing can be said.

    With ``exact``, results that the reference gives without any error must be given without any.
    """
    comparison = Comparison(precision)
    count, wanted = len(seen["results"]), len(want["results"])
    comparison.check("number of results", f"{count} instead of {wanted}" if count != wanted else "")
    for i, (mine, own) in enumerate(zip(seen["facts"], want["facts"], strict=False)):
        comparison.facts(f"result {i}", mine, own)
    outputs = len(want["facts"])
    for i, (mine, own) in enumerate(zip(seen["results"], want["results"], strict=False)):
        name = f"result {i}" if i < outputs else f"gradient {i - outputs}"
        near, ties, doubt = want["near"].get(i, 0.0), want["ties"].get(i), want["doubts"].get(i)
        comparison.tensor(name, mine, own, want["oracle"][i], near, ties, doubt)
        if exact:
            comparison.exact(name, mine, own, want["oracle"][i])
    for name, held in inputs.items():
        mine, own = seen["after"].get(name), want["after"].get(name)
        if own is None:
            comparison.untouched(name, held, mine)
        else:
            oracle = want["oracle_after"].get(name, own)
            mine, near = held if mine is None else mine, want["near"].get(name, 0.0)
            comparison.tensor(f"input {name} afterwards", mine, own, oracle, near, None, want["doubts"].get(name))
    checks, (error, reference_error) = comparison.found()
    return {
        "checks": checks,
        "error": error,
        "reference_error": reference_error,
        "results": sorted(comparison.compared),
        "silent": sorted(comparison.silent),
    }


FEW = 8.0
"""How many times more is always allowed of one element than of many; of several as their errors' mean scatters."""


def agreement(mine: torch.Tensor, own: torch.Tensor, oracle: torch.Tensor, near: float, factor: float) -> Agreement:
    """Whether a floating point result is within its budget.

    Args:
        mine: the candidate's result.
        own: that of the user's own code.
        oracle: the float64 oracle's.
        near: how far the oracle moves where the inputs move by rounding alone, as a relative L2 distance. Where the
            problem itself magnifies rounding (a constant row, normalised; one sum that cancels), the user's own error is
            partly luck, and this is the least error that can be asked for.
        factor: how many times the user's own error is allowed.
    """
    facts = numbers(list(measured(mine, own, oracle).unbind()))
    return judged(facts, str(own.dtype).removeprefix("torch."), near, factor)


def measured(mine: torch.Tensor, own: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """What :func:`judged` decides by, still on the device: five counts of elements, and three L2 norms."""
    counts = torch.zeros(5, dtype=torch.float64, device=own.device)
    distances = Distances(own.device)
    for part, theirs, truth in pieces(mine, own, oracle):
        finite = comparable(theirs, truth)
        part, theirs, truth = map(computable, (part, theirs, truth))
        broken = finite & ~torch.isfinite(part)
        # Where only one of the user's code and the oracle overflows, the range of the dtype decides, not correctness.
        none = torch.isnan(theirs) & torch.isnan(truth)
        both = torch.isinf(theirs) & torch.isinf(truth) & (theirs.double() == truth.double())
        found = (broken, none & ~torch.isnan(part), both & (part != theirs), finite, finite | none | both)
        counts += torch.stack([each.sum() for each in found])
        distances.add(truth, finite, part, theirs)
    return torch.cat([counts, *(norm.reshape(1) for norm in (*distances.apart, distances.scale))])


def judged(facts: Sequence[float], dtype: str, near: float, factor: float) -> Agreement:
    """What :func:`agreement` gives, of what :func:`measured` read."""
    broken, lost, infinite, count, told = map(int, facts[:5])
    if broken:
        return Agreement(f"{broken} elements are NaN or infinite, or were never written", float("inf"))
    if lost:
        return Agreement(f"{lost} elements should be NaN", float("inf"))
    if infinite:
        return Agreement(f"{infinite} elements should be infinite", float("inf"))
    if not count:
        return Agreement("", tells=told > 0)
    error, own_error = (norm / (facts[7] + LEAST) for norm in facts[5:7])
    own_error = max(own_error, near)
    if near > NOISE:
        # The tolerance is for results that rounding leaves what they are; how far noise goes varies with the order of operations.
        budget = max(factor, FACTORS["budget"]) * own_error
        return Agreement(_beyond(error, own_error, budget), tells=budget < 1.0)
    # Of few elements the user's own error may be next to none by luck, and a sum in another order is no worse for it.
    floor = FLOAT64_FLOOR if dtype == "float64" else 4 * EPSILON[dtype] * (1.0 + FEW / math.sqrt(count))
    # Beyond the tolerance twice the user's own error is the limit; of few elements its size is luck, of one wholly.
    luck = 2.0 + (factor - 2.0) / math.sqrt(count)
    budget = min(max(factor * own_error, floor), max(TOLERANCE[dtype], luck * own_error))
    return Agreement(_beyond(error, own_error, budget), error, own_error, budget < 1.0)


def _beyond(error: float, own_error: float, budget: float) -> str:
    if error <= budget:
        return ""
    return f"relative L2 error {error:.2e}, the user's own code has {own_error:.2e}, allowed is {budget:.2e}"


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
