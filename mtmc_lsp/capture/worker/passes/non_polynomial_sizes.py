"""Sizes that are no polynomials of the inputs' sizes, and which of these are made constant for it. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import sympy
import torch

DIVISIONS = frozenset({"FloorDiv", "Mod", "PythonMod", "CleanDiv", "ModularIndexing"})
"""Functions of torch's symbolic sizes that no polynomial stands for."""

WINDOWS = ("conv", "pool", "unfold", "upsample")
"""In the names of operations on windows."""


class AwkwardSize(Exception):
    """Ends an export in which a size turned out to be awkward."""


class Watch:
    """Ends an export at its first awkward size: with fewer free sizes it is made again, and takes a fraction of the time."""

    def __init__(self, values: Sequence[torch.Tensor], held: Set[int], fixed: Set[tuple[int, int]]) -> None:
        """Watch an export of a function of tensors.

        Args:
            values: the tensors, in their order.
            held: which of them are a module's own.
            fixed: places (number of a tensor, dimension) that are constants already.
        """
        self._values, self._held, self._fixed = values, held, fixed
        self._given: dict[torch.fx.Graph, list[torch.fx.Node]] = {}
        self._seen: set[torch.fx.Node] = set()
        self.found: dict[tuple[int, int], torch.fx.Node] = {}
        """Places to make constant, once it has ended an export, each with the node whose size or stride is awkward."""

    def look(self, node: torch.fx.Node) -> None:
        """See what a new node of a trace reads.

        Raises:
            AwkwardSize: of a tensor among it.
        """
        given = self._given.setdefault(node.graph, [])
        if node.op == "placeholder":
            given.append(node)
            return
        for source in node.all_input_nodes:
            # A node knows its tensor soon after it was made.
            if source in self._seen or (value := source.meta.get("val")) is None:
                continue
            self._seen.add(source)
            for expression in awkward_sizes(value, source.target, numbers=False):
                self.found |= dict.fromkeys(self._blamed(expression, given) - self._fixed, source)
            if self.found:
                raise AwkwardSize

    def _blamed(self, expression: Any, given: Sequence[torch.fx.Node]) -> set[tuple[int, int]]:
        """The places to make constant; none where the trace is of something inside the function."""
        if len(given) != len(self._values):
            return set()
        at: dict[tuple[int, int], set[str]] = {}
        numbers: dict[str, int] = {}
        for i, (node, value) in enumerate(zip(given, self._values, strict=True)):
            shape = getattr(node.meta.get("val"), "shape", ())
            for d, size in enumerate(shape):
                at[i, d] = symbols_of(size)
                if is_symbol(size):
                    numbers.setdefault(str(size.node.expr), int(value.shape[d]))
        own = {symbol for symbols in at.values() for symbol in symbols}
        held = {symbol for (i, _), symbols in at.items() if i in self._held for symbol in symbols}
        names = blamed(expression, own, held, numbers)
        return {place for place, symbols in at.items() if symbols & names}


def awkward_sizes(value: Any, operation: object, *, numbers: bool) -> Iterator[Any]:
    """The expressions that are no polynomials, among sizes and strides of what a node gives.

    Args:
        value: a tensor, a number, or several of them.
        operation: what gives it. Kernels of convolutions and pooling are for windows and images of sizes that they know.
        numbers: whether numbers that are no sizes of a tensor count too.
    """
    for item in value if isinstance(value, (tuple, list)) else [value]:
        if numbers and isinstance(item, torch.SymFloat):
            # Such as `d ** 0.5`: no size, but a constant of operations, which kernels have as a number.
            yield item.node.expr
        sizes = item.shape if isinstance(item, torch.Tensor) else [item] if numbers else []
        steps = item.stride() if isinstance(item, torch.Tensor) else ()
        found = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
        windows = any(word in str(operation) for word in WINDOWS)
        strides = [step.node.expr for step in steps if isinstance(step, torch.SymInt)]
        found += strides if windows else [step_of(stride) for stride in strides]
        for expression in found:
            if not is_polynomial(expression):
                yield expression


@lru_cache(maxsize=4096)
def step_of(expression: Any) -> Any:
    """A stride without the floor of 1 that torch puts under sizes in it: where that counts, there is nothing to step over."""
    return expression.replace(
        lambda part: type(part).__name__ == "Max" and len(part.args) == 2 and sympy.Integer(1) in part.args,
        lambda part: next(argument for argument in part.args if argument != 1),
    )


def blamed(expression: Any, own: Set[str], parameters: Set[str], values: Mapping[str, int]) -> set[str]:
    """Symbols that make an expression awkward: as few as will do, since what is made constant no longer varies.

    Of a size such as ``C * H * W // 32`` that is one alone: a parameter's before others, then one that is divisible.
    Guards also speak of symbols that have become constants since; these are nobody's fault.

    Args:
        expression: a size, or a guard.
        own: the symbols of the inputs.
        parameters: those of a module's own tensors.
        values: what symbols are in the workload.
    """
    divisions = [
        atom
        for atom in expression.atoms(sympy.Function)
        if type(atom).__name__ in DIVISIONS and not any(type(a).__name__ in DIVISIONS for a in _below(atom))
    ]
    found: set[str] = set()
    for division in divisions:
        names = {str(symbol) for symbol in division.free_symbols} & own
        divisor = division.args[1]
        divisible = {name for name in names if divisor.is_Integer and values.get(name, 0) % int(divisor) == 0}
        found |= (names & parameters) or set(sorted(divisible)[:1]) or names
    return found if divisions else {str(symbol) for symbol in expression.free_symbols}


def symbols_of(size: Any) -> set[str]:
    """The symbols in a size; none in a number."""
    return {str(symbol) for symbol in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()


def is_symbol(size: Any) -> bool:
    """Whether a size is one symbol."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


@lru_cache(maxsize=4096)
def is_polynomial(expression: Any) -> bool:
    """Whether a size is made of symbols by additions and multiplications alone."""
    return all(
        part.is_Symbol
        or part.is_Integer
        or part.is_Add
        or part.is_Mul
        or (part.is_Pow and part.exp.is_Integer and part.exp.is_nonnegative)
        for part in sympy.preorder_traversal(expression)
    )


def _below(atom: Any) -> set[Any]:
    """The function calls inside one."""
    return {inner for argument in atom.args for inner in argument.atoms(sympy.Function)}
