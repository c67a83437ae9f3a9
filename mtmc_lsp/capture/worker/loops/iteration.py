"""What a loop iterates over, and the numbers of a kept loop that change from iteration to iteration."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import length_hint
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mtmc_lsp.capture.worker.loops.markers import operators

MOST_UNROLLED = 256
"""Iterations of a loop that is unrolled, if each has operations: with five, the trace takes about as long as a whole run."""


class NotKept(Exception):
    """A loop must be unrolled; the message says why."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line
        """The line of the loop; 0 for the one whose body runs."""


class OutsideLoop(NotKept):
    """The body contains an operation that no kernel runs step by step. If it reads no state, it may run before the loop."""


class NestedLoops(NotKept):
    """Each iteration of a loop runs another long loop."""

    def __init__(self, inner_line: int) -> None:
        super().__init__(f"each of its iterations runs another long loop, in line {inner_line}")
        self.inner_line = inner_line


class TooLong(Exception):
    """A loop that is unrolled has too many iterations."""

    def __init__(self, line: int, inner_line: int = 0) -> None:
        is_nest = f"the loops of lines {line} and {inner_line} are nested and have too many iterations to unroll"
        super().__init__(is_nest if inner_line else f"the loop of line {line} has too many iterations to unroll")
        self.line = line


class NeedsPeeling(Exception):
    """The body differs in the first or the last iteration, which must run separately. The argument is ``first`` or ``last``."""


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds whatever their values."""
    return condition if isinstance(condition, bool) else bool(statically_known_true(condition))


@dataclass(frozen=True)
class Span:
    """The iterations of a kept loop."""

    loop: int
    count: Any = field(compare=False)
    nest: Any = field(default=None, compare=False)
    """The nest of two loops that the loop is part of; it answers comparisons that differ between iterations."""


Numbering = Callable[["Step"], torch.Tensor]
"""The number of the iteration as a scalar tensor."""


class Changing:
    """A number that is computed from the number of the iteration. Tensors that meet it see it as a scalar tensor."""

    def __init__(self, span: Span, at: Callable[[Numbering], torch.Tensor], *, is_whole: bool = False) -> None:
        self.span = span
        self.at = at
        """The number as a scalar tensor, from those of the iteration."""
        self.is_whole = is_whole
        """Whether it is an integer."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotKept(f"the number of the iteration is an argument of {getattr(function, '__name__', function)}")

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """The number as a scalar tensor on the device of another tensor."""
        return self.at(lambda step: operators().index(like, step.span.loop, step.first, step.step))

    def passed_through(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The result of a function of numbers.

        Raises:
            NotKept: no function of tensors does the same.
        """
        # While it exports, torch replaces ``min`` and ``max``.
        function = getattr(function, "keywords", {}).get("real_callable", function)
        if function in (int, round) and self.is_whole and len(arguments) == 1:
            return self
        replacement = NUMBER_FUNCTIONS.get(function)
        if replacement is None or not all(isinstance(item, (int, float, torch.SymInt, Changing)) for item in arguments):
            raise NotKept(f"the number of the iteration is an argument of {getattr(function, '__name__', function)}")
        is_whole = function in (abs, min, max) and all(map(_is_whole, arguments))

        def at(numbering: Numbering) -> torch.Tensor:
            dtype = torch.int64 if is_whole else torch.float64
            zero = self.at(numbering).to(dtype) * 0
            values = [item.at(numbering).to(dtype) if isinstance(item, Changing) else zero + item for item in arguments]
            return reduce(replacement, values) if len(values) > 1 else replacement(values[0])

        return Changing(self.span, at, is_whole=is_whole)

    def _combined(self, function: Callable[[Any, Any], Any], other: Any, *, swapped: bool) -> Any:
        if isinstance(other, torch.Tensor):
            return ON_TENSORS[function](*((other, self) if swapped else (self, other)))
        if not isinstance(other, (int, float, torch.SymInt, Changing)):
            return NotImplemented
        is_whole = self.is_whole and _is_whole(other) and function in WHOLE

        def at(numbering: Numbering) -> torch.Tensor:
            # Python computes with float64.
            number = self.at(numbering) if is_whole else self.at(numbering).to(torch.float64)
            value = other.at(numbering) if isinstance(other, Changing) else other
            return function(value, number) if swapped else function(number, value)

        return Changing(self.span, at, is_whole=is_whole)

    def _refused(self, *_: Any) -> Any:
        raise NotKept("its body looks at the number of the iteration in a way that differs between iterations")

    def _related(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        """The answer to a comparison that differs between iterations."""
        is_number = isinstance(other, (int, float, torch.SymInt, Changing))
        return self.span.nest.condition(compare, self, other) if self.span.nest and is_number else self._refused()

    def __bool__(self) -> bool:
        return bool(self._related(operator.ne, 0))

    def __eq__(self, other: Any) -> Any:
        return self._related(operator.eq, other)

    def __ne__(self, other: Any) -> Any:
        return self._related(operator.ne, other)

    def __lt__(self, other: Any) -> Any:
        return self._related(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._related(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._related(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._related(operator.ge, other)

    __int__ = __float__ = __index__ = __hash__ = _refused

    def __neg__(self) -> Any:
        return self._combined(operator.mul, -1, swapped=False)


WHOLE = (operator.add, operator.sub, operator.mul, operator.mod, operator.floordiv)
"""Functions of integers that return integers."""


ON_TENSORS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.true_divide,
    operator.pow: torch.pow,
    operator.mod: torch.remainder,
    operator.floordiv: torch.floor_divide,
    operator.eq: torch.eq,
    operator.ne: torch.ne,
    operator.lt: torch.lt,
    operator.le: torch.le,
    operator.gt: torch.gt,
    operator.ge: torch.ge,
}
"""Operators as torch calls, which the trace of the body sees with the number of the iteration as an argument."""


def _is_whole(value: Any) -> bool:
    return value.is_whole if isinstance(value, Changing) else isinstance(value, (int, torch.SymInt))


NUMBER_FUNCTIONS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    float: torch.clone,
    abs: torch.abs,
    min: torch.minimum,
    max: torch.maximum,
    math.sqrt: torch.sqrt,
    math.exp: torch.exp,
    math.log: torch.log,
    math.log1p: torch.log1p,
    math.log2: torch.log2,
    math.sin: torch.sin,
    math.cos: torch.cos,
    math.tanh: torch.tanh,
}
"""Functions of numbers as functions of float64 tensors; ``min`` and ``max`` for each pair of arguments."""


def _arithmetic(name: str, *, swapped: bool) -> Any:
    function = getattr(operator, name)
    return lambda self, other: self._combined(function, other, swapped=swapped)


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(Changing, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(Changing, f"__r{_name}__", _arithmetic(_name, swapped=True))


class Step(Changing):
    """The integer ``first + step * i`` in iteration ``i``."""

    def __init__(self, span: Span, first: Any, step: int) -> None:
        super().__init__(span, lambda numbering: numbering(self), is_whole=True)
        self.first, self.step = first, step

    @property
    def last(self) -> Any:
        """Its value in the last iteration."""
        return self.first + self.step * (self.span.count - 1)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Step) and other.span == self.span:
            return Step(self.span, self.first + other.first, self.step + other.step)
        if isinstance(other, (int, torch.SymInt)):
            return Step(self.span, self.first + other, self.step)
        return self._combined(operator.add, other, swapped=False)

    __radd__ = __add__

    def __neg__(self) -> Step:
        return Step(self.span, -self.first, -self.step)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, (int, torch.SymInt)) or (isinstance(other, Step) and other.span == self.span):
            return self + -other
        return self._combined(operator.sub, other, swapped=False)

    def __rsub__(self, other: Any) -> Any:
        if isinstance(other, (int, torch.SymInt)):
            return -self + other
        return self._combined(operator.sub, other, swapped=True)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int):
            return Step(self.span, self.first * other, self.step * other)
        return self._combined(operator.mul, other, swapped=False)

    __rmul__ = __mul__

    def same(self, other: Any) -> bool:
        """Whether it has the same value as ``other`` in every iteration."""
        return isinstance(other, Step) and self.step == other.step and known(self.first == other.first)

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return ON_TENSORS[compare](self, other)
        if not isinstance(other, (int, torch.SymInt)):
            return self._related(compare, other)
        answers = [self._always(compare, self.first, self.last, other)]
        answers.append(self._always(compare, self.first + self.step, self.last, other))
        answers.append(self._always(compare, self.first, self.last - self.step, other))
        if answers[0] is not None:
            return answers[0]
        if self.span.nest is not None:
            return self._related(compare, other)
        for answer, end in zip(answers[1:], ("first", "last"), strict=True):
            if answer is not None:
                raise NeedsPeeling(end)
        return self._refused()

    def _always(self, compare: Callable[[Any, Any], Any], first: Any, last: Any, other: Any) -> bool | None:
        """The answer to a comparison if it is the same for all values from ``first`` to ``last``."""
        low, high = (first, last) if self.step > 0 else (last, first)
        is_outside = known(low > other) or known(high < other)
        if compare in (operator.eq, operator.ne):
            return (compare is operator.ne) if is_outside else None
        if all(known(compare(end, other)) for end in (low, high)):
            return True
        return False if all(known(_opposite(compare)(end, other)) for end in (low, high)) else None

    def __eq__(self, other: Any) -> Any:
        return self._compared(operator.eq, other)

    def __ne__(self, other: Any) -> Any:
        return self._compared(operator.ne, other)

    def __lt__(self, other: Any) -> Any:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compared(operator.ge, other)

    def __bool__(self) -> bool:
        return bool(self._compared(operator.ne, 0))

    __hash__ = Changing._refused


def _opposite(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return {operator.lt: operator.ge, operator.ge: operator.lt, operator.gt: operator.le, operator.le: operator.gt}[
        compare
    ]


class Steps:
    """An iterable of known length; ``item`` is its item at an index, which may be a :class:`Step`."""

    count: Any

    def item(self, index: Any) -> Any:
        """The item of an iteration."""
        raise NotImplementedError

    def plain(self) -> Any:
        """The iterable as the user wrote it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plain())

    def __length_hint__(self) -> int:
        return length_hint(self.plain())


class Range(Steps):
    """``range(start, stop, step)``."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        start, stop, step = (0, arguments[0], 1) if len(arguments) == 1 else (*arguments, 1)[:3]
        self._start, self._step = start, step
        is_symbolic = any(isinstance(item, torch.SymInt) for item in arguments)
        if not is_symbolic:
            self.count = len(range(*arguments))
        elif step in (1, -1) and not isinstance(step, torch.SymInt):
            self.count = (stop - start) * step
        elif isinstance(step, int) and step:
            distance = stop - start if step > 0 else start - stop
            self.count = (distance + abs(step) - 1) // abs(step)
        else:
            self.count = None

    def item(self, index: Any) -> Any:
        return self._start + self._step * index

    def plain(self) -> Any:
        return range(*self._arguments)


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "!=": operator.ne,
}


class Counting(Steps):
    """The values of a counter to which each iteration adds a number, while it compares with a bound."""

    def __init__(self, start: Any, symbol: str, bound: Any, step: int) -> None:
        self._start, self._symbol, self._bound, self._step = start, symbol, bound, step
        self._range: Range | None = None
        is_whole = all(isinstance(item, (int, torch.SymInt)) for item in (start, bound))
        if is_whole and (step > 0 if symbol in ("<", "<=") else step < 0 if symbol in (">", ">=") else abs(step) == 1):
            end = bound + {"<=": 1, ">=": -1}.get(symbol, 0)
            self._range = Range(start, end, step)
        self.count = self._range.count if self._range is not None else None
        self.after = start if self._range is None or known(self.count <= 0) else start + step * self.count
        """The counter after the loop."""

    def item(self, index: Any) -> Any:
        return self._start + self._step * index

    def plain(self) -> Any:
        return self._range.plain() if self._range is not None else self._values()

    def _values(self) -> Iterator[Any]:
        value = self._start
        while COMPARISONS[self._symbol](value, self._bound):
            yield value
            value = value + self._step
            self.after = value


class Rows(Steps):
    """The slices of a tensor along a dimension."""

    def __init__(self, tensor: torch.Tensor, dim: int = 0) -> None:
        self._tensor, self._dim = tensor, dim % tensor.dim()
        self.count = tensor.shape[self._dim]

    def item(self, index: Any) -> Any:
        return self._tensor[(slice(None),) * self._dim + (index,)]

    def plain(self) -> Any:
        return self._tensor.unbind(self._dim)


class Slices(Rows):
    """The slices of length 1 of a tensor along a dimension, which they keep."""

    def item(self, index: Any) -> Any:
        return self._tensor[(slice(None),) * self._dim + (slice(index, index + 1),)]

    def plain(self) -> Any:
        return self._tensor.split(1, self._dim)


class Reversed(Steps):
    """``reversed(steps)``."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self.count = steps.count

    def item(self, index: Any) -> Any:
        return self._steps.item(self.count - 1 - index)

    def plain(self) -> Any:
        return reversed(self._steps.plain())


class Zipped(Steps):
    """``zip(...)`` of iterables of one length."""

    def __init__(self, parts: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._parts, self._keywords = parts, keywords
        counts = [part.count for part in parts]
        same = bool(counts) and None not in counts and all(bool(count == counts[0]) for count in counts[1:])
        self.count = counts[0] if same else None

    def item(self, index: Any) -> Any:
        return tuple(part.item(index) for part in self._parts)

    def plain(self) -> Any:
        return zip(*(part.plain() for part in self._parts), **self._keywords)  # noqa: B905 (the user's arguments)


class Enumerated(Steps):
    """``enumerate(steps, start)``."""

    def __init__(self, steps: Any, start: Any = 0) -> None:
        self._steps, self._start = steps, start
        self.count = steps.count

    def item(self, index: Any) -> Any:
        return index + self._start, self._steps.item(index)

    def plain(self) -> Any:
        return enumerate(self._steps.plain(), self._start)


class Other(Steps):
    """Any other iterable, which is never kept."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable
        self.count = None

    def plain(self) -> Any:
        return self._iterable
