"""The gradients of a kept loop: a second loop, which runs backwards over the iterations.

While the body is traced with autograd, its states, the rows that it reads and what is the same in all iterations are leaves.
The backward pass of the loop carries the gradients of the states, reads the gradients of the results row by row, and asks
autograd for the gradients of the leaves. For these, it computes the values of an iteration again, from the states that the
forward pass saves.
:mod:`mtmc_lsp.capture.worker.loops.reversing` does that in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.capture.worker.loops.iteration import Span, Step
from mtmc_lsp.capture.worker.loops.markers import operators
from mtmc_lsp.capture.worker.loops.tensors import is_differentiable, zeros


def without_gradients() -> contextlib.AbstractContextManager[Any]:
    """Switch autograd off where it is on. A trace above its dispatch would contain a call that switches it off."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


@dataclass(frozen=True)
class RowLeaf:
    """The slice that an iteration reads, as a leaf."""

    source: torch.Tensor
    dim: int
    step: Step
    leaf: torch.Tensor


@dataclass(frozen=True)
class Ends:
    """The results of a loop: the last states, tensors with the rows that it writes, and the stacked items."""

    span: Span
    names: Sequence[str]
    """Names of the states."""
    leaves: Sequence[torch.Tensor | None]
    """The states at the beginning of an iteration; ``None`` for a value that only the code after the loop reads."""
    states: Sequence[torch.Tensor]
    """The states at its end."""
    initial: Sequence[torch.Tensor]
    rows: Sequence[torch.Tensor]
    bases: Sequence[torch.Tensor]
    items: Sequence[torch.Tensor]
    dims: Sequence[int]
    steps: Sequence[Step]
    is_read: Sequence[bool]
    """Whether the body reads the state of the iteration before."""

    def leave(self, saved: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Emit the end of the loop; ``saved`` are further items."""
        result: list[torch.Tensor] = operators().leave(
            list(self.states),
            list(self.initial),
            list(self.rows),
            list(self.bases),
            [*self.items, *saved],
            self.span.loop,
            self.span.count,
            list(self.dims),
            [step.first for step in self.steps],
            [step.step for step in self.steps],
        )
        return result


def leave_with_gradients(
    ends: Ends, reads: Sequence[RowLeaf], same: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Sequence[torch.Tensor]:
    """The results of a loop with their backward pass.

    Args:
        same: tensors that are the same in all iterations, each with its leaf.
    """
    sources = [*ends.initial, *ends.bases, *(read.source for read in reads), *(tensor for tensor, _ in same)]
    if not any(tensor.requires_grad for tensor in sources):
        with without_gradients():
            return ends.leave()
    results: Sequence[torch.Tensor] = _Differentiated.apply(_Reverse(ends, reads, same), *sources)
    return results


class _Differentiated(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """The end of a loop, whose gradients are those of all of its iterations."""

    @staticmethod
    def forward(ctx: Any, reverse: _Reverse, *sources: torch.Tensor) -> Any:
        ctx.reverse = reverse
        ctx.set_materialize_grads(False)
        results = reverse.forward()
        ctx.mark_non_differentiable(*(item for item in results if not is_differentiable(item)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *ctx.reverse.backward(gradients)


def stacked(items: torch.Tensor, dim: int) -> torch.Tensor:
    """Items of all iterations, whose first dimension becomes ``dim``."""
    result: torch.Tensor = _Stacked.apply(items, dim)
    return result


class _Stacked(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """The mark of stacked items with its gradient."""

    @staticmethod
    def forward(ctx: Any, items: torch.Tensor, dim: int) -> Any:
        ctx.dim = dim
        return operators().stack(items, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.movedim(ctx.dim, 0), None


class _Reverse:
    """The backward loop of one loop."""

    def __init__(self, ends: Ends, reads: Sequence[RowLeaf], same: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._ends, self._reads, self._same = ends, reads, same
        self._saved: list[torch.Tensor] = []
        self._loop = -ends.span.loop
        self._initial: list[torch.Tensor] = []
        self._entered: list[torch.Tensor] = []

    def forward(self) -> list[torch.Tensor]:
        """Emit the end of the loop, which also saves the states of each iteration."""
        ends = self._ends
        results = ends.leave([leaf for leaf in ends.leaves if leaf is not None])
        count = len(ends.states) + len(ends.rows) + len(ends.items)
        self._saved = results[count:]
        return results[:count]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the states before the loop, of the tensors that it writes in part, and of what it reads."""
        ends = self._ends
        n_states, n_rows = len(ends.states), len(ends.rows)
        inner: list[torch.Tensor] = []
        arriving: list[torch.Tensor] = []
        for i, value in enumerate(ends.states):
            if self._has_gradient(i, gradients):
                gradient = gradients[i]
                inner.append(value)
                arriving.append(self._enter(gradient if gradient is not None else zeros(value), ends.names[i]))
        for value, gradient, dim, step in zip(ends.rows, gradients[n_states:], ends.dims, ends.steps, strict=False):
            if value.requires_grad and gradient is not None:
                inner.append(value)
                arriving.append(self._read(gradient, dim, step))
        for value, gradient in zip(ends.items, gradients[n_states + n_rows :], strict=True):
            if value.requires_grad and gradient is not None:
                inner.append(value)
                arriving.append(self._read(gradient, 0, Step(ends.span, 0, 1)).select(0, 0))
        carried = [leaf for leaf in ends.leaves if leaf is not None and leaf.requires_grad]
        leaves = [*carried, *(read.leaf for read in self._reads), *(leaf for _, leaf in self._same)]
        leaf_gradients = torch.autograd.grad(inner, leaves, arriving, allow_unused=True, retain_graph=True)
        of_leaf = {id(leaf): gradient for leaf, gradient in zip(leaves, leaf_gradients, strict=True)}
        return self._left(of_leaf, gradients)

    def _has_gradient(self, number: int, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the backward loop carries the gradient of a state."""
        ends = self._ends
        return ends.states[number].requires_grad and (gradients[number] is not None or ends.is_read[number])

    def _enter(self, start: torch.Tensor, name: str) -> torch.Tensor:
        """A state of the backward loop."""
        value: torch.Tensor = operators().enter(start, self._loop, len(self._initial), f"grad_{name}")
        self._initial.append(start)
        self._entered.append(value)
        return value

    def _read(self, source: torch.Tensor, dim: int, step: Step) -> torch.Tensor:
        value: torch.Tensor = operators().read(source, self._loop, dim, step.last, -step.step)
        return value

    def _left(
        self, of_leaf: dict[int, torch.Tensor | None], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Emit the end of the backward loop."""
        ends, states = self._ends, list[torch.Tensor]()
        last: list[int | None] = []
        entered = list(self._entered)
        for i, leaf in enumerate(ends.leaves):
            if not self._has_gradient(i, gradients):
                last.append(None)
                continue
            gradient = of_leaf.get(id(leaf))
            last.append(len(states) if gradient is not None else None)
            states.append(gradient if gradient is not None else torch.zeros_like(entered[len(states)]))
        rows = [(read, gradient) for read in self._reads if (gradient := of_leaf[id(read.leaf)]) is not None]
        sums: dict[int, int] = {}
        for _, leaf in self._same:
            if (gradient := of_leaf[id(leaf)]) is not None:
                sums[id(leaf)] = len(states)
                states.append(self._enter(zeros(leaf), "sum") + gradient)
        results = operators().reverse(
            states,
            self._initial,
            [gradient for _, gradient in rows],
            [zeros(read.source) for read, _ in rows],
            self._saved,
            self._loop,
            ends.span.loop,
            ends.span.count,
            [read.dim for read, _ in rows],
            [read.step.last for read, _ in rows],
            [-read.step.step for read, _ in rows],
        )
        of_rows = {id(read): results[len(states) + i] for i, (read, _) in enumerate(rows)}
        return [
            *(results[number] if number is not None else None for number in last),
            *(
                self._of_base(gradient, i) if gradient is not None else None
                for i, gradient in enumerate(gradients[len(ends.states) : len(ends.states) + len(ends.rows)])
            ),
            *(of_rows.get(id(read)) for read in self._reads),
            *(results[sums[id(leaf)]] if id(leaf) in sums else None for _, leaf in self._same),
        ]

    def _of_base(self, gradient: torch.Tensor, number: int) -> torch.Tensor | None:
        """The gradient of a tensor from before the loop whose rows the loop replaces."""
        if not self._ends.bases[number].requires_grad:
            return None
        dim, step = self._ends.dims[number], self._ends.steps[number]
        low, high = (step.first, step.last) if step.step > 0 else (step.last, step.first)
        stride = abs(step.step)
        part = gradient.movedim(dim, 0)[low : high + 1 : stride].movedim(0, dim)
        return torch.slice_scatter(gradient, torch.zeros_like(part), dim, low, high + 1, stride)
