"""Arrays that hold the values of several programs, so that one numpy operation computes all of them. Runs in workers.

Triton's interpreter calls a kernel once for each program, and each operation of a small tile takes the time of Python's calls.
:class:`Lanes` stands in for the array of a tile: its shape is that of one program, while numpy sees one more dimension in front.
Functions and methods that are not defined here raise an exception, and then the programs run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from numpy.lib.mixins import NDArrayOperatorsMixin


class ProgramsDiffer(BaseException):
    """A branch or the length of a loop depends on the program. No kernel can catch it as an exception."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values
        """For each program the value that decides."""


class Lanes(NDArrayOperatorsMixin):
    """An array for each of several programs."""

    def __init__(self, values: Any) -> None:
        self.values = values
        """With the programs as first dimension."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        return self.values.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(self.values.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one program's array."""
        return tuple(self.values.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of dimensions of one program's array."""
        return int(self.values.ndim) - 1

    @property
    def size(self) -> int:
        """The number of elements of one program's array."""
        return int(self.values[0].size)

    def astype(self, dtype: Any) -> Lanes:
        """Other types of elements."""
        return Lanes(self.values.astype(dtype))

    def view(self, dtype: Any) -> Lanes:
        """The same bits as elements of another type with the same size."""
        if numpy.dtype(dtype).itemsize != self.values.itemsize:
            raise TypeError("a view of another size")
        return Lanes(self.values.view(dtype))

    def copy(self) -> Lanes:
        """A copy."""
        return Lanes(self.values.copy())

    def reshape(self, *shape: Any) -> Lanes:
        """Another shape."""
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return Lanes(self.values.reshape((len(self.values), *sizes)))

    def flatten(self) -> Lanes:
        """One dimension."""
        return self.reshape(-1)

    def squeeze(self, axis: int | None = None) -> Lanes:
        """Without one dimension, or without all that have one element."""
        if axis is not None:
            return Lanes(self.values.squeeze(_axis(axis)))
        return self.reshape(tuple(size for size in self.shape if size != 1))

    def item(self) -> Lanes:
        """The only element, of each program."""
        if self.size != 1:
            raise ValueError("several elements")
        return self.reshape(())

    def any(self) -> bool:
        """Whether an element of any program is true. Kernels cannot call it; it only chooses between equal computations."""
        return bool(self.values.any())

    def all(self) -> bool:
        """Whether all elements of all programs are true, for assertions."""
        return bool(self.values.all())

    def __getitem__(self, key: Any) -> Lanes:
        return Lanes(self.values[_index(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, Lanes):
            raise TypeError("a value of one program")
        self.values[_index(key)] = value.values

    def _only_value(self) -> Any:
        if self.size != 1:
            raise ValueError("several elements")
        flat = self.values.reshape(-1)
        if not (flat == flat[0]).all():
            raise ProgramsDiffer(flat)
        return flat[0].item()

    def __bool__(self) -> bool:
        return bool(self._only_value())

    def __int__(self) -> int:
        return int(self._only_value())

    def __index__(self) -> int:
        return int(self._only_value())

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the arrays of several programs are no array")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        if method != "__call__" or named.keys() - {"dtype", "casting"}:
            return NotImplemented
        if ufunc.signature is None:
            results = ufunc(*aligned(inputs), **named)
        elif ufunc is numpy.matmul and all(value.ndim >= 2 for value in inputs):
            # Numpy repeats the operand that is the same for all programs.
            results = ufunc(*aligned(inputs), **named)
        else:
            return NotImplemented
        return tuple(map(Lanes, results)) if isinstance(results, tuple) else Lanes(results)

    def __array_function__(self, function: Any, types: Any, args: Any, named: Any) -> Any:
        handler = FUNCTIONS.get(function)
        return NotImplemented if handler is None else handler(function, *args, **named)


def values_of(value: Any) -> Any:
    """The array with all programs; other values as they are."""
    return value.values if isinstance(value, Lanes) else value


def aligned(inputs: Sequence[Any]) -> list[Any]:
    """Arrays that numpy broadcasts as it would those of one program."""
    rank = max(numpy.ndim(value) if not isinstance(value, Lanes) else value.ndim for value in inputs)
    return [_with_rank(value, rank) if isinstance(value, Lanes) else value for value in inputs]


def _with_rank(lanes: Lanes, rank: int) -> Any:
    shape = lanes.values.shape
    missing = rank - lanes.ndim
    return lanes.values.reshape((shape[0], *(1,) * missing, *shape[1:])) if missing else lanes.values


def spread(inputs: Sequence[Any]) -> list[Any]:
    """Arrays of equal shape with the programs as first dimension; at least one of the inputs has it."""
    count = next(len(value.values) for value in inputs if isinstance(value, Lanes))
    arrays = aligned(inputs)
    shape = numpy.broadcast_shapes(*(array.shape for array in arrays))
    assert shape[0] == count
    return [numpy.broadcast_to(array, shape) for array in arrays]


def _index(key: Any) -> tuple[Any, ...]:
    """The index in the array of all programs."""
    parts = key if isinstance(key, tuple) else (key,)
    if not all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts):
        raise TypeError("an index that is an array")
    return (slice(None), *parts)


def _axis(axis: int) -> int:
    """The dimension in the array of all programs."""
    return axis + 1 if axis >= 0 else axis


def _like(function: Any, prototype: Any, *args: Any, **named: Any) -> Lanes:
    return Lanes(function(values_of(prototype), *args, **named))


def _elementwise(function: Any, *args: Any, **named: Any) -> Lanes:
    return Lanes(function(*aligned(args), **named))


def _broadcast_to(_: Any, array: Lanes, shape: Any) -> Lanes:
    return Lanes(numpy.broadcast_to(_with_rank(array, len(shape)), (len(array.values), *shape)))


def _along(function: Any, array: Lanes, axis: int) -> Lanes:
    return Lanes(function(array.values, axis=_axis(axis)))


def _transpose(_: Any, array: Lanes, axes: Sequence[int] | None = None) -> Lanes:
    order = range(array.ndim - 1, -1, -1) if axes is None else axes
    return Lanes(numpy.transpose(array.values, (0, *(axis % array.ndim + 1 for axis in order))))


def _reduce(function: Any, array: Lanes, axis: int | None = None, *, keepdims: bool = False) -> Lanes:
    if axis is not None:
        return Lanes(function(array.values, axis=_axis(axis), keepdims=keepdims))
    reduced = function(array.values.reshape(len(array.values), -1), axis=1)
    return Lanes(reduced.reshape(-1, *(1,) * array.ndim) if keepdims else reduced)


def _roll(_: Any, array: Lanes, shift: int, axis: int) -> Lanes:
    return Lanes(numpy.roll(array.values, shift, _axis(axis)))


def _joined(function: Any, arrays: Sequence[Any], axis: int = 0) -> Lanes:
    count = next(len(value.values) for value in arrays if isinstance(value, Lanes))
    parts = [
        array.values if isinstance(array, Lanes) else numpy.broadcast_to(array, (count, *array.shape))
        for array in arrays
    ]
    return Lanes(function(parts, axis=_axis(axis)))


def _take_along_axis(_: Any, array: Any, indices: Any, axis: int) -> Lanes:
    count = next(len(value.values) for value in (array, indices) if isinstance(value, Lanes))
    both = [
        value.values if isinstance(value, Lanes) else numpy.broadcast_to(value, (count, *value.shape))
        for value in (array, indices)
    ]
    return Lanes(numpy.take_along_axis(both[0], both[1], _axis(axis)))


def _array_equal(_: Any, first: Any, second: Any, *, equal_nan: bool = False) -> bool:
    one, other = aligned((first, second))
    return bool(numpy.array_equal(one, other, equal_nan=equal_nan))


def _broadcast_arrays(_: Any, *arrays: Any) -> list[Lanes]:
    return list(map(Lanes, spread(arrays)))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((numpy.zeros_like, numpy.ones_like, numpy.full_like), _like),
    **dict.fromkeys((numpy.where, numpy.clip), _elementwise),
    **dict.fromkeys((numpy.expand_dims, numpy.flip, numpy.cumsum, numpy.cumprod), _along),
    **dict.fromkeys(
        (
            numpy.sum,
            numpy.prod,
            numpy.max,
            numpy.min,
            numpy.nanmax,
            numpy.nanmin,
            numpy.argmax,
            numpy.argmin,
            numpy.nanargmax,
            numpy.nanargmin,
        ),
        _reduce,
    ),
    **dict.fromkeys((numpy.concatenate, numpy.stack), _joined),
    numpy.transpose: _transpose,
    numpy.broadcast_to: _broadcast_to,
    numpy.broadcast_arrays: _broadcast_arrays,
    numpy.roll: _roll,
    numpy.take_along_axis: _take_along_axis,
    numpy.array_equal: _array_equal,
}
"""The functions of numpy that take these arrays."""
