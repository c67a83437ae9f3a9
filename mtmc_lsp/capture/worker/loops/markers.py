"""Operators that mark a kept loop in a trace: what its body reads, and where it begins and ends.

They have shapes but no values. :mod:`mtmc_lsp.capture.worker.loops.folding` turns the nodes between them into one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from mtmc_lsp.core.graph import Node

NAMESPACE = "mtmc_loop"
SCHEMAS = {
    "enter": "(Tensor initial, int loop, int slot, str name) -> Tensor",
    "read": "(Tensor source, int loop, int dim, SymInt first, int step) -> Tensor",
    "index": "(Tensor like, int loop, SymInt first, int step) -> Tensor",
    "leave": "(Tensor[] states, Tensor[] initial, Tensor[] rows, Tensor[] bases, Tensor[] items, int loop, SymInt count, "
    "int[] dims, SymInt[] firsts, int[] steps) -> Tensor[]",
    "reverse": "(Tensor[] states, Tensor[] initial, Tensor[] rows, Tensor[] bases, Tensor[] saved, int loop, int forward, "
    "SymInt count, int[] dims, SymInt[] firsts, int[] steps) -> Tensor[]",
    "stack": "(Tensor items, int dim) -> Tensor",
}
"""``enter`` is a state at the beginning of an iteration, ``read`` the slice of length 1 that iteration ``i`` reads at
``first + step * i``, ``index`` that position as a number. ``leave`` returns the last states, the tensors whose rows the loop
writes, and the stacked ``items``; ``reverse`` is the same for the backward pass of the loop ``forward``, whose states at the
beginning of each iteration are ``saved``. ``stack`` moves the first dimension of items."""
_LIBRARIES: list[Any] = []


def mark_of(node: Node) -> str:
    """``enter`` for a node that marks a loop; empty for other nodes."""
    namespace, name, _ = node.op.split(".")
    return name if namespace == NAMESPACE else ""


@lru_cache(maxsize=1)
def operators() -> Any:
    """The namespace of the operators, which are defined once per process."""
    library = torch.library.Library(NAMESPACE, "DEF")
    # torch removes the definitions with the library object.
    _LIBRARIES.append(library)
    shapes = {"enter": _enter, "read": _read, "index": _index, "leave": _leave, "reverse": _reverse, "stack": _stack}
    for name, schema in SCHEMAS.items():
        library.define(f"{name}{schema}")
        library.impl(name, shapes[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes[name], lib=library)
    return getattr(torch.ops, NAMESPACE)


def _enter(initial: torch.Tensor, loop: int, slot: int, name: str) -> torch.Tensor:
    return initial.new_empty(initial.shape)


def _read(source: torch.Tensor, loop: int, dim: int, first: Any, step: int) -> torch.Tensor:
    return source.new_empty([1 if d == dim else size for d, size in enumerate(source.shape)])


def _index(like: torch.Tensor, loop: int, first: Any, step: int) -> torch.Tensor:
    return like.new_empty((), dtype=torch.int64)


def _leave(
    states: Sequence[torch.Tensor],
    initial: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    items: Sequence[torch.Tensor],
    loop: int,
    count: Any,
    dims: Sequence[int],
    firsts: Sequence[Any],
    steps: Sequence[int],
) -> list[torch.Tensor]:
    finals = [state.new_empty(state.shape) for state in states]
    written = [torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device) for base in bases]
    return [*finals, *written, *(item.new_empty((count, *item.shape)) for item in items)]


def _reverse(
    states: Sequence[torch.Tensor],
    initial: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    bases: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    loop: int,
    forward: int,
    count: Any,
    dims: Sequence[int],
    firsts: Sequence[Any],
    steps: Sequence[int],
) -> list[torch.Tensor]:
    return _leave(states, initial, rows, bases, [], loop, count, dims, firsts, steps)


def _stack(items: torch.Tensor, dim: int) -> torch.Tensor:
    count, *shape = items.shape
    return items.new_empty((*shape[:dim], count, *shape[dim:]))
