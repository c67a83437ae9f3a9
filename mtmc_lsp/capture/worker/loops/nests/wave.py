"""The loop over diagonals (or rows, or columns) that computes the cells of a nest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.capture.worker.loops.iteration import NotKept, Range, Span
from mtmc_lsp.capture.worker.loops.lists import Collected
from mtmc_lsp.capture.worker.loops.nests.cells import Cells
from mtmc_lsp.capture.worker.loops.nests.ends import Edges, Ends, Place, Result
from mtmc_lsp.capture.worker.loops.nests.positions import Line, OneByOne, along, check_inside, schedule_of
from mtmc_lsp.capture.worker.loops.nests.tables import State, Table, same_memory, table_of, table_of_rows
from mtmc_lsp.capture.worker.loops.nests.tape import Call, Read, Tape, Write, with_item
from mtmc_lsp.capture.worker.loops.nests.values import BOTH, Arrays, Axes


class Wave:
    """Computes all cells of a nest from the runs of its body."""

    def __init__(
        self, spans: Sequence[Span], ends: Sequence[Ends], make_loop: Any, rows: Mapping[str, torch.Tensor]
    ) -> None:
        self.outer, self.inner = spans
        self.ends, self.make_loop, self.rows = ends, make_loop, rows
        self.paths = [end.tape.path for end in ends]
        self.tables: list[Table] = []
        self.places: list[dict[int, Place]] = [{} for _ in ends]
        """For each run, the reads of earlier cells."""
        self.results: list[Result] = []
        self._dependent: list[dict[int, bool]] = [{} for _ in ends]
        self._windows: dict[tuple[Any, ...], torch.Tensor] = {}
        self.continued: set[int] = set()
        """Results that pass from the last cell of a row to the first one of the next row."""
        self.arrays = [Arrays(end.tape, partial(self._leaf, number)) for number, end in enumerate(ends)]
        self._find_tables()
        self._find_carried()
        for number, end in enumerate(ends):
            self._check_row_writes(number, end)
            self._find_reads(number, end.tape)
            self._check_symbols(number, end)
        distances = [distance for reads in self.places for _, distance, _ in reads.values()]
        rows, columns = self.outer.count, self.inner.count
        self.schedule = OneByOne.of(rows, columns) if self.continued else schedule_of(distances, rows, columns)
        for reads in self.places:
            for result, distance, _ in reads.values():
                delay = self.schedule.delay(distance)
                self.results[result].delay = max(self.results[result].delay, delay)

    @property
    def device(self) -> torch.device:
        """The device of the cells."""
        return self.results[0].like.device

    # What the cells compute --------------------------------------------------------------------------------------

    def _find_tables(self) -> None:
        spans = (self.outer, self.inner)
        writes: dict[Any, list[Write | None]] = {}
        for number, end in enumerate(self.ends):
            for write in end.tape.writes:
                # The rows of several runs are different tensors.
                key = end.row_name(write.target) or id(write.target)
                writes.setdefault(key, [None] * len(self.ends))[number] = write
        for name, group in writes.items():
            present = [write for write in group if write is not None]
            first = present[0]
            if any(not first.is_at(write) for write in present):
                raise NotKept("it writes different cells of a table in different cases")
            if any(first.target is symbol for end in self.ends for symbol in end.outer_symbols.values()):
                raise NotKept("it changes a tensor that it also replaces")
            table = self._rows_of(name, first) if isinstance(name, str) else table_of(first, spans, self.paths)
            values = [write.value if write is not None else None for write in group]
            self.tables.append(table)
            self.results.append(Result(first.value, values, table))

    def _rows_of(self, name: str, write: Write) -> Table:
        """The table of a row that each iteration of the outer loop creates."""
        first = self.ends[0]
        created = [end.inner_before[name] for end in self.ends]
        links = [
            previous
            for previous in first.outer_symbols
            if all(end.outer_after.get(previous) is row for end, row in zip(self.ends, created, strict=True))
            and previous != name
        ]
        previous = links[0] if links else ""
        if name in self.rows:
            rows = self.rows[name]
        else:
            (rows,) = self.arrays[0].of([created[0]], created[0].device)
            if len(self.ends) > 1 and self.arrays[0].axes(created[0]):
                raise NotKept("its rows begin with values that depend on the row, and its body has several cases")
            rows = rows if self.arrays[0].axes(created[0]) else rows.expand(self.outer.count, *rows.shape)
        before = first.outer_before[previous] if previous else None
        table = table_of_rows(write, (self.outer, self.inner), self.paths, rows, before)
        table.name, table.previous = name, previous
        table.sources = [(row, end.outer_symbols.get(previous)) for end, row in zip(self.ends, created, strict=True)]
        return table

    def _find_carried(self) -> None:
        """Variables that the inner loop carries from cell to cell, and those that may be read after it."""
        for name, after in self.ends[0].inner_after.items():
            values = [end.inner_after.get(name) for end in self.ends]
            if not all(isinstance(value, torch.Tensor) for value in values):
                continue
            if any(table.holds(0, after) for table in self.tables):
                continue
            if all(end.inner_after[name] is end.inner_symbols.get(name) for end in self.ends):
                continue
            self.results.append(Result(after, values, name=name))

    def _find_reads(self, number: int, tape: Tape) -> None:
        """Find the reads of earlier cells in one run."""
        end, places = self.ends[number], self.places[number]
        for key, origin in tape.origins.items():
            if isinstance(origin, Read):
                for i, result in enumerate(self.results):
                    if result.table is None:
                        continue
                    table = result.table
                    if not table.holds(number, origin.source):
                        if same_memory(origin.source, table.write.target):
                            raise NotKept("it reads a table through a view")
                        continue
                    if key not in tape.used and not self._is_result(number, key):
                        continue  # Only parts of it are read.
                    if origin.inner is None and origin.outer is not None and self._reads_beside(tape, key, table):
                        continue
                    distance = table.read(number, origin, [tape.path])
                    if distance > (0, 0):
                        places[key] = i, distance, 0
        carried = {result.name: i for i, result in enumerate(self.results) if result.name}
        for name, symbol in end.inner_symbols.items():
            if id(symbol) in tape.used or self._is_result(number, id(symbol)):
                if name not in carried:
                    raise NotKept(f"it reads {name}, which does not change")
                like = self.results[carried[name]].like
                if like.shape != symbol.shape or like.dtype != symbol.dtype:
                    raise NotKept(f"{name} has another shape or dtype in each iteration")
                places[id(symbol)] = carried[name], (0, 1), number
                if self._passes_rows(end, name):
                    self.continued.add(carried[name])
        for tensor in tape.used.values():
            for table in self.tables:
                is_read = table.holds(number, tensor) or same_memory(tensor, table.sources[number][0])
                # Calls of tensors from outside of the nest are not on the tape.
                if is_read and not (tape.is_known(tensor) and self._reads_beside(tape, id(tensor), table)):
                    raise NotKept("it reads all of a table that it writes cell by cell")

    def _passes_rows(self, end: Ends, name: str) -> bool:
        """Whether a variable keeps its value from one row to the next."""
        if end.inner_before[name] is not end.outer_symbols.get(name):
            return False
        if end.outer_after.get(name) is not end.lasts[name]:
            raise NotKept(f"the outer loop changes {name} from row to row")
        return True

    def _is_result(self, number: int, key: int) -> bool:
        values = [result.values[number] for result in self.results]
        return any(value is not None and id(value) == key for value in values)

    def _reads_beside(self, tape: Tape, key: int, table: Table) -> bool:
        """Whether calls read only elements of a table, or of its rows, that the inner loop does not write."""
        origin = tape.origins.get(key)
        for call in tape.origins.values():
            if isinstance(call, Call) and any(id(item) == key for item in tree_leaves((call.args, call.kwargs))):
                index = call.args[1] if call.function in (torch.Tensor.__getitem__, with_item) else None
                items = list(index) if isinstance(index, tuple) else [index]
                if isinstance(origin, Read) and origin.outer is not None:
                    items.insert(origin.outer.dim, slice(None))
                if not table.is_outside(tuple(items)):
                    return False
        return True

    def _check_row_writes(self, number: int, end: Ends) -> None:
        """Check what the outer loop writes before the inner one."""
        for target, index in end.tape.row_writes:
            for table in self.tables:
                is_table = table.holds(number, target) or same_memory(target, table.sources[number][0])
                if is_table and not table.is_outside(index):
                    raise NotKept("its inner loop writes what it writes before it")

    def _check_symbols(self, number: int, end: Ends) -> None:
        """Check that no other value than a table passes from row to row."""
        for name, symbol in end.outer_symbols.items():
            if id(symbol) in end.tape.used and not any(table.holds(number, symbol) for table in self.tables):
                raise NotKept(f"the outer loop carries {name} from row to row")

    def is_dependent(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a value depends on earlier cells."""
        memo = self._dependent[number]
        if id(tensor) not in memo:
            tape = self.ends[number].tape
            memo[id(tensor)] = id(tensor) in self.places[number] or any(
                self.is_dependent(number, item) for item in tape.inputs(tensor)
            )
        return memo[id(tensor)]

    def _leaf(self, number: int, tensor: torch.Tensor) -> tuple[torch.Tensor, Axes] | None:
        """The array of a tensor that no call of a run has computed."""
        end = self.ends[number]
        origin = end.tape.origins.get(id(tensor))
        if not isinstance(origin, Read):
            return self._symbol(end, tensor)
        for table in self.tables:
            if table.holds(number, origin.source) and origin.inner is not None:
                return table.window(), BOTH
        axes: Axes = frozenset()
        source = origin.source
        if end.tape.is_known(source):
            ((source,), axes) = self.arrays[number].of([source], source.device), self.arrays[number].axes(source)
            if axes != {0} or origin.outer is not None:
                raise NotKept("it reads an intermediate value at the number of an iteration")
        return self._cells(source, origin, axes, end.tape)

    def _symbol(self, end: Ends, tensor: torch.Tensor) -> tuple[torch.Tensor, Axes] | None:
        if id(tensor) not in end.tape.symbols:
            return None
        name = end.tape.symbols[id(tensor)]
        raise NotKept(f"the outer loop carries {name} from row to row")

    def _cells(self, source: torch.Tensor, read: Read, axes: Axes, tape: Tape) -> tuple[torch.Tensor, Axes]:
        """A tensor at the numbers of the iterations, with their dimensions in front."""
        value, moved = source, 1 if axes else 0
        key: list[Any] = [id(source)]
        positions = [
            (axis, at.dim + moved, at, span)
            for axis, at, span in ((0, read.outer, self.outer), (1, read.inner, self.inner))
            if at is not None
        ]
        for axis, dim, at, span in positions:
            line = Line.of(at, source.shape[dim])
            outside = check_inside(line, source.shape[dim], span, [tape.path])
            key += [axis, dim, str(line), outside]
            value = along(value, dim, line, span, outside)
        in_front = tuple(dim for _, dim, _, _ in positions)
        first = moved
        value = value.movedim(in_front, tuple(range(first, first + len(in_front))))
        return self._windows.setdefault(tuple(key), value), axes | {axis for axis, _, _, _ in positions}

    # The loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the loop over diagonals, and write the tables."""
        schedule = self.schedule
        cells = Cells(self)
        states = [State(result.like, schedule.lanes, result.delay) for result in self.results]
        for number in self.continued:
            states[number].initial[0] = self.ends[0].outer_before[self.results[number].name].unsqueeze(0)
        edges = self._edges()
        sequences, fixed = cells.split(edges)
        values: dict[str, Any] = {"states": [value for state in states for value in state.initial]}
        names = tuple(f"cells{i}" for i in range(len(self.results)))
        lists: dict[str, list[Any]] = {name: [] for name in names}
        loop = self.make_loop(Range(schedule.times), ("states",), names)
        for time in loop:
            (carried,) = loop.enter(values)
            at = 0
            for state in states:
                state.values = carried[at : at + len(state.initial)]
                at += len(state.initial)
            rows = [sequence[time] for sequence in sequences]
            computed = cells.computed(states, schedule.numbers(time, self.device), rows, fixed, edges)
            for name, value in zip(names, computed, strict=True):
                loop.append(name, lists[name], value, False)
            values = {
                "states": [
                    item for state, value in zip(states, computed, strict=True) for item in state.following(value)
                ]
            }
            loop.leave(values)
        stacked = loop.results({**values, **lists})[1:]
        self._cells_of = [schedule.straight(items.joined(0, is_stack=True)) for items in stacked]
        for result, value in zip(self.results, self._cells_of, strict=True):
            if result.table is not None:
                result.table.store(value)

    def _edges(self) -> Edges:
        """What the first cells read that no cell has written, for each read of an earlier cell."""
        edges: Edges = {}
        for number, reads in enumerate(self.places):
            for key in reads.values():
                if key in edges:
                    continue
                result, distance = self.results[key[0]], key[1]
                if result.table is not None:
                    edges[key] = result.table.edges(distance, self.schedule)
                elif key[0] in self.continued:
                    edges[key] = []
                else:
                    edges[key] = [self.schedule.edge(1, 0, self._initial(number, result))]
        return edges

    def _initial(self, number: int, result: Result) -> torch.Tensor:
        """The value of a carried variable at the beginning of each row."""
        value = self.ends[number].inner_before[result.name]
        (array,) = self.arrays[number].of([value], self.device)
        if not self.arrays[number].axes(value):
            array = array.unsqueeze(0).expand(self.outer.count, *array.shape)
        return array

    # After the loop ----------------------------------------------------------------------------------------------

    def finals(self) -> dict[str, Any]:
        """The variables after the nest."""
        finals = {
            result.name: value[-1, -1]
            for result, value in zip(self.results, self._cells_of, strict=True)
            if result.name and isinstance(self.ends[0].outer_after.get(result.name), torch.Tensor)
        }
        for result, value in zip(self.results, self._cells_of, strict=True):
            if result.table is not None and result.table.name:
                row = result.table.last_row(value)
                finals |= {name: row for name in (result.table.name, result.table.previous) if name}
        return finals

    def collected(self) -> dict[str, Collected]:
        """The lists to which the outer loop has appended."""
        lists = {}
        (end, *others) = self.ends
        if others and end.items:
            raise NotKept("it appends to a list, and its body has several cases")
        last = {id(end.lasts[result.name]): i for i, result in enumerate(self.results) if result.name in end.lasts}

        def leaf(tensor: torch.Tensor) -> tuple[torch.Tensor, Axes] | None:
            if id(tensor) in last:
                return self._cells_of[last[id(tensor)]][:, -1], frozenset({0})
            return self._leaf(0, tensor)

        arrays = Arrays(end.tape, leaf)
        for name, (items, value, at_front) in end.items.items():
            (array,) = arrays.of([value], self.device)
            if not arrays.axes(value):
                array = array.unsqueeze(0).expand(self.outer.count, *array.shape)
            lists[name] = Collected(items, array, at_front=at_front)
        return lists
