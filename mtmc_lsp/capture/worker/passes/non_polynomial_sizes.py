"""Finds sizes that are not polynomials of the input sizes, and the input sizes to make constant instead. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import sympy
import torch

DIVISIONS = frozenset({"FloorDiv", "Mod", "PythonMod", "CleanDiv", "ModularIndexing"})
"""Functions of torch's symbolic sizes that polynomials cannot express."""

WINDOWS = ("conv", "pool", "unfold", "upsample")
"""Parts of the names of operations on windows."""


class NonPolynomialSize(Exception):
    """Stops an export that contains a non-polynomial size."""


class Watch:
    """Stops an export at its first non-polynomial size. The next export has fewer symbolic sizes and is much faster."""

    def __init__(self, values: Sequence[torch.Tensor], module_inputs: Set[int], fixed: Set[tuple[int, int]]) -> None:
        """Watch the export of a function of tensors.

        Args:
            values: the tensors, in argument order.
            module_inputs: indices of those that belong to a module.
            fixed: dimensions (index of the tensor, index of the dimension) that are already constant.
        """
        self._values, self._module_inputs, self._fixed = values, module_inputs, fixed
        self._placeholders: dict[torch.fx.Graph, list[torch.fx.Node]] = {}
        self._checked: set[torch.fx.Node] = set()
        self.non_polynomial: dict[tuple[int, int], torch.fx.Node] = {}
        """Dimensions to make constant after the export was stopped, each with the node whose size or stride is non-polynomial."""

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
            for expression in non_polynomials(value, source.target, numbers=False):
                self.non_polynomial |= dict.fromkeys(self._causes(expression, placeholders) - self._fixed, source)
            if self.non_polynomial:
                raise NonPolynomialSize

    def _causes(self, expression: Any, placeholders: Sequence[torch.fx.Node]) -> set[tuple[int, int]]:
        """The dimensions to make constant; none if the trace is of a function inside the target."""
        if len(placeholders) != len(self._values):
            return set()
        symbols_at: dict[tuple[int, int], set[str]] = {}
        values: dict[str, int] = {}
        for i, (node, value) in enumerate(zip(placeholders, self._values, strict=True)):
            shape = getattr(node.meta.get("val"), "shape", ())
            for d, size in enumerate(shape):
                symbols_at[i, d] = symbols_of(size)
                if is_symbol(size):
                    values.setdefault(str(size.node.expr), int(value.shape[d]))
        input_symbols = {symbol for symbols in symbols_at.values() for symbol in symbols}
        module_symbols = {
            symbol for (i, _), symbols in symbols_at.items() if i in self._module_inputs for symbol in symbols
        }
        names = causes_of(expression, input_symbols, module_symbols, values)
        return {dimension for dimension, symbols in symbols_at.items() if symbols & names}


def non_polynomials(value: Any, operation: object, *, numbers: bool) -> Iterator[Any]:
    """The non-polynomial expressions among the sizes and strides of a node's value.

    Args:
        operation: the operator of the node. Kernels for convolution and pooling also need polynomial strides as they are.
        numbers: whether to check numbers that are not tensor sizes, too.
    """
    for item in value if isinstance(value, (tuple, list)) else [value]:
        if numbers and isinstance(item, torch.SymFloat):
            # For example `d ** 0.5`: an operand that kernels contain as a constant.
            yield item.node.expr
        sizes = item.shape if isinstance(item, torch.Tensor) else [item] if numbers else []
        steps = item.stride() if isinstance(item, torch.Tensor) else ()
        expressions = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
        windows = any(word in str(operation) for word in WINDOWS)
        strides = [step.node.expr for step in steps if isinstance(step, torch.SymInt)]
        expressions += strides if windows else [simplified_stride(stride) for stride in strides]
        for expression in expressions:
            if not is_polynomial(expression):
                yield expression


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


def causes_of(expression: Any, input_symbols: Set[str], parameters: Set[str], values: Mapping[str, int]) -> set[str]:
    """A small set of symbols that make an expression non-polynomial. Constant sizes no longer vary, so fewer are better.

    For a size such as ``C * H * W // 32`` the result is one symbol: preferably a parameter's, else one that is divisible.
    Guards may also contain symbols that have become constant since; these are ignored.

    Args:
        input_symbols: the symbols of all inputs.
        parameters: the symbols of the module's tensors.
    """
    divisions = [
        atom
        for atom in expression.atoms(sympy.Function)
        if type(atom).__name__ in DIVISIONS and not any(type(a).__name__ in DIVISIONS for a in _below(atom))
    ]
    causes: set[str] = set()
    for division in divisions:
        names = {str(symbol) for symbol in division.free_symbols} & input_symbols
        divisor = division.args[1]
        divisible = {name for name in names if divisor.is_Integer and values.get(name, 0) % int(divisor) == 0}
        causes |= (names & parameters) or set(sorted(divisible)[:1]) or names
    return causes if divisions else {str(symbol) for symbol in expression.free_symbols}


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
