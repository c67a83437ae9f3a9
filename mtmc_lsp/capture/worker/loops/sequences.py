"""Values of a body that depend on no state, computed for all iterations at once.

No kernel reads a table at ``x[:, t]`` step by step, or multiplies by a matrix of each step. What leads to such an operation from
rows alone is recorded, and ``torch.vmap`` repeats it on whole sequences before the loop. The body then reads a row of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves, tree_map

from mtmc_lsp.capture.worker.loops.iteration import Changing, NotKept, Span, Step, known
from mtmc_lsp.capture.worker.loops.pairs.operations import runs_on_pairs
from mtmc_lsp.capture.worker.loops.supported import PRODUCTS, runs_step_by_step


@dataclass(frozen=True)
class _Row:
    """The slice of a tensor from outside that an iteration reads."""

    source: torch.Tensor
    dim: int
    step: Step
    rest: tuple[Any, ...]
    """The index of the value in the slice of length 1."""

    def value(self, part: torch.Tensor) -> torch.Tensor:
        """The value of the iteration whose slice is ``part``."""
        return indexed(part.unsqueeze(self.dim), self.dim, self.rest)

    def all_iterations(self) -> torch.Tensor:
        """The slices of all iterations, one after the other in the first dimension."""
        first, last, step = self.step.first, self.step.last, self.step.step
        low, high = (first, last) if step > 0 else (last, first)
        part = self.source.movedim(self.dim, 0)
        if not (known(low == 0) and known(high + 1 == part.shape[0])):
            part = part[low : high + 1]
        part = part if step > 0 else part.flip(0)
        return part[:: abs(step)] if abs(step) > 1 else part


@dataclass(frozen=True)
class _Call:
    """One of the tensors that a torch call returns."""

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    leaf: int


def indexed(row: torch.Tensor, dim: int, rest: tuple[Any, ...]) -> torch.Tensor:
    """``row[rest]`` for a slice of length 1 along ``dim``, by views whose gradients are views where possible."""
    place = next((i for i, item in enumerate(rest) if isinstance(item, int) and _dims(rest[:i]) == dim), None)
    return row[rest] if place is None else _of_rest(row.squeeze(dim), rest[:place] + rest[place + 1 :])


def _of_rest(value: torch.Tensor, rest: tuple[Any, ...]) -> torch.Tensor:
    """``value[rest]``. The gradient of an index is a copy into zeros, and that of a new dimension a view."""
    if any(item is not None and item != slice(None) for item in rest):
        return value[rest]
    for i, item in enumerate(rest):
        value = value.unsqueeze(i) if item is None else value
    return value


def _dims(items: tuple[Any, ...]) -> int:
    """The dimensions of a tensor that the items of an index select from."""
    return sum(item is not None for item in items)


class Sequences:
    """How the body has computed its values that depend on no state."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._origins: dict[int, tuple[torch.Tensor, _Row | _Call]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._origins

    def add_row(self, value: torch.Tensor, source: torch.Tensor, dim: int, step: Step, rest: tuple[Any, ...]) -> None:
        """Note that ``value`` is a part of the slice of an iteration."""
        self._origins[id(value)] = value, _Row(source, dim, step, rest)

    def add_call(self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the call that has returned ``result`` from values that depend on no state."""
        for i, value in enumerate(tree_leaves(result)):
            if isinstance(value, torch.Tensor) and value not in self:
                self._origins[id(value)] = value, _Call(function, args, kwargs, i)

    def forget(self, storage: int, storage_of: Callable[[torch.Tensor], int]) -> None:
        """Note that an operation changes values in place."""
        self._origins = {key: item for key, item in self._origins.items() if storage_of(item[0]) != storage}

    def all_iterations(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of all iterations, in the first dimension of each.

        Raises:
            NotKept: torch cannot compute them at once.
        """
        rows: dict[int, _Row] = {}
        self._collect(values, rows, set())
        sequences = [row.all_iterations() for row in rows.values()]
        numbers = torch.arange(self._span.count, device=values[0].device)

        def one(number: torch.Tensor, *slices: torch.Tensor) -> tuple[torch.Tensor, ...]:
            values_of = {key: row.value(part) for (key, row), part in zip(rows.items(), slices, strict=True)}
            return tuple(self._value(value, number, values_of) for value in values)

        try:
            return list(torch.vmap(one)(numbers, *sequences))
        except (RuntimeError, ValueError) as error:
            raise NotKept("torch cannot compute a part of its body for all iterations at once") from error

    def _collect(self, tree: Any, rows: dict[int, _Row], seen: set[int]) -> None:
        """Find the rows that values depend on."""
        for value in tree_leaves(tree):
            if not isinstance(value, torch.Tensor) or value not in self or id(value) in seen:
                continue
            seen.add(id(value))
            origin = self._origins[id(value)][1]
            if isinstance(origin, _Row):
                rows[id(value)] = origin
            else:
                self._collect((origin.args, origin.kwargs), rows, seen)

    def _value(self, item: Any, number: torch.Tensor, values_of: dict[int, Any]) -> Any:
        """The value of one iteration."""
        if isinstance(item, Changing):
            return item.at(lambda step: step.first + step.step * number)
        if not isinstance(item, torch.Tensor) or item not in self:
            return item
        if id(item) not in values_of:
            origin = self._origins[id(item)][1]
            assert isinstance(origin, _Call)
            args, kwargs = tree_map(lambda part: self._value(part, number, values_of), (origin.args, origin.kwargs))
            values_of[id(item)] = tree_leaves(origin.function(*args, **kwargs))[origin.leaf]
        return values_of[id(item)]


class Watched:
    """The operations that torch traces while entered, where the trace is below autograd's dispatch."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        self._graph = mode.tracer.graph if mode is not None and not mode.pre_dispatch else None
        self._last = self._graph._root.prev if self._graph is not None else None

    def leaves_loop(self) -> bool:
        """Whether one of them should run before the loop: no kernel runs it step by step, or it is a product."""
        if self._graph is None:
            return False
        node = self._graph._root.prev
        while node is not self._last:
            if isinstance(node.target, torch._ops.OpOverload):
                op = str(node.target)
                if op.startswith("aten.") and (op.split(".")[1] in PRODUCTS or not _runs_step_by_step(node)):
                    return True
            node = node.prev
        return False


def _runs_step_by_step(node: torch.fx.Node) -> bool:
    """Whether a kernel can run a traced operation in each iteration, also one of complex values."""
    values = tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return runs_on_pairs(str(node.target).split(".")[1])
    return runs_step_by_step(str(node.target))
