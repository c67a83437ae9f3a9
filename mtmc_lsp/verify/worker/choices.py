"""Operations that return indices of scores: argmax, top-k, sort, nearest neighbours, quantisers. Runs in workers.

If two scores differ by less than the reference's own rounding error, rounding decides which of the two indices is returned, and a
correct candidate may return the other one. :class:`ChoiceRecorder` finds the scores behind indices in the oracle's run,
:class:`TiedChoices` measures the rounding error of the scores, and :class:`ScoreNoise` runs the oracle with scores that differ by
that error, which shows what else depends on such an index: ``codes[index]``, ``index // width``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.worker.comparison.discrete import Ties, tie_limits
from mtmc_lsp.verify.worker.comparison.distances import PIECE

MOST_FLATTENED = 3
"""Indices without a dimension count the elements of up to this many last dimensions, as those of pooling do."""


@dataclass(frozen=True)
class Choice:
    """Indices, and the scores that they refer to."""

    scores: torch.Tensor
    dim: int
    """The dimension of ``scores`` that the indices refer to."""
    index: torch.Tensor
    """Like ``scores`` except in ``dim``."""

    @property
    def is_order(self) -> bool:
        """Whether each row has several distinct indices, as from ``sort`` and ``topk``."""
        ordered = self.index.sort(self.dim).values
        return self.index.shape[self.dim] > 1 and not bool((ordered.diff(dim=self.dim) == 0).any())

    def chosen(self, index: torch.Tensor | None = None) -> torch.Tensor:
        """The scores at these indices, by default the own ones."""
        return self.scores.gather(self.dim, self.index if index is None else index)

    def is_ambiguous(self, limits: torch.Tensor) -> bool:
        """Whether rounding decides in some row; ``limits`` has for each score the difference up to which it ties."""
        if not self.scores.is_floating_point():
            return False
        if self.index.shape[self.dim] > 1:
            ordered, order = self.scores.sort(self.dim)
            limits, count = limits.gather(self.dim, order), ordered.shape[self.dim] - 1
            larger = torch.maximum(limits.narrow(self.dim, 0, count), limits.narrow(self.dim, 1, count))
            return bool((ordered.diff(dim=self.dim) <= larger).any())
        larger = torch.maximum(limits, limits.gather(self.dim, self.index))
        ties = (self.scores - self.chosen()).abs() <= larger
        return bool((ties.sum(self.dim) > 1).any())


class ChoiceRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Records the choices of a run."""

    def __init__(self, only: Container[int] | None = None) -> None:
        """Create the mode for one run.

        Args:
            only: the numbers of the choices to record; by default all.
        """
        super().__init__()
        self.choices: dict[int, Choice] = {}
        """The choices by number: the run makes choice 0 first."""
        self.count = 0
        """The number of choices that the run has made."""
        self._only = only
        self._indices: dict[int, tuple[int, torch.Tensor]] = {}
        """The number and the index of each choice, by ``id`` of the index. The reference prevents that another tensor gets it."""
        self._used: set[int] = set()
        self._reads = _ListReads(self._use)

    def __enter__(self) -> ChoiceRecorder:
        self._reads.__enter__()
        entered: ChoiceRecorder = super().__enter__()
        return entered

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._reads.__exit__(*exception)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._indices:
            self._use([*args, *(kwargs or {}).values()])
        result = function(*args, **(kwargs or {}))
        choice = choice_of(function, args, kwargs or {}, result)
        if choice is None:
            return result
        number, self.count = self.count, self.count + 1
        if self._only is None or number in self._only:
            # The code may change the scores afterwards, as non-maximum suppression does.
            scores = choice.scores.clone() if choice.scores.numel() <= PIECE else choice.scores
            self.choices[number] = Choice(scores, choice.dim, choice.index.clone())
            index = result[-1] if isinstance(result, (list, tuple)) else result
            self._indices[id(index)] = number, index
        return result

    def drop_unused(self, results: Iterable[Any]) -> None:
        """Forget the choices whose indices the run neither used nor returned: ``x.max(1).values`` is the same for tied scores."""
        self._use(results)
        self.choices = {number: choice for number, choice in self.choices.items() if number in self._used}
        self._indices = {}

    def _use(self, operands: Iterable[Any]) -> None:
        for operand in operands:
            if isinstance(operand, (list, tuple)):
                self._use(operand)
            elif id(operand) in self._indices:
                self._used.add(self._indices[id(operand)][0])


class _ListReads(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Reports tensors whose elements are read as a list, which is no operation that a dispatch mode sees."""

    def __init__(self, on_read: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.tolist:
            self._on_read(args)
        return function(*args, **(kwargs or {}))


class ScoreNoise(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Lets operations choose by scores that are changed randomly, each by up to half of its limit.

    Two scores swap only if they differ by at most the limit. Values that are returned with an index are the unchanged ones. The
    changes of draws 0 and 1 are opposite, as are those of 2 and 3: equal scores swap in one of the two.
    """

    def __init__(self, limits: Mapping[int, torch.Tensor], seed: int, draw: int) -> None:
        """Create the mode for one run; ``limits`` has the limit of each score, by the number of a choice."""
        super().__init__()
        self._limits, self._seed, self._draw, self._next = limits, seed, draw, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = function(*args, **kwargs)
        choice = choice_of(function, args, kwargs, result)
        if choice is None:
            return result
        number, self._next = self._next, self._next + 1
        limit, scores = self._limits.get(number), args[0]
        if limit is None or not choice.scores.is_floating_point():
            return result
        if limit.shape != choice.scores.shape:
            # An earlier choice led to other sizes.
            return result
        generator = torch.Generator(scores.device).manual_seed(self._seed + number + 1000 * (self._draw // 2))
        noise = torch.rand(limit.shape, generator=generator, device=scores.device, dtype=torch.float64).sub_(0.5)
        change = noise.mul_(limit if self._draw % 2 else -limit)
        noisy = (choice.scores + change).to(scores.dtype).reshape(scores.shape)
        other_result = function(noisy, *args[1:], **kwargs)
        other = choice_of(function, (noisy, *args[1:]), kwargs, other_result)
        if other is None:
            return result
        if isinstance(other_result, torch.Tensor):
            return other_result
        values = choice.chosen(other.index).reshape(other_result[0].shape)
        return type(other_result)((values, *other_result[1:]))


def choice_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Choice | None:
    """The choice that an ATen operation made; None if its result is no index of its operand.

    It is recognised by its schema and its values: its last result has integers, and the operand's elements at these indices are
    its first result; if there is just one result, it reduces a dimension, and they are the largest or the smallest ones.
    """
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    index = results[-1]
    if not isinstance(index, torch.Tensor) or index.dtype != torch.int64 or function._schema.is_mutable:
        return None
    scores = args[0] if args else None
    if not isinstance(scores, torch.Tensor) or not scores.numel() or not index.numel():
        return None
    if scores.is_complex() or (scores.is_floating_point() and scores.element_size() == 1):
        return None
    values = results[0] if len(results) == 2 and isinstance(results[0], torch.Tensor) else None
    if (len(results) == 2 and values is None) or len(results) > 2:
        return None
    names = [argument.name for argument in function._schema.arguments]
    if "dim" in names and (values is not None or "keepdim" in names):
        position = names.index("dim")
        default = function._schema.arguments[position].default_value
        dim = args[position] if position < len(args) else kwargs.get("dim", default)
        if isinstance(dim, (list, tuple)):
            return None
        possible = [_along(scores.detach(), dim, index)]
    elif values is not None and index.dim() == scores.dim():
        counts = range(1, min(MOST_FLATTENED, scores.dim()) + 1)
        possible = [Choice(scores.detach().flatten(-n), -1, index.flatten(-n)) for n in counts]
    else:
        return None
    return next((choice for choice in possible if _selects(choice, values)), None)


def _along(scores: torch.Tensor, dim: int | None, index: torch.Tensor) -> Choice:
    if dim is None or not scores.dim():
        return Choice(scores.flatten(), 0, index.flatten())
    return Choice(scores, dim, index if index.dim() == scores.dim() else index.unsqueeze(dim))


def _selects(choice: Choice, values: torch.Tensor | None) -> bool:
    """Whether the indices are those of ``values``, or without them of the largest or smallest scores."""
    scores, dim, index = choice.scores, choice.dim, choice.index
    others = [size for i, size in enumerate(scores.shape) if i != dim % scores.dim()]
    if index.dim() != scores.dim() or [s for i, s in enumerate(index.shape) if i != dim % scores.dim()] != others:
        return False
    if bool(((index < 0) | (index >= scores.shape[dim])).any()):
        return False
    selected = choice.chosen()
    if values is not None:
        # The parts of a split index are no values of it.
        is_alike = values.dtype == scores.dtype and values.numel() == selected.numel()
        return is_alike and _is_same(selected, values.detach().reshape(selected.shape))
    return any(_is_same(selected, best(dim, keepdim=True)) for best in (scores.amax, scores.amin))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    is_same = a == b
    return bool((is_same | ((a != a) & (b != b)) if a.is_floating_point() else is_same).all())


class TiedChoices:
    """The choices of the oracle, and how far rounding moves their scores."""

    def __init__(self, choices: Mapping[int, Choice], rounded: Sequence[Mapping[int, Choice]], epsilon: float) -> None:
        """Measure the errors of the scores: the largest difference of all runs.

        Args:
            choices: the choices of the oracle, by number.
            rounded: the same choices of runs with rounding. Those of other sizes are ignored.
            epsilon: the machine epsilon of the computation.
        """
        self._choices, self._epsilon = choices, epsilon
        self._errors = {number: _score_error(choice, number, rounded) for number, choice in choices.items()}
        self._limits = {
            number: tie_limits(choice.scores, self._errors[number], epsilon, FACTORS["budget"])
            if choice.scores.is_floating_point()
            else self._errors[number]
            for number, choice in choices.items()
        }

    @property
    def is_ambiguous(self) -> bool:
        """Whether rounding decides some choice."""
        return any(choice.is_ambiguous(self._limits[number]) for number, choice in self._choices.items())

    def noise(self, seed: int, draw: int) -> ScoreNoise:
        """A mode for one run with other choices among ties."""
        return ScoreNoise(self._limits, seed, draw)

    def ties_of(self, result: torch.Tensor) -> Ties:
        """The choices whose indices are an integer result, possibly in another shape or dtype.

        They are found by their values. A result that only equals an index by chance is harmless: another value is accepted
        only if it is the index of a tied score.
        """
        ties = Ties(epsilon=self._epsilon)
        for number, choice in self._choices.items():
            index = choice.index
            if index.numel() == result.numel() and bool((index.flatten() == result.flatten()).all()):
                ties.choices.append(
                    {
                        "values": choice.scores,
                        "dim": choice.dim,
                        "shape": tuple(index.shape),
                        "error": self._errors[number],
                        "is_order": choice.is_order,
                    }
                )
        return ties


def _score_error(choice: Choice, number: int, rounded: Sequence[Mapping[int, Choice]]) -> torch.Tensor:
    error = torch.zeros_like(choice.scores, dtype=torch.float64)
    for run in rounded if choice.scores.is_floating_point() else ():
        other = run[number].scores
        if other.shape == choice.scores.shape:
            difference = (other.double() - choice.scores).abs_().nan_to_num_(nan=0.0, posinf=0.0)
            error = torch.maximum(error, difference)
    return error
