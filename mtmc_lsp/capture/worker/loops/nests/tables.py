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
"""Between a cell and one that it reads, along the outer and the inner loop."""


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

    @property
    def counts(self) -> tuple[Any, Any]:
        """The numbers of iterations."""
        return self.spans[0].count, self.spans[1].count

    def read(self, read: Read, paths: Sequence[Path]) -> Distance:
        """The distance between a cell and the one that it reads."""
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
            # The row keeps its place, so a cell that is not yet written is that of the row before.
            return (0, along) if along > 0 else (1, along)
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

    def with_result(self, result: torch.Tensor) -> torch.Tensor:
        """The last row after the nest."""
        last = self.cells.select(0, self.row + self.counts[0] - 1)
        end = self.column + self.counts[1]
        parts = [last.narrow(0, 0, self.column), result[-1], last.narrow(0, end, last.shape[0] - end)]
        row = torch.cat(parts, 0)
        row = row.flip(0) if self.columns.is_turned else row
        assert self.write.inner is not None
        return row.movedim(0, self.write.inner.dim)

    def store(self, result: torch.Tensor) -> None:
        """Write the cells into the tensor of the user's code."""
        target, inner, outer = self.write.target, self.write.inner, self.write.outer
        assert inner is not None
        if self.rows is None:
            target.copy_(self.with_result(result))
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
    target, inner, outer = write.target, write.inner, write.outer
    assert inner is not None
    columns = _line(inner.dim, Line.of(inner, target.shape[inner.dim]), target, spans[1], paths)
    cells = target.flip(inner.dim) if columns.is_turned else target
    if outer is None:
        cells = cells.movedim(inner.dim, 0).unsqueeze(0)
        cells = cells.expand(spans[0].count + 1, *cells.shape[1:])
        return Table(write, cells, 1, columns.first, None, columns, spans)
    rows = _line(outer.dim, Line.of(outer, target.shape[outer.dim]), target, spans[0], paths)
    cells = cells.flip(outer.dim) if rows.is_turned else cells
    # The body of the loop over diagonals must not read what the nest writes afterwards.
    cells = cells.movedim((outer.dim, inner.dim), (0, 1)).clone()
    return Table(write, cells, rows.first, columns.first, rows, columns, spans)


def _line(dim: int, line: Line, target: torch.Tensor, span: Span, paths: Sequence[Path]) -> Line:
    if line.step != 1:
        raise NotKept("it writes a table with gaps")
    if any(check_inside(line, target.shape[dim], span, paths)):
        raise NotKept("it writes outside a tensor")
    return line


def _clipped(line: torch.Tensor, start: Any, count: Any) -> torch.Tensor:
    """The elements from ``start``, of which few at the ends may be outside."""
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
