"""Kernels of one file: repeated blocks of a network share a kernel, and kernels keep their names from step to step."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from mtmc_lsp.codegen.kernel.kernel import Kernel

Value = TypeVar("Value")
CACHED_FORMS = 512
"""Normal forms of functions to keep; each is some ten kilobytes long."""
HELPER = "helper "
"""Begins the key of a kernel that prepares operands for others."""


class SharedKernels:
    """All distinct kernels of a generated file so far."""

    def __init__(self, known: Mapping[str, Kernel] = MappingProxyType({})) -> None:
        """Begin a file.

        Args:
            known: kernels by their normal form, which replace equal ones.
        """
        self._known: dict[str, Kernel] = {**known}

    def has(self, known: Mapping[str, Kernel]) -> bool:
        """Whether kernels with these normal forms have these names."""
        return all(self._known[form].name == kernel.name for form, kernel in known.items())

    def shared(self, kernel: Kernel) -> Kernel:
        """Return ``kernel``, or an earlier equivalent kernel with this one's operands."""
        known = self._known.setdefault(normal_form(kernel), kernel)
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
            repeat=(known.repeat[0], kernel.repeat[1]) if known.repeat and kernel.repeat else None,
            passes=(known.passes[0], kernel.passes[1]) if known.passes and kernel.passes else None,
            initial=_renamed(known.initial, kernel.initial),
        )


class KernelNames:
    """The names of a version's kernels: those of earlier steps are kept, and new ones are free in the user's file."""

    def __init__(self, source: str, kept: Mapping[str, str]) -> None:
        """Begin a version.

        Args:
            source: the user's file.
            kept: names of earlier steps, by key of the kernel.
        """
        self._words = frozenset(re.findall(r"\w+", source))
        mains = tuple(f"{name}_" for key, name in kept.items() if not key.startswith(HELPER))
        self._kept = {k: n for k, n in kept.items() if not k.startswith(HELPER) or n.startswith(mains)}
        self._used: set[str] = set()
        self.given: dict[str, str] = {}
        """The name of each kernel so far, by key. Kernels that share the source of another have none."""
        self.moved: dict[str, str] = {}
        """Names of earlier steps that now belong to another kernel, which is written first and has the same source."""
        self.known_helpers: dict[str, Kernel] = {}
        """Helpers of an earlier step by their normal form, as that step wrote them."""

    def choose(self, key: str, preferred: str) -> str:
        """The name of a kernel: that of an earlier step, or else ``preferred``, numbered if it is in use.

        Names that extend a name count as in use too, such as ``name_parts`` for partial sums.
        """
        stem = preferred.removesuffix("_kernel")
        numbered = itertools.chain([preferred], (f"{stem}_{n}_kernel" for n in itertools.count(2)))
        name = self._kept.get(key) or next(choice for choice in numbered if not self._is_in_use(choice))
        self.given[key] = name
        self._used.add(name)
        return name

    def note_helper(self, helper: Kernel) -> None:
        """Note a kernel that prepares operands for others. Several kernels may use it, and the first of them may be new."""
        form = normal_form(helper)
        key = f"{HELPER}{hashlib.sha256(form.encode()).hexdigest()[:16]}"
        if self._kept.get(key) == helper.name:
            self.known_helpers[form] = helper
        self.given[key] = self._kept.get(key, self.given.get(key, helper.name))

    def _is_in_use(self, choice: str) -> bool:
        names = self._used | {*self._kept.values()}
        return choice in self._words or any(name == choice or name.startswith(f"{choice}_") for name in names)

    def written(self, key: str, name: str, names: Iterable[str], parts: Sequence[str] = ()) -> None:
        """Note that a kernel was written.

        Args:
            key: key of the kernel.
            name: its name in the source; another kernel's if both have the same source.
            names: all names that the source defines.
            parts: keys of the kernels that it contains.
        """
        self._used.update(names)
        if self.given[key] == name:
            return
        for item in (key, *parts):
            self._used.discard(self.given.pop(item))
        owner = next((item for item, given in self.given.items() if given == name), None)
        if owner is not None and key in self._kept and owner not in self._kept:
            self.moved[owner] = self._kept[key]


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


def normal_form(kernel: Kernel) -> str:
    """A normal form of a kernel and its device functions, without docstrings and independent of names."""
    called = tuple((name, f"f{i}") for i, name in enumerate(kernel.functions))
    return "\n".join(_function_form(source, called) for source in (*kernel.functions.values(), kernel.source))


# Consecutive versions of a file have nearly the same kernels.
@functools.lru_cache(maxsize=CACHED_FORMS)
def _function_form(source: str, called: tuple[tuple[str, str], ...]) -> str:
    """A normal form of a function; functions in ``called`` get the given names."""
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.name, function.body = "", function.body[1:]
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return ast.dump(_Names(bound, dict(called)).visit(tree))
