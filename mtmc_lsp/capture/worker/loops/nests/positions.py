"""Tensors at the numbers of the iterations of one loop, for all iterations at once, and the order of cells on diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mtmc_lsp.capture.worker.loops.iteration import NotKept, Span, known
from mtmc_lsp.capture.worker.loops.nests.conditions import Path
from mtmc_lsp.capture.worker.loops.nests.tape import At

FARTHEST = 4
"""Limit for the offset of a read, in cells along each dimension."""


def padded(tensor: torch.Tensor, dim: int, before: Any, after: Any, *, is_wide: bool = False) -> torch.Tensor:
    """A tensor with zeros before and after its elements along a dimension.

    Args:
        is_wide: whether there are zeros for all sizes.
    """
    if known(before == 0) and known(after == 0):
        return tensor
    if not (isinstance(before, int) and isinstance(after, int)) and not is_wide:
        # Without padding, torch returns a copy in the layout of the tensor; with padding, it is contiguous.
        tensor = tensor.contiguous()
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (before, after))


def difference(one: Any, other: Any) -> int:
    """The constant ``one - other``.

    Raises:
        NotKept: it is not a small constant.
    """
    for distance in range(-FARTHEST, FARTHEST + 1):
        if known(one - other == distance):
            return distance
    raise NotKept("a cell reads others at distances that are not small constants")


@dataclass(frozen=True)
class Line:
    """Where the iterations of a loop are along a dimension that is turned so that positions grow."""

    first: Any
    step: int
    is_turned: bool

    @classmethod
    def of(cls, at: At, size: Any) -> Line:
        """The positions along a dimension of this size, which may be counted from its end."""
        first, step = at.step.first, at.step.step
        if isinstance(first, int) and first < 0 and (step < 0 or known(at.step.last < 0)):
            first = first + size
        return cls(size - 1 - first, -step, True) if step < 0 else cls(first, step, False)


def check_inside(line: Line, size: Any, span: Span, paths: Sequence[Path]) -> tuple[int, int]:
    """How many iterations at the beginning and the end are outside of a dimension. No cell reads there.

    Raises:
        NotKept: a cell reads there.
    """
    before, last = 0, line.first + line.step * (span.count - 1)
    if not (known(line.first >= 0) or _holds(line.first >= 0)):
        before = -difference(line.first, 0)
    after = 0
    if not (known(last < size) or _holds(last + 1 == size) or _holds(last < size)):
        after = difference(last + 1, size)
    if (before or after) and line.step != 1:
        raise NotKept("it reads outside a tensor")
    outside = [*range(before), *(span.count - 1 - n for n in range(after))]
    if not all(path.excludes(span, iteration) for path in paths for iteration in outside):
        raise NotKept("it reads outside a tensor, or from its end in the first iterations alone")
    return before, after


def _holds(condition: Any) -> bool:
    return bool(condition)


def along(tensor: torch.Tensor, dim: int, line: Line, span: Span, outside: tuple[int, int]) -> torch.Tensor:
    """The parts of all iterations along a dimension, in the order of the iterations."""
    before, after = outside
    tensor = tensor.flip(dim) if line.is_turned else tensor
    first, size = line.first + before, tensor.shape[dim]
    count = span.count - before - after
    if not (known(first == 0) and known(count == size) and line.step == 1):
        tensor = tensor.narrow(dim, first, line.step * (count - 1) + 1)
        if line.step != 1:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, line.step),)]
    return padded(tensor, dim, before, after)


@dataclass(frozen=True)
class Edge:
    """What cells read at the edge of a table, where no cell before them has been computed."""

    of: str
    """The number that tells which cells these are: ``lane``, ``other``, ``time``, ``inner``."""
    number: Any
    values: torch.Tensor
    by_time: bool
    """Whether the values are those of all times, or those of all lanes."""


@dataclass(frozen=True)
class Schedule:
    """When cells are computed: cell ``other`` of lane ``lane`` at the time ``other + skew * lane``, all lanes at once."""

    lane_axis: int
    """The loop whose iterations are lanes: 0 for the outer one, 1 for the inner one."""
    skew: int
    lanes: Any
    others: Any

    @property
    def times(self) -> Any:
        """The number of diagonals."""
        return self.others + self.skew * (self.lanes - 1)

    def split(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """A pair for the outer and the inner loop as one for lanes and the others."""
        return (pair[self.lane_axis], pair[1 - self.lane_axis])

    def delay(self, distance: tuple[int, int]) -> int:
        """The number of iterations between the write of a cell and its read."""
        lane, other = self.split(distance)
        return int(other + self.skew * lane)

    def skewed(self, cells: torch.Tensor) -> torch.Tensor:
        """The cells of the outer and the inner loop, in the first two dimensions, by time and lane."""
        cells = cells.transpose(0, 1) if self.lane_axis else cells
        if not self.skew:
            return cells.transpose(0, 1)
        order = [*range(2, cells.dim()), 0, 1]
        cells = cells.permute(order)
        shape = cells.shape[:-2]
        cells = padded(cells, cells.dim() - 1, 0, self.skew * self.lanes, is_wide=True)
        flat = cells.reshape(*shape, self.lanes * (self.others + self.skew * self.lanes))
        flat = flat.narrow(-1, 0, self.lanes * self.times)
        rank = len(shape)
        return flat.reshape(*shape, self.lanes, self.times).permute(rank + 1, rank, *range(rank))

    def straight(self, cells: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`skewed`."""
        if not self.skew:
            cells = cells.transpose(0, 1)
            return cells.transpose(0, 1) if self.lane_axis else cells
        rank = cells.dim() - 2
        cells = cells.permute(*range(2, rank + 2), 1, 0)
        shape = cells.shape[:-2]
        flat = cells.reshape(*shape, self.lanes * self.times)
        flat = padded(flat, rank, 0, self.skew * self.lanes, is_wide=True)
        cells = flat.reshape(*shape, self.lanes, self.others + self.skew * self.lanes).narrow(-1, 0, self.others)
        cells = cells.permute(rank, rank + 1, *range(rank))
        return cells.transpose(0, 1) if self.lane_axis else cells

    def edge(self, axis: int, number: Any, values: torch.Tensor) -> Edge:
        """The values that cells read in one iteration of a loop, for the iterations of the other loop."""
        if axis != self.lane_axis:
            return Edge("other", number, values, by_time=False)
        delay = self.skew * number
        return Edge("lane", number, padded(values, 0, delay, self.times - self.others - delay), by_time=True)

    def numbers(self, time: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """The numbers of the cells that are computed at a time."""
        lanes = torch.arange(self.lanes, device=device)
        others = time - self.skew * lanes if self.skew else lanes * 0 + time
        outer, inner = (others, lanes) if self.lane_axis else (lanes, others)
        return {"lane": lanes, "other": others, "outer": outer, "inner": inner}

    def by_time(self, axes: frozenset[int]) -> bool:
        """Whether a value that depends on these loops differs from time to time."""
        return 1 - self.lane_axis in axes


@dataclass(frozen=True)
class OneByOne(Schedule):
    """One cell after another, row by row: a schedule with one lane."""

    rows: Any
    columns: Any

    @classmethod
    def of(cls, rows: Any, columns: Any) -> OneByOne:
        """The order of the cells of a table."""
        return cls(0, 0, 1, rows * columns, rows, columns)

    def delay(self, distance: tuple[int, int]) -> int:
        """The number of iterations between the write of a cell and its read in the same row.

        Raises:
            NotKept: they are in different rows.
        """
        if distance[0]:
            raise NotKept("a value passes from row to row, and its cells read other rows, too")
        return distance[1]

    def edge(self, axis: int, number: Any, values: torch.Tensor) -> Edge:
        """The values that the first cells of each row read."""
        if not axis:
            raise NotKept("a value passes from row to row, and its cells read other rows, too")
        values = values.unsqueeze(1).expand(self.rows, self.columns, *values.shape[1:])
        return Edge("inner", number, self.skewed(values), by_time=True)

    def numbers(self, time: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """The numbers of the cell that is computed at a time."""
        others = torch.zeros(1, dtype=torch.int64, device=device) + time
        inner = others % self.columns
        return {"lane": others * 0, "other": others, "outer": (others - inner) // self.columns, "inner": inner}

    def by_time(self, axes: frozenset[int]) -> bool:
        """Whether a value that depends on these loops differs from time to time."""
        return bool(axes)

    def skewed(self, cells: torch.Tensor) -> torch.Tensor:
        """The cells by time, in one lane."""
        return cells.reshape(self.others, 1, *cells.shape[2:])

    def straight(self, cells: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`skewed`."""
        return cells.reshape(self.rows, self.columns, *cells.shape[2:])


def schedule_of(distances: Sequence[tuple[int, int]], outer: Any, inner: Any) -> Schedule:
    """When to compute the cells, so that each is computed after those that it reads.

    Args:
        distances: between a cell and those that it reads, along the outer and the inner loop.

    Raises:
        NotKept: no order of this form is right.
    """
    for lane_axis, skew in ((1, 0), (0, 0), (0, 1), (0, 2)):
        lanes, others = (inner, outer) if lane_axis else (outer, inner)
        schedule = Schedule(lane_axis, skew, lanes, others)
        if all(schedule.delay(distance) >= 1 for distance in distances):
            return schedule
    raise NotKept("its cells read each other in an order that is not one of rows, columns or diagonals")


def shifted(values: torch.Tensor, lanes: int) -> torch.Tensor:
    """The values of the lanes, moved by a number of lanes."""
    if lanes > 0:
        return padded(values[:-lanes], 0, lanes, 0)
    return padded(values[-lanes:], 0, 0, -lanes) if lanes else values
