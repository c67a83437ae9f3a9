"""The calls of one run of the body, repeated on all cells, rows or columns at once by ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from mtmc_lsp.capture.worker.loops.iteration import Changing, NotKept, Numbering, Span, Step
from mtmc_lsp.capture.worker.loops.nests.tape import Call, Tape

Axes = frozenset[int]
"""The loops that a value depends on: 0 for the outer one, 1 for the inner one."""
BOTH: Axes = frozenset({0, 1})


def numbering_of(outer: Span, outer_number: Any, inner_number: Any) -> Numbering:
    """The numbers of the iterations as tensors."""

    def number(step: Step) -> torch.Tensor:
        value: torch.Tensor = step.first + step.step * (outer_number if step.span == outer else inner_number)
        return value

    return number


def steps_of(number: Changing) -> list[Step]:
    """The numbers of iterations from which a number is computed."""
    steps: list[Step] = []

    def note(step: Step) -> torch.Tensor:
        steps.append(step)
        return torch.zeros((), dtype=torch.int64)

    number.at(note)
    return steps


def replayed(tape: Tape, roots: Sequence[torch.Tensor], known: Mapping[int, Any], numbering: Numbering) -> list[Any]:
    """Repeat the calls that lead to ``roots``.

    Args:
        known: values by the id of the tensor of the tape; others than these and calls stay as they are.
    """
    values = dict(known)
    results: dict[int, list[Any]] = {}

    def value(item: Any) -> Any:
        if isinstance(item, Changing):
            return item.at(numbering)
        return values.get(id(item), item) if isinstance(item, torch.Tensor) else item

    needed = needed_of(tape, roots, known.keys())
    for key, origin in tape.origins.items():
        if key in needed and key not in known and isinstance(origin, Call):
            if id(origin.args) not in results:
                result = origin.function(*tree_map(value, origin.args), **tree_map(value, dict(origin.kwargs)))
                results[id(origin.args)] = tree_leaves(result)
            values[key] = results[id(origin.args)][origin.leaf]
    return [value(root) for root in roots]


def needed_of(tape: Tape, roots: Iterable[torch.Tensor], known: Any) -> set[int]:
    """The ids of the tensors that roots are computed from, without those behind ``known`` ones."""
    needed: set[int] = set()
    pending = list(roots)
    while pending:
        tensor = pending.pop()
        if id(tensor) not in needed:
            needed.add(id(tensor))
            pending += [] if id(tensor) in known else list(tape.inputs(tensor))
    return needed


class Arrays:
    """Values of a tape that depend on no state, for all iterations that they depend on."""

    def __init__(self, tape: Tape, leaf: Callable[[torch.Tensor], tuple[torch.Tensor, Axes] | None]) -> None:
        """Prepare the values.

        Args:
            leaf: the array of a tensor that no call has computed, with the loops that it depends on; ``None`` for tensors
                from outside of the nest.
        """
        self.tape, self._leaf = tape, leaf
        self._axes: dict[int, Axes] = {}
        self._leaves: dict[int, tuple[torch.Tensor, Axes] | None] = {}

    def leaf(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Axes] | None:
        """The array of a tensor that no call has computed."""
        if id(tensor) not in self._leaves:
            self._leaves[id(tensor)] = self._leaf(tensor)
        return self._leaves[id(tensor)]

    def axes(self, tensor: torch.Tensor) -> Axes:
        """The loops that a value depends on."""
        if id(tensor) not in self._axes:
            if isinstance(self.tape.origins.get(id(tensor)), Call):
                axes = frozenset().union(*map(self.axes, self.tape.inputs(tensor)))
                steps = [step for number in self.tape.numbers(tensor) for step in steps_of(number)]
                axes |= {0 if step.span == self.tape.outer else 1 for step in steps}
            else:
                leaf = self.leaf(tensor)
                axes = leaf[1] if leaf is not None else frozenset()
            self._axes[id(tensor)] = axes
        return self._axes[id(tensor)]

    def of(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The values, with the iterations of the outer and then of the inner loop in their first dimensions.

        Raises:
            NotKept: torch cannot compute them at once.
        """
        results: dict[int, torch.Tensor] = {}
        for axes in (frozenset({0}), frozenset({1}), BOTH):
            group = [tensor for tensor in tensors if self.axes(tensor) == axes]
            direct = [tensor for tensor in group if not isinstance(self.tape.origins.get(id(tensor)), Call)]
            for tensor in direct:
                leaf = self.leaf(tensor)
                assert leaf is not None
                results[id(tensor)] = leaf[0]
            calls = [tensor for tensor in group if id(tensor) not in results]
            if calls:
                for tensor, array in zip(calls, self._computed(calls, axes, device), strict=True):
                    results[id(tensor)] = array
        return [results.get(id(tensor), tensor) for tensor in tensors]

    def _computed(self, tensors: list[torch.Tensor], axes: Axes, device: torch.device) -> Sequence[torch.Tensor]:
        tape = self.tape
        needed = needed_of(tape, tensors, ())
        held = {id(tensor): tensor for tensor in tape.kept}
        leaves = {key: leaf for key in needed if key in held and (leaf := self.leaf_of(held[key])) is not None}
        counts = (tape.outer.count, tape.inner.count if tape.inner is not None else 1)
        numbers = [torch.arange(count, device=device) for count in counts]

        def one(outer: torch.Tensor, inner: torch.Tensor, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
            known = dict(zip(leaves, arrays, strict=True))
            return tuple(replayed(tape, tensors, known, numbering_of(tape.outer, outer, inner)))

        function: Any = one
        for axis in (1, 0):
            if axis in axes:
                dims = (0 if axis == 0 else None, 0 if axis == 1 else None)
                function = torch.vmap(
                    function, in_dims=(*dims, *(0 if axis in kind else None for _, kind in leaves.values()))
                )
        # A number that nothing depends on is that of the first iteration.
        arguments = [number if axis in axes else number[0] for axis, number in enumerate(numbers)]
        try:
            computed: Sequence[torch.Tensor] = function(*arguments, *(array for array, _ in leaves.values()))
        except (RuntimeError, ValueError) as error:
            raise NotKept("torch cannot compute a part of its body for all iterations at once") from error
        return computed

    def leaf_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Axes] | None:
        """The array of a tensor, if no call has computed it."""
        return None if isinstance(self.tape.origins.get(id(tensor)), Call) else self.leaf(tensor)
