"""Tensors that a nest writes cell by cell, as tables with the cells of the outer and then of the inner loop in front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.capture.worker.loops.iteration import NotKept, Span, known
from mtmc_lsp.capture.worker.loops.nests.conditions import Path
from mtmc_lsp.capture.worker.loops.nests.positions import (
    Edge,
    Line,
    Schedule,
    check_inside,
    difference,
    padded,
    shifted,
)
from mtmc_lsp.capture.worker.loops.nests.tape import Read, Write
from mtmc_lsp.capture.worker.loops.tensors import storage_of

Distance = tuple[int, int]
"""The offset of a read from the written cell, along the outer and the inner loop."""


@dataclass
class Table:
    """A tensor whose cells the body writes."""

    write: Write
    cells: torch.Tensor
    """Before the nest: rows, columns, and the dimensions of a cell."""
    row: Any
    """Where the first iteration writes."""
    column: Any
    rows: Line | None
    columns: Line
    spans: tuple[Span, Span]
    sources: list[tuple[torch.Tensor, torch.Tensor | None]]
    """By run of the body: the tensor that is written, and the tensor that holds the previous row."""
    name: str = ""
    """The variable of a row that each iteration of the outer loop creates."""
    previous: str = ""
    """The variable that holds the row before."""

    def holds(self, number: int, source: torch.Tensor) -> bool:
        """Whether a run of the body reads its cells in a tensor."""
        return any(source is item for item in self.sources[number])

    def is_outside(self, index: tuple[Any, ...]) -> bool:
        """Whether an index selects elements beside all cells that the inner loop writes."""
        inner = self.write.inner
        assert inner is not None
        at = index[inner.dim] if inner.dim < len(index) else None
        if type(at) is not int or any(item is None or item is Ellipsis for item in index):
            return False
        size, first = self.cells.shape[1], self.columns.first
        at = size + at if at < 0 else at
        at = size - 1 - at if self.columns.is_turned else at
        return known(at < first) or known(at >= first + self.counts[1])

    @property
    def counts(self) -> tuple[Any, Any]:
        """The numbers of iterations."""
        return self.spans[0].count, self.spans[1].count

    def read(self, number: int, read: Read, paths: Sequence[Path]) -> Distance:
        """The offset of a read from the written cell in one run."""
        write, sizes = self.write, self.write.target.shape
        if read.inner is None or read.inner.dim != write.inner.dim:  # type: ignore[union-attr]
            raise NotKept("it reads a whole row of a table that it writes cell by cell")
        columns = Line.of(read.inner, sizes[read.inner.dim])
        if (columns.is_turned, columns.step) != (self.columns.is_turned, 1):
            raise NotKept("it reads and writes a table in different directions")
        along = difference(self.columns.first, columns.first)
        if self.rows is None:
            if read.outer is not None:
                raise NotKept("it reads and writes a table along different dimensions")
            check_inside(columns, sizes[read.inner.dim], self.spans[1], paths)
            if read.source is self.sources[number][1]:
                return 1, along
            if self.name and along < 0:
                raise NotKept("it reads cells of a row before it writes them")
            # A row that keeps its place has a cell of the row before until it is written.
            return (0, along) if along > 0 or self.name else (1, along)
        if read.outer is None or read.outer.dim != write.outer.dim:  # type: ignore[union-attr]
            raise NotKept("it reads and writes a table along different dimensions")
        rows = Line.of(read.outer, sizes[read.outer.dim])
        if (rows.is_turned, rows.step) != (self.rows.is_turned, 1):
            raise NotKept("it reads and writes a table in different directions")
        check_inside(rows, sizes[read.outer.dim], self.spans[0], paths)
        check_inside(columns, sizes[read.inner.dim], self.spans[1], paths)
        return difference(self.rows.first, rows.first), along

    def window(self, distance: Distance = (0, 0)) -> torch.Tensor:
        """The cells at a distance before those that the nest writes, as they are before the nest."""
        counts = self.counts
        return self.cells.narrow(0, self.row - distance[0], counts[0]).narrow(1, self.column - distance[1], counts[1])

    def edges(self, distance: Distance, schedule: Schedule) -> list[Edge]:
        """What cells at a distance after the edges of the table read."""
        edges = []
        for axis in (0, 1):
            steps = distance[axis]
            for n in range(abs(steps)):
                number = n if steps > 0 else self.counts[axis] - 1 - n
                first = (self.row - distance[0], self.column - distance[1])
                at, start = first[axis] + number, first[1 - axis]
                if known(at < 0) or known(at >= self.cells.shape[axis]):
                    continue  # Only paths that do not read it come here.
                line = self.cells.select(axis, at)
                values = _clipped(line, start, self.counts[1 - axis])
                edges.append(schedule.edge(axis, number, values))
        return edges

    def last_row(self, result: torch.Tensor) -> torch.Tensor:
        """The last row after the nest."""
        last = self.cells.select(0, self.row + self.counts[0] - 1)
        end = self.column + self.counts[1]
        parts = [last.narrow(0, 0, self.column), result[-1], last.narrow(0, end, last.shape[0] - end)]
        row = torch.cat(parts, 0)
        row = row.flip(0) if self.columns.is_turned else row
        assert self.write.inner is not None
        return row.movedim(0, self.write.inner.dim).clone(memory_format=torch.contiguous_format)

    def store(self, result: torch.Tensor) -> None:
        """Write the cells into the tensor of the user's code."""
        target, inner, outer = self.write.target, self.write.inner, self.write.outer
        assert inner is not None
        if self.name:
            return
        if self.rows is None:
            target.copy_(self.last_row(result))
            return
        assert outer is not None
        result = result.flip(0) if self.rows.is_turned else result
        result = result.flip(1) if self.columns.is_turned else result
        for at, line, count in ((outer, self.rows, self.counts[0]), (inner, self.columns, self.counts[1])):
            size = target.shape[at.dim]
            target = target.narrow(at.dim, size - line.first - count if line.is_turned else line.first, count)
        target.copy_(result.movedim((0, 1), (outer.dim, inner.dim)))


def table_of(write: Write, spans: tuple[Span, Span], paths: Sequence[Path]) -> Table:
    """The table of a tensor from before the nest."""
    sources: list[tuple[torch.Tensor, torch.Tensor | None]] = [(write.target, None) for _ in paths]
    target, inner, outer = write.target, write.inner, write.outer
    assert inner is not None
    columns = _line(inner.dim, Line.of(inner, target.shape[inner.dim]), target, spans[1], paths)
    cells = target.flip(inner.dim) if columns.is_turned else target
    if outer is None:
        cells = cells.movedim(inner.dim, 0).unsqueeze(0)
        cells = cells.expand(spans[0].count + 1, *cells.shape[1:])
        return Table(write, cells, 1, columns.first, None, columns, spans, sources)
    rows = _line(outer.dim, Line.of(outer, target.shape[outer.dim]), target, spans[0], paths)
    cells = cells.flip(outer.dim) if rows.is_turned else cells
    # The body of the loop over diagonals must not read what the nest writes afterwards.
    cells = cells.movedim((outer.dim, inner.dim), (0, 1)).clone()
    return Table(write, cells, rows.first, columns.first, rows, columns, spans, sources)


def table_of_rows(
    write: Write, spans: tuple[Span, Span], paths: Sequence[Path], rows: torch.Tensor, before: torch.Tensor | None
) -> Table:
    """The table of the rows that the iterations of the outer loop create.

    Args:
        rows: all of them before the inner loop writes them.
        before: the row before the first one.
    """
    inner = write.inner
    assert inner is not None
    if write.outer is not None:
        raise NotKept("it writes a row at the number of the outer loop")
    columns = _line(inner.dim, Line.of(inner, write.target.shape[inner.dim]), write.target, spans[1], paths)
    if before is not None and (before.shape != rows.shape[1:] or before.dtype != rows.dtype):
        raise NotKept("its rows have other shapes or dtypes than the one before them")
    cells = torch.cat([rows[:1] if before is None else before.unsqueeze(0), rows], 0)
    cells = cells.flip(inner.dim + 1) if columns.is_turned else cells
    return Table(write, cells.movedim(inner.dim + 1, 1), 1, columns.first, None, columns, spans, [])


def _line(dim: int, line: Line, target: torch.Tensor, span: Span, paths: Sequence[Path]) -> Line:
    if line.step != 1:
        raise NotKept("it writes a table with gaps")
    if any(check_inside(line, target.shape[dim], span, paths)):
        raise NotKept("it writes outside a tensor")
    return line


def _clipped(line: torch.Tensor, start: Any, count: Any) -> torch.Tensor:
    """The elements from ``start``. A few at the ends may be outside of the tensor."""
    size = line.shape[0]
    before = 0 if known(start >= 0) else -difference(start, 0)
    after = 0
    if not (known(start + count <= size) or bool(start + count <= size)):
        after = difference(start + count, size)
    return padded(line.narrow(0, start + before, count - before - after), 0, before, after)


class State:
    """What a loop over diagonals carries of the cells that it computed last."""

    def __init__(self, like: torch.Tensor, lanes: Any, delay: int) -> None:
        shape = (lanes, *like.shape)
        self.initial = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(delay)]
        self.values = self.initial
        """At the beginning of an iteration: those of one iteration ago first."""

    def read(self, distance: Distance, schedule: Schedule) -> torch.Tensor:
        """The values at a distance before the cells of this iteration."""
        lane, _ = schedule.split(distance)
        return shifted(self.values[schedule.delay(distance) - 1], lane)

    def following(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The values at the end of the iteration."""
        return [value, *self.values[:-1]] if self.values else []


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share memory."""
    return one is not other and storage_of(one) == storage_of(other)
