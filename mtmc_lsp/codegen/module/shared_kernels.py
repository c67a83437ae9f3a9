"""One kernel for every place that needs the same: a network's repeated blocks differ in the names of their tensors alone."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mtmc_lsp.codegen.kernel.kernel import Kernel

Value = TypeVar("Value")


class SharedKernels:
    """The kernels of a file so far."""

    def __init__(self) -> None:
        self._known: dict[str, Kernel] = {}

    def one_for(self, kernel: Kernel) -> Kernel:
        """``kernel``, or where one before does the same with tensors of other names, that one with this one's operands."""
        known = self._known.setdefault(_meaning(kernel), kernel)
        if known is kernel:
            return kernel
        return replace(
            kernel,
            name=known.name,
            source=known.source,
            tensors=_renamed(known.tensors, kernel.tensors),
            outputs=_renamed(known.outputs, kernel.outputs),
            sizes=_renamed(known.sizes, kernel.sizes),
            scratch_read=_renamed(known.scratch_read, kernel.scratch_read),
            scratch_written=_renamed(known.scratch_written, kernel.scratch_written),
            static=known.static,
            constexprs=dict(zip(known.constexprs, kernel.constexprs.values(), strict=True)),
            dynamic=dict(zip(known.dynamic, kernel.dynamic.values(), strict=True)),
            functions=known.functions,
        )


def _renamed(known: Sequence[tuple[str, Value]], own: Sequence[tuple[str, Value]]) -> tuple[tuple[str, Value], ...]:
    """What ``own`` passes, under the parameters' names of ``known``: both stand in the order of the parameters."""
    return tuple((name, value) for (name, _), (_, value) in zip(known, own, strict=True))


class _Names(ast.NodeTransformer):
    """Parameters and variables in the order in which they first occur, whatever they are called."""

    def __init__(self, bound: set[str], called: Mapping[str, str]) -> None:
        self._bound = bound
        self._called = called
        self._numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self._numbers.setdefault(name, f"v{len(self._numbers)}") if name in self._bound else name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._called.get(node.id) or self._number(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._number(node.arg), node.annotation)


def _meaning(kernel: Kernel) -> str:
    """What a kernel and its own functions do: their texts without names of their own and docstrings."""
    called = {name: f"f{i}" for i, name in enumerate(kernel.functions)}
    return "\n".join(_alike(source, called) for source in (*kernel.functions.values(), kernel.source))


def _alike(source: str, called: Mapping[str, str]) -> str:
    """A function's text in which only what it does is left; functions in ``called`` get those names."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.name, function.body = "", function.body[1:]
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return ast.dump(_Names(bound, called).visit(tree))
