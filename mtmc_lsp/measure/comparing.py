"""Compares a candidate's results with the reference's and the float64 oracle's. Runs in workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.measure.at_once import numbers

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


class Comparison:
    """Collects the checks of one case."""

    def __init__(self, precision: str) -> None:
        self._factor = FACTORS[precision]
        self._checks: list[dict[str, str]] = []
        self._worst = (0.0, 0.0)
        self._left: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []

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

    def tensor(self, name: str, mine: Any, own: Any, oracle: Any, near: float, ties: Any) -> None:
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

        def judge(facts: list[float]) -> None:
            found = judged(facts, dtype, near, self._factor)
            self._settle(place, found.wrong)
            if found.error > self._worst[0]:
                self._worst = (found.error, found.own_error)

        self._left.append((measured(mine, own, oracle), judge))

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
    """Every check of one case, and the worst relative errors.

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
        comparison.tensor(name, mine, own, want["oracle"][i], want["near"].get(i, 0.0), want["ties"].get(i))
        if exact:
            comparison.exact(name, mine, own, want["oracle"][i])
    for name, held in inputs.items():
        mine, own = seen["after"].get(name), want["after"].get(name)
        if own is None:
            comparison.untouched(name, held, mine)
        else:
            oracle = want["oracle_after"].get(name, own)
            mine, near = held if mine is None else mine, want["near"].get(name, 0.0)
            comparison.tensor(f"input {name} afterwards", mine, own, oracle, near, None)
    checks, (error, reference_error) = comparison.found()
    return {"checks": checks, "error": error, "reference_error": reference_error}


def discrete_difference(
    mine: torch.Tensor, own: torch.Tensor, oracle: Any, near: float, ties: Mapping[str, Any] | None, factor: float
) -> str:
    """What is wrong with an integer or boolean result.

    Rounding decides where a value lies on an edge (``round(x / scale)``, ``x > threshold``): as many elements may be another
    than the oracle's as ``factor`` times those of the user's own code, or of the oracle on inputs that moved by rounding
    (``near``, a part of all), and by no more than the own ones are. An index may differ where the values at both places tie.
    """
    wrong = mine != own
    if ties is not None and bool(wrong.any()):
        values, dim = ties["values"], ties["dim"]
        a, b = (_pick(values, index, dim) for index in (mine, own))
        if a is not None and b is not None:
            wrong &= ((a - b).abs() > ties["epsilon"] * b.abs()).view(wrong.shape)
    count = int(wrong.sum())
    if not count:
        return ""
    detail = f"{count} of {own.numel()} elements differ"
    if ties is not None or not isinstance(oracle, torch.Tensor) or oracle.shape != own.shape:
        return detail
    own_wrong, moved = int((own != oracle).sum()), near * own.numel()
    allowed = min(factor * max(own_wrong, moved), max(2.0 * own_wrong, NOISE * own.numel()))
    if not allowed:
        return detail
    count = int((mine != oracle).sum())
    if count <= allowed and _furthest(mine, oracle) <= max(1, _furthest(own, oracle)):
        return ""
    return f"{detail}; {count} from the oracle's, of the user's own code {own_wrong}, allowed are {int(allowed)}"


def _furthest(result: torch.Tensor, oracle: torch.Tensor) -> int:
    """The largest difference of two integer results."""
    return int((result.to(torch.int64) - oracle.to(torch.int64)).abs().max())


def _pick(values: torch.Tensor, index: torch.Tensor, dim: int | None) -> torch.Tensor | None:
    """The values at the indices that a reduction over ``dim`` returned; None where an index is out of range."""
    if dim is None:
        values, dim = values.flatten(), 0
    if not values.dim():
        return values
    places = index if index.dim() == values.dim() else index.unsqueeze(dim)
    if bool((places < 0).any()) or bool((places >= values.shape[dim]).any()):
        return None
    return values.gather(dim, places)


PIECE = 1 << 26
"""Elements that are compared at a time: their float64 copies take a few gigabytes at most."""
FEW = 8.0
"""How many times more is always allowed of one element than of many; of several as their errors' mean scatters."""
LEAST = 1e-300
"""Keeps a division by a norm of 0 from failing."""
NOISE = 0.01
"""Where rounding of the inputs alone moves the oracle by this much, the result is rounding noise and says nothing."""


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
    """What :func:`judged` decides by, still on the device: four counts of elements, and three L2 norms."""
    counts = torch.zeros(4, dtype=torch.float64, device=own.device)
    distances = Distances(own.device)
    for part, theirs, truth in pieces(mine, own, oracle):
        finite = comparable(theirs, truth)
        broken = finite & ~torch.isfinite(part)
        # Where only one of the user's code and the oracle overflows, the range of the dtype decides, not correctness.
        lost = torch.isnan(theirs) & torch.isnan(truth) & ~torch.isnan(part)
        both = torch.isinf(theirs) & torch.isinf(truth) & (theirs.double() == truth.double())
        counts += torch.stack([each.sum() for each in (broken, lost, both & (part != theirs), finite)])
        distances.add(truth, finite, part, theirs)
    return torch.cat([counts, *(norm.reshape(1) for norm in (*distances.apart, distances.scale))])


def judged(facts: Sequence[float], dtype: str, near: float, factor: float) -> Agreement:
    """What :func:`agreement` gives, of what :func:`measured` read."""
    broken, lost, infinite, count = map(int, facts[:4])
    if broken:
        return Agreement(f"{broken} elements are NaN or infinite, or were never written", float("inf"))
    if lost:
        return Agreement(f"{lost} elements should be NaN", float("inf"))
    if infinite:
        return Agreement(f"{infinite} elements should be infinite", float("inf"))
    if not count or near > NOISE:
        return Agreement("")
    error, own_error = (norm / (facts[6] + LEAST) for norm in facts[4:6])
    own_error = max(own_error, near)
    # Of few elements the user's own error may be next to none by luck, and a sum in another order is no worse for it.
    floor = FLOAT64_FLOOR if dtype == "float64" else 4 * EPSILON[dtype] * (1.0 + FEW / math.sqrt(count))
    # Beyond the tolerance twice the user's own error is the limit; of few elements its size is luck, of one wholly.
    luck = 2.0 + (factor - 2.0) / math.sqrt(count)
    budget = min(max(factor * own_error, floor), max(TOLERANCE[dtype], luck * own_error))
    detail = f"relative L2 error {error:.2e}, the user's own code has {own_error:.2e}, allowed is {budget:.2e}"
    return Agreement("" if error <= budget else detail, error, own_error)


def comparable(own: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Where values can be compared.

    What is beyond the dtype's range has no right answer in it: the largest number, as ``nan_to_num`` gives it, is another one.
    So near its end that an error within the tolerance leads beyond it has none either.
    """
    dtype = str(own.dtype).removeprefix("torch.")
    end = torch.finfo(own.dtype).max * (1.0 - TOLERANCE[dtype])
    return torch.isfinite(own) & torch.isfinite(oracle) & (oracle.double().abs() <= end)


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape, each small enough that float64 copies of it take little memory."""
    total = tensors[0].numel()
    if total <= PIECE:
        yield tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    longest = max(range(tensors[0].dim()), key=lambda dim: tensors[0].shape[dim])
    step = max(1, PIECE * tensors[0].shape[longest] // total)
    yield from zip(*(tensor.split(step, longest) for tensor in tensors), strict=True)


class Distances:
    """L2 distances of results from another one, and that one's L2 norm, added up piece by piece where they are."""

    def __init__(self, device: torch.device) -> None:
        self.apart: list[torch.Tensor] = []
        """Of each result."""
        self.scale = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, other: torch.Tensor, where: torch.Tensor, *results: torch.Tensor) -> None:
        """Take in a piece of each result, as far as ``where`` is true."""
        before = self.apart or [torch.zeros_like(self.scale) for _ in results]
        self.apart = [torch.hypot(d, apart(result, other, where)) for d, result in zip(before, results, strict=True)]
        self.scale = torch.hypot(self.scale, size(other, where))

    def relative(self) -> list[torch.Tensor]:
        """The distances as parts of the norm."""
        return [distance / (self.scale + LEAST) for distance in self.apart]


def apart(result: torch.Tensor, oracle: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The L2 distance of a result from the oracle's, over the elements ``where`` is true."""
    return size(result.double() - oracle.double(), where)


def size(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The L2 norm of the elements ``where`` is true."""
    return torch.linalg.vector_norm(torch.where(where, values.double(), 0.0))


def sensitivity(moved: torch.Tensor, own: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """How far the oracle is from itself on inputs that are moved a little, still on the device.

    A relative L2 distance; of integers and truth values the part of them that are others.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=own.device)
    if not moved.shape == own.shape == oracle.shape:
        return nothing
    if not own.is_floating_point():
        return (moved != oracle).double().mean() if own.numel() and not own.is_complex() else nothing
    distances = Distances(own.device)
    for there, theirs, truth in pieces(moved, own, oracle):
        distances.add(truth, comparable(theirs, truth) & torch.isfinite(there), there)
    return distances.relative()[0]


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
