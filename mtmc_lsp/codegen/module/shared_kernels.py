"""Kernel deduplication: repeated blocks of a network share a kernel if they differ only in tensor names."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from mtmc_lsp.codegen.kernel.kernel import Kernel

Value = TypeVar("Value")


class SharedKernels:
    """All distinct kernels of a generated file so far."""

    def __init__(self) -> None:
        self._known: dict[str, Kernel] = {}

    def shared(self, kernel: Kernel) -> Kernel:
        """Return ``kernel``, or an earlier equivalent kernel with this one's operands."""
        known = self._known.setdefault(_kernel_normal_form(kernel), kernel)
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
            run_time_numbers=tuple(
                (name, number, dtype)
                for (name, *_), (_, number, dtype) in zip(known.run_time_numbers, kernel.run_time_numbers, strict=True)
            ),
            static=known.static,
            constexprs=dict(zip(known.constexprs, kernel.constexprs.values(), strict=True)),
            dynamic=dict(zip(known.dynamic, kernel.dynamic.values(), strict=True)),
            functions=known.functions,
        )


def _renamed(known: Sequence[tuple[str, Value]], ours: Sequence[tuple[str, Value]]) -> tuple[tuple[str, Value], ...]:
    """The arguments of ``ours`` under the parameter names of ``known``; both are in parameter order."""
    return tuple((name, value) for (name, _), (_, value) in zip(known, ours, strict=True))


class _Names(ast.NodeTransformer):
    """Renames parameters and variables by their order of first occurrence."""

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


def _kernel_normal_form(kernel: Kernel) -> str:
    """A normal form of a kernel and its device functions, without docstrings and independent of names."""
    called = {name: f"f{i}" for i, name in enumerate(kernel.functions)}
    return "\n".join(_normal_form(source, called) for source in (*kernel.functions.values(), kernel.source))


def _normal_form(source: str, called: Mapping[str, str]) -> str:
    """A normal form of a function; functions in ``called`` get the given names."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.name, function.body = "", function.body[1:]
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return ast.dump(_Names(bound, called).visit(tree))
