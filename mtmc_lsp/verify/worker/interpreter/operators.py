"""Makes arithmetic and comparisons of tiles one numpy operation each. Runs in workers.

Triton's interpreter converts and broadcasts both operands of each operation, as the compiler does. If they need no conversion,
numpy broadcasts them itself. Whether they need one depends on their types alone; the first operation on a pair of types runs as
Triton writes it, and its result must be the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy

COMPARED = {
    "__lt__": numpy.less,
    "__le__": numpy.less_equal,
    "__gt__": numpy.greater,
    "__ge__": numpy.greater_equal,
    "__eq__": numpy.equal,
    "__ne__": numpy.not_equal,
}
COMPUTED = {
    "__add__": numpy.add,
    "__radd__": numpy.add,
    "__sub__": numpy.subtract,
    "__rsub__": numpy.subtract,
    "__mul__": numpy.multiply,
    "__rmul__": numpy.multiply,
}
DIVIDED = {"__truediv__": numpy.divide, "__rtruediv__": numpy.divide}
COMBINED = {"__and__": numpy.bitwise_and, "__or__": numpy.bitwise_or}
FLOATS = {"fp32": numpy.dtype("float32"), "fp64": numpy.dtype("float64")}
NUMBERS = {**FLOATS, "int32": numpy.dtype("int32"), "int64": numpy.dtype("int64")}
OPERATIONS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    **{name: (operation, NUMBERS) for name, operation in {**COMPARED, **COMPUTED}.items()},
    **{name: (operation, FLOATS) for name, operation in DIVIDED.items()},
    **{name: (operation, {"int1": numpy.dtype("bool")}) for name, operation in COMBINED.items()},
}
"""By the name of an operator: its function in numpy, and the types of operands that need no conversion if both have it."""
OFFSETS = frozenset((numpy.dtype("int32"), numpy.dtype("int64")))
ADDRESS = numpy.dtype("uint64")
MOST_NUMBERS = 2048
"""Limit for the Python numbers whose arrays are kept."""


_observers: list[object] = []
"""What looks on at each operation now."""


@contextlib.contextmanager
def through_the_builder() -> Iterator[None]:
    """Compute all operations by functions of the interpreter's builder, which an observer may have replaced."""
    _observers.append(object())
    try:
        yield
    finally:
        _observers.pop()


def is_observed() -> bool:
    """Whether something looks on at each operation."""
    return bool(_observers)


def direct_operator(name: str, original: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """An operator of tiles that gives the results of ``original``; that runs where operands need a conversion.

    Args:
        name: of the method, as ``__add__``.
        original: the interpreter's method.
    """
    # In debug mode, operations on whole numbers check for overflow.
    if name not in OPERATIONS or interpreter.interpreter_builder.options.debug:
        return original
    operation, kinds = OPERATIONS[name]
    handle, tensor, constexpr = interpreter.TensorHandle, interpreter.tl.tensor, interpreter.tl.constexpr
    block = interpreter.tl.block_type
    is_reflected = name.startswith("__r")
    plans: dict[tuple[str, str], tuple[Any, Any]] = {}
    """By the types of both operands: the type of their data, and that of the result; or the width of a pointer's elements."""
    numbers: dict[tuple[str, str], Any] = {}
    """By the type of a tile and the text of a Python number: the number in its type, or ``None``."""

    def made(data: Any, kind: Any, type: Any) -> Any:
        return tensor(handle(data, kind), type)

    def number_of(self: Any, value: Any) -> Any:
        """A Python number as an array, if it becomes one of the tile's type."""
        # Text keeps 0.0 and -0.0 apart, and finds NaN again; that of whole numbers differs from those of floats.
        key = (self.type.name, repr(value) if type(value) is int else value.hex())
        if key not in numbers:
            if len(numbers) >= MOST_NUMBERS:
                numbers.clear()
            scalar = self.type.scalar.name
            checked = interpreter.interpreter_semantic.binary_op_type_checking_impl(self, value)
            fits = scalar in kinds and checked[0] is self and checked[1].type.scalar.name == scalar
            numbers[key] = checked[1].handle.data.reshape(-1)[:1].copy() if fits else None
        return numbers[key]

    def operator(self: Any, other: Any) -> Any:
        if _observers:
            return original(self, other)
        if type(other) is constexpr:
            other = other.value
        if type(other) is tensor:
            key = (self.type.name, other.type.name)
            right = other.handle.data
        elif type(other) is int or type(other) is float:
            key = (self.type.name, "number")
            right = number_of(self, other) if self.type.scalar.name in kinds else None
        else:
            return original(self, other)
        left = self.handle.data
        plan = plans.get(key)
        if plan is None or right is None:
            result = original(self, other)
            if right is not None:
                observe(key, self, other, left, right, result)
            return result
        kind, type_of_result = plan
        if left.dtype is kind and right.dtype is kind:
            data = operation(right, left) if is_reflected else operation(left, right)
            return made(data, self.handle.dtype.scalar, type_of_result)
        if type(kind) is int and left.dtype is ADDRESS and right.dtype in OFFSETS:
            data = left + kind * right.astype(ADDRESS)
            is_wider = data.shape != left.shape or (other.type.is_block() and not self.type.is_block())
            return made(data, self.handle.dtype, block(self.type.scalar, data.shape) if is_wider else self.type)
        return original(self, other)

    def observe(key: tuple[str, str], self: Any, other: Any, left: Any, right: Any, result: Any) -> None:
        """Note how the operation on these types is computed, if its result is the same."""
        scalar = self.type.scalar
        if name == "__add__" and scalar.is_ptr() and type(other) is tensor and right.dtype in OFFSETS:
            width = max(1, scalar.element_ty.primitive_bitwidth // 8)
            if _is_same(left + width * right.astype(ADDRESS), result) and other.type.scalar.is_int_signed():
                plans[key] = width, None
            return
        kind = kinds.get(scalar.name)
        is_equal_type = type(other) is not tensor or other.type.scalar.name == scalar.name
        if kind is None or not is_equal_type or left.dtype is not kind or right.dtype is not kind:
            return
        expected = operation(right, left) if is_reflected else operation(left, right)
        if _is_same(expected, result):
            plans[key] = kind, result.type

    return operator


def _is_same(expected: Any, result: Any) -> bool:
    data = result.handle.data
    is_float = expected.dtype.kind == "f"
    return bool(expected.dtype == data.dtype and numpy.array_equal(expected, data, equal_nan=is_float))
