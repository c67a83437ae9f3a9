"""Python numbers that record the arithmetic that the target does with them, and where else it looks at their values."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mtmc_lsp.core.sizes import MATH_FUNCTIONS, Number

BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**"}
"""Recorded operators, by the name of Python's method."""
UNARY = {"neg": "-", "pos": "+"}
INSPECTING = (
    "eq ne lt le gt ge hash bool int float index trunc round floor ceil abs floordiv rfloordiv mod rmod divmod rdivmod "
    "and or xor rand ror rxor lshift rlshift rshift rrshift invert str repr format"
).split()
"""Methods whose result depends on the value in another way than by recorded arithmetic."""
LARGEST_USUAL_INTEGER = 32
"""Integers up to this magnitude are too usual to be recognised."""

DERIVED: dict[str, Callable[[float], float]] = {
    "{} - 1": lambda value: value - 1,
    "1 - {}": lambda value: 1 - value,
    "-{}": lambda value: -value,
}
"""What the formulas of gradients compute from a number: of powers, interpolations and subtractions."""

_ANY = frozenset({0, 1})
ARITHMETIC: dict[str, frozenset[int | str]] = {
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), _ANY | {2, "other", "alpha"}),
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide", "pow"), _ANY | {"other", "exponent"}),
    **dict.fromkeys(("rdiv", "rpow"), _ANY),
    **dict.fromkeys(
        ("eq", "ne", "lt", "le", "gt", "ge", "less", "greater", "less_equal", "greater_equal"), _ANY | {"other"}
    ),
    **dict.fromkeys(("clamp", "clip"), frozenset({1, 2, "min", "max"})),
    "clamp_min": frozenset({1, "min"}),
    "clamp_max": frozenset({1, "max"}),
    "hardtanh": frozenset({1, 2, "min_val", "max_val"}),
    "lerp": frozenset({2, "weight"}),
    **dict.fromkeys(("addcmul", "addcdiv"), frozenset({3, "value"})),
    **dict.fromkeys(
        ("masked_fill", "full", "fill", "full_like", "scalar_tensor"), frozenset({0, 1, 2, "value", "fill_value"})
    ),
    "where": frozenset({1, 2}),
    "normalize": frozenset({3, "eps"}),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "group_norm"), frozenset({4, "eps"})),
    "rms_norm": frozenset({3, "eps"}),
    "leaky_relu": frozenset({1, "negative_slope"}),
}
"""Operations of torch that compute with a number, and the positions and names of the arguments that take it."""


def operation_name(function: Any) -> str:
    """The name of a torch function, method or ATen operation, without overload, and without underscores at its ends."""
    name = str(getattr(function, "__name__", function)).partition(".")[0]
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


class Trace:
    """What one run of the target does with traced numbers."""

    def __init__(self, *, identifies: bool) -> None:
        """Start a run.

        Args:
            identifies: whether every traced number must be recognisable by its value.
        """
        self._identifies = identifies
        self.inspected: set[str] = set()
        """Numbers whose value the target may depend on in another way than by arithmetic."""
        self.computed: dict[float, Number] = {}
        """Every traced number by its value."""
        self.used: set[float] = set()
        """The values of those that torch calls took."""

    def traced(self, value: Any, text: str, names: frozenset[str]) -> Any:
        """``value`` as a traced number with the expression ``text`` over ``names``."""
        if type(value) not in (int, float):
            self.inspected |= names
            return value
        known = self.computed.setdefault(value, Number(text, type(value).__name__))
        if self._identifies and (known.text != text or not is_recognisable(value)):
            # Two expressions with one value, or a usual value, cannot be told apart in the graph.
            self.inspected |= names | set(known.names())
        kind: Any = _TracedFloat if type(value) is float else _TracedInt
        number = kind(value)
        number.trace, number.text, number.names = self, text, names
        return number

    def argument(self, value: Any, name: str) -> Any:
        """The value of the argument ``name`` as a traced number."""
        return self.traced(value, name, frozenset({name}))

    def derive(self) -> None:
        """Recognise also the numbers that the formulas of gradients compute."""
        for value, number in list(self.computed.items()):
            for form, function in DERIVED.items():
                derived = function(value)
                if is_recognisable(derived):
                    text = _normal(form.format(f"({number.text})"))
                    self.computed.setdefault(derived, Number(text, type(derived).__name__))

    def use(self, number: Any, frame: Any) -> None:
        """Note that a torch call takes a number. It is named after the variable of the frame that holds it."""
        value = plain(number)
        self.used.add(value)
        known = self.computed[value]
        variable = next((name for name, held in frame.f_locals.items() if held is number), "") if frame else ""
        if variable.isidentifier() and not known.variable:
            self.computed[value] = Number(known.text, known.kind, variable)


def is_traced(value: object) -> bool:
    """Whether the value is a traced number."""
    return isinstance(value, (_TracedFloat, _TracedInt))


def plain(value: Any) -> Any:
    """The value with plain numbers instead of traced ones, also inside tuples, lists, dictionaries and slices."""
    if isinstance(value, _TracedFloat):
        return float.__float__(value)
    if isinstance(value, _TracedInt):
        return int.__int__(value)
    if type(value) in (tuple, list) and any(map(_contains_traced, value)):
        return type(value)(map(plain, value))
    if type(value) is dict and any(map(_contains_traced, value.values())):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, slice) and _contains_traced(value):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value


def _contains_traced(value: Any) -> bool:
    return any(map(is_traced, numbers_in(value)))


def numbers_in(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists, dictionaries and slices."""
    if isinstance(value, (tuple, list)):
        for item in _items(value):
            yield from numbers_in(item)
    elif isinstance(value, dict):
        yield from numbers_in(list(value.values()))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _items(value: tuple[Any, ...] | list[Any]) -> Iterator[Any]:
    """The items of a sequence. A list to which a kept loop appended refuses its own iteration; it holds no numbers."""
    return list.__iter__(value) if isinstance(value, list) else iter(value)


def is_recognisable(value: float) -> bool:
    """Whether a number is too unusual to be equal to a constant of the target by chance."""
    if isinstance(value, int):
        return abs(value) > LARGEST_USUAL_INTEGER
    return math.isfinite(value) and not (math.frexp(value)[0] * 2.0**24).is_integer()


class _TracedFloat(float):
    trace: Trace
    text: str
    names: frozenset[str]


class _TracedInt(int):
    trace: Trace
    text: str
    names: frozenset[str]


def _attribute(self: Any, name: str) -> Any:
    """Read an attribute; those that Python's numbers have, such as ``is_integer``, depend on the value."""
    if not name.startswith("__") and hasattr(float if isinstance(self, float) else int, name):
        self.trace.inspected |= self.names
    return object.__getattribute__(self, name)


def _operand(value: Any) -> tuple[str, frozenset[str]] | None:
    """The text and names of an operand of traced arithmetic; ``None`` if it is not a plain number."""
    if is_traced(value):
        return value.text, value.names
    if type(value) in (int, float) and math.isfinite(value):
        return (f"({value!r})" if value < 0 else repr(value)), frozenset()
    return None


def _normal(text: str) -> str:
    return ast.unparse(ast.parse(text, mode="eval"))


def _binary(name: str, symbol: str, *, swapped: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        operand = None if modulus else _operand(other)
        if operand is None:
            # Sizes, arrays and other numbers: the result is not traced.
            self.trace.inspected |= self.names
            return getattr(type(self).__mro__[1], f"__{'r' if swapped else ''}{name}__")(plain(self), other, *modulus)
        text, names = operand
        left, right = (f"({text})", f"({self.text})") if swapped else (f"({self.text})", f"({text})")
        value = function(plain(other), plain(self)) if swapped else function(plain(self), plain(other))
        return self.trace.traced(value, _normal(f"{left} {symbol} {right}"), self.names | names)

    return method


def _unary(name: str, symbol: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return self.trace.traced(getattr(operator, name)(plain(self)), _normal(f"{symbol}({self.text})"), self.names)

    return method


def _inspecting(kind: type, name: str) -> Callable[..., Any]:
    original = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        self.trace.inspected |= self.names
        return original(plain(self), *map(plain, args))

    return method


for _class in (_TracedFloat, _TracedInt):
    setattr(_class, "__getattribute__", _attribute)  # noqa: B010 (mypy rejects an assignment)
    for _name, _symbol in BINARY.items():
        setattr(_class, f"__{_name}__", _binary(_name, _symbol, swapped=False))
        setattr(_class, f"__r{_name}__", _binary(_name, _symbol, swapped=True))
    for _name, _symbol in UNARY.items():
        setattr(_class, f"__{_name}__", _unary(_name, _symbol))
    for _name in INSPECTING:
        if hasattr(_class.__mro__[1], f"__{_name}__"):
            setattr(_class, f"__{_name}__", _inspecting(_class.__mro__[1], f"__{_name}__"))


@contextlib.contextmanager
def _tracing_math(path: str) -> Iterator[None]:
    """Let the functions of ``math`` record calls with traced numbers, also where the file at ``path`` imports them by name."""
    originals = {name: value for name, value in vars(math).items() if callable(value) and not name.startswith("_")}

    def wrapped(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            traced = [item for item in numbers_in((args, kwargs)) if is_traced(item)]
            value = original(*plain(args), **plain(kwargs))
            if not traced:
                return value
            trace, operands = traced[0].trace, [_operand(item) for item in args]
            names = frozenset().union(*(item.names for item in traced))
            if name not in MATH_FUNCTIONS or kwargs or None in operands:
                trace.inspected |= names
                return value
            texts = ", ".join(operand[0] for operand in operands if operand is not None)
            return trace.traced(value, _normal(f"math.{name}({texts})"), names)

        return function

    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == path]
    functions = {id(original): wrapped(name, original) for name, original in originals.items()}
    replaced = [
        (vars(module), name, value)
        for module in (math, *modules)
        for name, value in list(vars(module).items())
        if id(value) in functions
    ]
    for namespace, name, value in replaced:
        namespace[name] = functions[id(value)]
    try:
        yield
    finally:
        for namespace, name, value in replaced:
            namespace[name] = value


class RecordingCalls(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Records the torch calls of the target, and passes plain numbers on.

    A number that a call may not merely compute with counts as inspected.
    """

    def __init__(self, trace: Trace, path: str) -> None:
        super().__init__()
        self._trace, self.path = trace, path
        self.calls: list[object] = []
        """Each call with its plain arguments, and traced numbers by their expressions."""
        self.plain_calls: list[object] = []
        """The same with the values of traced numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = operation_name(func), kwargs or {}
        positions = ARITHMETIC.get(name, frozenset())
        for position, argument in (*enumerate(args), *named.items()):
            traced = [item for item in numbers_in(argument) if is_traced(item)]
            for number in traced:
                if number is argument and position in positions:
                    self._trace.use(number, self._user_frame())
                else:
                    self._trace.inspected |= number.names
        self.calls.append((name, _described((args, named), by_text=True)))
        self.plain_calls.append((name, _described((args, named), by_text=False)))
        return func(*plain(args), **plain(named))

    def _user_frame(self) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return frame


def recorded(function: Callable[..., Any], recorder: RecordingCalls) -> Callable[..., Any]:
    """``function``, whose torch calls go to ``recorder``."""

    def call(*tensors: torch.Tensor) -> Any:
        with recorder, _tracing_math(recorder.path):
            return function(*tensors)

    return call


def _described(value: Any, *, by_text: bool) -> object:
    """A description of arguments that is equal for equal calls: no memory addresses, and no values of tensors."""
    if is_traced(value):
        return ("number", value.text if by_text else repr(plain(value)))
    if isinstance(value, torch.Tensor):
        return ("tensor", str(tuple(value.shape)), str(value.dtype))
    if isinstance(value, (tuple, list)):
        return [_described(item, by_text=by_text) for item in _items(value)]
    if isinstance(value, dict):
        return [(str(key), _described(item, by_text=by_text)) for key, item in value.items()]
    if isinstance(value, slice):
        return [_described(item, by_text=by_text) for item in (value.start, value.stop, value.step)]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return ("number", repr(value))
    is_plain = value is None or isinstance(value, (bool, str, torch.dtype, torch.device, torch.SymInt))
    return repr(value) if is_plain else type(value).__name__
