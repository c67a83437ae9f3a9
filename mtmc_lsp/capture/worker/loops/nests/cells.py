"""The cells of one diagonal as a function of what they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _is_torch_function_mode_enabled, handle_torch_function

from mtmc_lsp.capture.worker.loops.nests.ends import Edges, Place
from mtmc_lsp.capture.worker.loops.nests.positions import OneByOne
from mtmc_lsp.capture.worker.loops.nests.tables import State
from mtmc_lsp.capture.worker.loops.nests.tape import Tape
from mtmc_lsp.capture.worker.loops.nests.values import BOTH, Axes, numbering_of, replayed

if TYPE_CHECKING:
    from mtmc_lsp.capture.worker.loops.nests.wave import Wave


class Cells:
    """The cells of one diagonal as a function of what they read."""

    def __init__(self, wave: Wave) -> None:
        self.wave, self.schedule = wave, wave.schedule
        self.slots: list[tuple[int, torch.Tensor, torch.Tensor, Axes]] = []
        """For each value that depends on no cell: the run, the tensor of its tape, and all its values."""
        for number, end in enumerate(wave.ends):
            tape, arrays = end.tape, wave.arrays[number]
            roots = [value for result in wave.results if (value := result.values[number]) is not None]
            ends = self._frontier(number, tape, roots)
            for tensor, array in zip(ends, arrays.of(ends, wave.device), strict=True):
                self.slots.append((number, tensor, array, arrays.axes(tensor)))
        self.old: dict[int, int] = {}
        """For each table that some run does not write, the slot of its cells before the nest."""
        for i, result in enumerate(wave.results):
            if result.table is not None and None in result.values:
                self.old[i] = len(self.slots)
                self.slots.append((-1, result.like, result.table.window(), BOTH))

    def _frontier(self, number: int, tape: Tape, roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values that cells read and that depend on no other cell."""
        found: dict[int, torch.Tensor] = {}
        pending, seen = list(roots), set()
        while pending:
            tensor = pending.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if not self.wave.is_dependent(number, tensor):
                found[id(tensor)] = tensor
            elif id(tensor) not in self.wave.places[number]:
                pending += tape.inputs(tensor)
        return list(found.values())

    def split(self, edges: Edges) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The values that an iteration reads by time, and those that it reads as they are."""
        sequences, fixed = [], []
        for _, _, array, axes in self.slots:
            if not self.schedule.by_time(axes):
                fixed.append(array)
                continue
            if axes != BOTH and self._has_lanes(axes):
                (missing,) = BOTH - axes
                counts = (self.wave.outer.count, self.wave.inner.count)
                array = array.unsqueeze(missing)
                array = array.expand(*counts, *array.shape[2:])
            sequences.append(self.schedule.skewed(array) if self._has_lanes(axes) else array)
        for items in edges.values():
            for edge in items:
                (sequences if edge.by_time else fixed).append(edge.values)
        return sequences, fixed

    def _has_lanes(self, axes: Axes) -> bool:
        """Whether the lanes of one time may have different values."""
        schedule = self.schedule
        return schedule.lane_axis in axes or bool(axes and (schedule.skew or isinstance(schedule, OneByOne)))

    def computed(
        self, states: list[State], numbers: dict[str, torch.Tensor], rows: Any, fixed: Any, edges: Edges
    ) -> list[torch.Tensor]:
        """The cells of one iteration."""
        sequences, constants = iter(rows), iter(fixed)
        inputs, dims = [], []
        for _, _, _, axes in self.slots:
            inputs.append(next(sequences) if self.schedule.by_time(axes) else next(constants))
            dims.append(0 if self._has_lanes(axes) else None)
        for key, items in edges.items():
            value = states[key[0]].read(key[1], self.schedule)
            for edge in items:
                mask = (numbers[edge.of] == edge.number).reshape(-1, *(1,) * (value.dim() - 1))
                value = torch.where(mask, next(sequences) if edge.by_time else next(constants), value)
            inputs.append(value)
            dims.append(0)
        function = _vmapped(partial(self._cell, list(edges)), (0, 0, *dims))
        return list(function(numbers["outer"], numbers["inner"], *inputs))

    def _cell(
        self, reads: list[Place], outer: torch.Tensor, inner: torch.Tensor, *inputs: Any
    ) -> tuple[torch.Tensor, ...]:
        wave = self.wave
        numbering = numbering_of(wave.outer, outer, inner)
        values = inputs[: len(self.slots)]
        read = dict(zip(reads, inputs[len(self.slots) :], strict=True))
        runs = []
        for number, end in enumerate(wave.ends):
            known = {id(slot[1]): value for slot, value in zip(self.slots, values, strict=True) if slot[0] == number}
            known |= {key: read[place] for key, place in wave.places[number].items()}
            roots = [value for result in wave.results if (value := result.values[number]) is not None]
            found = iter(replayed(end.tape, roots, known, numbering))
            runs.append(
                [
                    next(found) if result.values[number] is not None else values[self.old[i]]
                    for i, result in enumerate(wave.results)
                ]
            )
        results = []
        for i, result in enumerate(wave.results):
            value = runs[-1][i]
            for number in reversed(range(len(runs) - 1)):
                mask = wave.paths[number].mask(numbering)
                value = torch.where(mask, runs[number][i], value)
            results.append(value.to(result.like.dtype).expand(result.like.shape).clone())
        return tuple(results)


def _vmapped(function: Any, dims: tuple[Any, ...]) -> Any:
    """A function of all lanes, which a trace of the body sees as one call."""
    vmapped = torch.vmap(function, in_dims=dims)

    def cells(*inputs: torch.Tensor) -> Any:
        if _is_torch_function_mode_enabled():
            return handle_torch_function(cells, inputs, *inputs)
        return vmapped(*inputs)

    return cells
