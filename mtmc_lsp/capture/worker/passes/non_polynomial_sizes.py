"""Finds sizes that are not polynomials of the input sizes, and what to change about the input sizes instead. Runs in workers.

A floor division or a remainder by a number becomes a polynomial if an input size is a multiple of the number plus a constant:
with ``H = 2 * h``, the result of a convolution with stride 2 has ``h`` rows. The number is called the unit of the size. The
graph is then valid for all images whose height has the same remainder. Other sizes become constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from mtmc_lsp.core.graph import MOST_FILLED

if TYPE_CHECKING:
    from mtmc_lsp.capture.worker.passes.free_sizes import FreeSizes

DIVISIONS = frozenset({"FloorDiv", "Mod", "PythonMod", "CleanDiv", "ModularIndexing"})
"""Functions of torch's symbolic sizes that polynomials cannot express."""

REMAINDERS = frozenset({"Mod", "PythonMod"})
REDUCIBLE = frozenset({"FloorDiv", "CleanDiv"}) | REMAINDERS
"""Divisions whose results are polynomials where the unit of a size is a multiple of the divisor."""
CONSTANT = 0
"""Instead of a factor for the unit of a size: no unit makes the expression a polynomial."""
PARTITIONS = ("view", "reshape", "unflatten", "shuffle")
"""Parts of the names of operations that divide images into parts."""
IMAGE_RANK = 4
Dimension = tuple[int, int]
"""A dimension of an input: index of the input and of the dimension."""

WINDOWS = ("conv", "pool", "unfold", "upsample")
"""Parts of the names of operations on windows."""


class Cause(NamedTuple):
    """What makes a size of an input non-polynomial, and what to do about it."""

    factor: int
    """For the unit of the size, or ``CONSTANT``."""
    operation: str
    """The operator whose result has such a size; empty for a condition."""
    line: int
    """The line in the target's file; 0 if unknown."""

    def may_divide_innermost(self, rank: int) -> bool:
        """Whether the innermost size of a tensor may get a unit: as a length or the width of an image.

        Other innermost sizes are features. Few programs change them, and kernels are faster with constants.
        """
        is_window = any(word in self.operation for word in WINDOWS)
        return is_window or (rank >= IMAGE_RANK and any(word in self.operation for word in PARTITIONS))


class NonPolynomialSize(Exception):
    """Stops an export that contains a non-polynomial size."""


class InputSymbols(NamedTuple):
    """The symbols in the sizes of a trace's inputs."""

    symbols_at: dict[Dimension, set[str]]
    values: dict[str, int]
    """The value of each symbol in the workload, in units."""
    in_units: dict[Any, Any]
    """For each symbol, the size in terms of its number of units."""


class Watch:
    """Stops an export at its first non-polynomial size. The next export has fewer symbolic sizes and is much faster."""

    def __init__(self, sizes: FreeSizes, module_inputs: Set[int]) -> None:
        """Watch the export of a function of tensors.

        Args:
            sizes: of the tensors, in argument order.
            module_inputs: indices of those that belong to a module.
        """
        self._sizes, self._module_inputs = sizes, module_inputs
        self._placeholders: dict[torch.fx.Graph, list[torch.fx.Node]] = {}
        self._checked: set[torch.fx.Node] = set()
        self.factors: dict[Dimension, int] = {}
        """The factor for the unit of dimensions, or ``CONSTANT``, after the export was stopped."""
        self.node: torch.fx.Node | None = None
        """The node whose size or stride is not a polynomial."""
        self._symbols: tuple[object, InputSymbols] | None = None

    def check_inputs(self, node: torch.fx.Node) -> None:
        """Check the tensors that a new node of the trace reads.

        Raises:
            NonPolynomialSize: one of them has such a size.
        """
        placeholders = self._placeholders.setdefault(node.graph, [])
        if node.op == "placeholder":
            placeholders.append(node)
            return
        for source in node.all_input_nodes:
            # Torch sets a node's value shortly after it creates the node.
            if source in self._checked or (value := source.meta.get("val")) is None:
                continue
            self._checked.add(source)
            self._check(value, source, placeholders)
            if self.factors:
                self.node = source
                raise NonPolynomialSize

    def _check(self, value: Any, node: torch.fx.Node, placeholders: Sequence[torch.fx.Node]) -> None:
        """Find the factors for the sizes and strides of a node; none if the trace is of a function inside the target."""
        if len(placeholders) != self._sizes.count:
            return
        symbols_at, values, in_units = self._input_symbols(placeholders)
        kernel = constant_symbols(node) if self._sizes.windows_vary else set()
        if kernel:
            self.factors |= {dimension: CONSTANT for dimension, symbols in symbols_at.items() if symbols & kernel}
        if self.factors:
            return
        raw_strides = not self._sizes.windows_vary
        expressions = non_polynomials(value, node.target, numbers=False, in_units=in_units, raw_strides=raw_strides)
        for expression in (*expressions, *pooled_windows(node, in_units)):
            input_symbols = {symbol for symbols in symbols_at.values() for symbol in symbols}
            parameters = {
                symbol for (i, _), symbols in symbols_at.items() if i in self._module_inputs for symbol in symbols
            }
            factors = factors_of(expression, input_symbols, parameters, values)
            for dimension, symbols in symbols_at.items():
                for symbol in symbols & factors.keys() if dimension not in self._sizes.fixed else ():
                    self.factors[dimension] = factors[symbol]

    def _input_symbols(self, placeholders: Sequence[torch.fx.Node]) -> InputSymbols:
        """The symbols in the sizes of the inputs, computed again only if torch learned that some are equal.

        A network has hundreds of parameters, and each node of the trace is checked.
        """
        symbolic = next(
            (size for node in placeholders for size in _shape(node) if isinstance(size, torch.SymInt)), None
        )
        equalities = len(symbolic.node.shape_env.replacements) if symbolic is not None else 0
        key = placeholders[0].graph if placeholders else None, equalities
        if self._symbols is None or self._symbols[0] != key:
            result = InputSymbols({}, {}, {})
            for i, placeholder in enumerate(placeholders):
                for d, size in enumerate(_shape(placeholder)):
                    result.symbols_at[i, d] = symbols_of(size)
                    if is_symbol(size):
                        unit, length = self._sizes.units.get((i, d), 1), self._sizes.length((i, d))
                        result.values.setdefault(str(size.node.expr), length // unit)
                        # The symbol stands for the number of units from here on.
                        result.in_units.setdefault(size.node.expr, unit * size.node.expr + length % unit)
            self._symbols = key, result
        return self._symbols[1]


def _shape(node: torch.fx.Node) -> Sequence[Any]:
    return getattr(node.meta.get("val"), "shape", ())


def non_polynomials(
    value: Any,
    operation: object,
    *,
    numbers: bool,
    raw_strides: bool,
    in_units: Mapping[Any, Any] = MappingProxyType({}),
) -> Iterator[Any]:
    """The non-polynomial expressions among the sizes and strides of a node's value.

    Args:
        operation: the operator of the node.
        numbers: whether to check numbers that are not tensor sizes, too.
        raw_strides: whether convolutions and pooling need polynomial strides as they are. Those of windows that do not pad
            their input are no polynomials, because the result may be empty.
        in_units: symbols of sizes with units, and what to write for them.
    """

    def reduced(size: torch.SymInt) -> Any:
        return with_reduced_divisions(size.node.expr.xreplace(in_units))

    for item in value if isinstance(value, (tuple, list)) else [value]:
        if numbers and isinstance(item, torch.SymFloat):
            # For example `d ** 0.5`: an operand that kernels contain as a constant.
            yield item.node.expr
        sizes = item.shape if isinstance(item, torch.Tensor) else [item] if numbers else []
        steps = item.stride() if isinstance(item, torch.Tensor) else ()
        expressions = [reduced(size) for size in sizes if isinstance(size, torch.SymInt)]
        windows = raw_strides and any(word in str(operation) for word in WINDOWS)
        strides = [reduced(step) for step in steps if isinstance(step, torch.SymInt)]
        expressions += strides if windows else map(simplified_stride, strides)
        for expression in expressions:
            if not is_polynomial(expression):
                yield expression


@lru_cache(maxsize=4096)
def with_reduced_divisions(expression: Any) -> Any:
    """An expression with ``h`` for ``2 * h // 2``, and ``h - 1`` for ``(2 * h - 1) // 2``. The same for remainders."""

    def reduced(division: Any) -> Any:
        base, divisor = division.args[0], division.args[1]
        if not divisor.is_Integer:
            quotient = sympy.cancel(base / divisor)
            if not is_polynomial(quotient):
                return division
            return sympy.Integer(0) if _is_remainder(division) else quotient
        multiples, rest = sympy.Integer(0), sympy.Integer(0)
        for term in sympy.Add.make_args(sympy.expand(base)):
            if int(term.as_coeff_Mul()[0]) % int(divisor) == 0:
                multiples += term
            else:
                rest += term
        if not rest.is_Integer:
            return division
        if _is_remainder(division):
            return sympy.Integer(int(rest) % int(divisor))
        return sympy.expand(multiples / divisor) + int(rest) // int(divisor)

    return expression.replace(
        lambda part: type(part).__name__ in REDUCIBLE and all(map(is_polynomial, part.args)),
        reduced,
    )


def _is_remainder(division: Any) -> bool:
    return type(division).__name__ in REMAINDERS


@lru_cache(maxsize=4096)
def simplified_stride(expression: Any) -> Any:
    """A stride with ``size`` for torch's ``Max(1, size)``, and ``size`` for ``Min(size, size * other)``.

    They differ only for empty tensors, where strides are unused. Torch writes the minimum where a view merges dimensions.
    """
    expression = expression.replace(
        lambda part: type(part).__name__ == "Max" and len(part.args) == 2 and sympy.Integer(1) in part.args,
        lambda part: next(argument for argument in part.args if argument != 1),
    )
    return expression.replace(lambda part: type(part).__name__ == "Min", _least)


def _least(minimum: Any) -> Any:
    """The argument of a minimum of which all others are multiples; the minimum itself if there is none."""
    for argument in minimum.args:
        if all(is_polynomial(sympy.cancel(other / argument)) for other in minimum.args):
            return argument
    return minimum


def factors_of(
    expression: Any, input_symbols: Set[str], parameters: Set[str], values: Mapping[str, int]
) -> dict[str, int]:
    """A small set of symbols that make an expression non-polynomial, each with a factor for its unit, or ``CONSTANT``.

    For a size such as ``C * H * W // 32`` the result is one symbol: preferably a parameter's, which becomes constant, else one
    whose value is a multiple. Guards may also contain symbols that have become constant since; these are ignored. With these
    factors, another symbol may make the expression non-polynomial.

    Args:
        input_symbols: the symbols of all inputs.
        parameters: the symbols of the module's tensors.
    """
    divisions = [
        atom
        for atom in expression.atoms(sympy.Function)
        if type(atom).__name__ in DIVISIONS and not any(type(a).__name__ in DIVISIONS for a in _below(atom))
    ]
    factors: dict[str, int] = {}
    for division in divisions:
        names = {str(symbol) for symbol in division.free_symbols} & input_symbols
        if names & parameters:
            factors |= dict.fromkeys(names & parameters, CONSTANT)
        else:
            factors |= _units_for(division, names, values) or dict.fromkeys(names, CONSTANT)
    return factors if divisions else {str(symbol): CONSTANT for symbol in expression.free_symbols}


def _units_for(division: Any, names: Set[str], values: Mapping[str, int]) -> dict[str, int]:
    """The factor for one symbol in a division of a polynomial by a number; empty for other divisions."""
    base, divisor = division.args[0], division.args[1]
    if type(division).__name__ not in REDUCIBLE or not divisor.is_Integer or not is_polynomial(base):
        return {}
    for term in sympy.Add.make_args(sympy.expand(base)):
        coefficient = int(term.as_coeff_Mul()[0])
        factor = abs(int(divisor)) // math.gcd(int(divisor), coefficient)
        symbols = sorted({str(symbol) for symbol in term.free_symbols} & names)
        if factor > 1 and symbols:
            multiples = [name for name in symbols if values.get(name, 0) % factor == 0]
            return {(multiples or symbols)[0]: factor}
    return {}


def constant_symbols(node: torch.fx.Node) -> set[str]:
    """The symbols in the kernel sizes of a convolution, in the number of few indices that ``index_fill`` compares each
    position with, and in sizes that adaptive pooling divides unevenly: code is made for constant ones."""
    operation = str(node.target)
    if operation.startswith("aten.index_fill."):
        sizes: Sequence[Any] = _shape_of(node, 2)
        return {symbol for size in sizes if _length(size) <= MOST_FILLED for symbol in symbols_of(size)}
    if "adaptive_" in operation:
        return {symbol for size, outputs in _pooled(node) if _length(size) % outputs for symbol in symbols_of(size)}
    # Gradients of a convolution: the upstream gradient comes first.
    position = 2 if operation.startswith("aten.convolution_backward") else 1
    sizes = _shape_of(node, position)[2:] if "conv" in operation else ()
    return {symbol for size in sizes for symbol in symbols_of(size)}


def pooled_windows(node: torch.fx.Node, in_units: Mapping[Any, Any] = MappingProxyType({})) -> Iterator[Any]:
    """The lengths of the windows of adaptive pooling that are not polynomials."""
    for size, outputs in _pooled(node):
        if isinstance(size, torch.SymInt):
            length = with_reduced_divisions(FloorDiv(size.node.expr.xreplace(in_units), sympy.Integer(outputs)))
            if not is_polynomial(length):
                yield length


def _pooled(node: torch.fx.Node) -> list[tuple[Any, int]]:
    """The sizes that adaptive pooling divides into several windows, each with the number of windows."""
    outputs = node.args[1] if "adaptive_" in str(node.target) and len(node.args) > 1 else ()
    if not isinstance(outputs, (tuple, list)):
        return []
    sizes = _shape_of(node, 0)[-len(outputs) :]
    return [(size, n) for size, n in zip(sizes, outputs, strict=False) if isinstance(n, int) and n > 1]


def _shape_of(node: torch.fx.Node, position: int) -> Sequence[Any]:
    """The shape of a tensor argument; empty for others."""
    argument = node.args[position] if len(node.args) > position else None
    return _shape(argument) if isinstance(argument, torch.fx.Node) else ()


def _length(size: Any) -> int:
    """The size in the workload."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def symbols_of(size: Any) -> set[str]:
    """The symbols in a size; empty for a number."""
    return {str(symbol) for symbol in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()


def is_symbol(size: Any) -> bool:
    """Whether a size is a single symbol."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


@lru_cache(maxsize=4096)
def is_polynomial(expression: Any) -> bool:
    """Whether a size consists only of symbols, integers, additions, multiplications and integer powers."""
    return all(
        part.is_Symbol
        or part.is_Integer
        or part.is_Add
        or part.is_Mul
        or (part.is_Pow and part.exp.is_Integer and part.exp.is_nonnegative)
        for part in sympy.preorder_traversal(expression)
    )


def _below(atom: Any) -> set[Any]:
    """The function calls inside the arguments of a call."""
    return {inner for argument in atom.args for inner in argument.atoms(sympy.Function)}
