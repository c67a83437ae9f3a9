"""The loop over diagonals (or rows, or columns) that computes the cells of a nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import _is_torch_function_mode_enabled, handle_torch_function

from mtmc_lsp.capture.worker.loops.iteration import NotKept, Range, Span
from mtmc_lsp.capture.worker.loops.lists import Collected
from mtmc_lsp.capture.worker.loops.nests.positions import Edge, Line, OneByOne, along, check_inside, schedule_of
from mtmc_lsp.capture.worker.loops.nests.tables import Distance, State, Table, same_memory, table_of
from mtmc_lsp.capture.worker.loops.nests.tape import Read, Tape, Write
from mtmc_lsp.capture.worker.loops.nests.values import BOTH, Arrays, Axes, numbering_of, replayed

Place = tuple[int, Distance, int]
"""An earlier cell that is read: the number of the result, the distance, and the run whose rows begin with the value."""
Edges = dict[Place, list[Edge]]
"""What cells at the edges read."""


@dataclass
class Ends:
    """What one run of the body began with and left."""

    tape: Tape
    outer_before: dict[str, Any] = field(default_factory=dict)
    outer_symbols: dict[str, torch.Tensor] = field(default_factory=dict)
    outer_after: dict[str, Any] = field(default_factory=dict)
    inner_before: dict[str, Any] = field(default_factory=dict)
    inner_symbols: dict[str, torch.Tensor] = field(default_factory=dict)
    inner_after: dict[str, Any] = field(default_factory=dict)
    lasts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that stand for the variables after the inner loop."""
    items: dict[str, tuple[Any, torch.Tensor, bool]] = field(default_factory=dict)
    """What an iteration of the outer loop appends to each list, and whether in front."""


@dataclass
class Result:
    """A value of each cell that the nest computes."""

    like: torch.Tensor
    values: list[torch.Tensor | None]
    """In each run of the body; ``None`` where it does not write the table."""
    table: Table | None = None
    name: str = ""
    delay: int = 0
    """For how many iterations later cells read it."""
    is_kept: bool = True
    """Whether something after the loop may read it."""


class Wave:
    """Computes all cells of a nest from the runs of its body."""

    def __init__(self, spans: Sequence[Span], ends: Sequence[Ends], make_loop: Any) -> None:
        self.outer, self.inner = spans
        self.ends, self.make_loop = ends, make_loop
        self.paths = [end.tape.path for end in ends]
        self.tables: list[Table] = []
        self.places: list[dict[int, Place]] = [{} for _ in ends]
        """For each run, the reads of earlier cells."""
        self.results: list[Result] = []
        self.arrays: list[Arrays] = []
        self._dependent: list[dict[int, bool]] = [{} for _ in ends]
        self._windows: dict[tuple[Any, ...], torch.Tensor] = {}
        self.continued: set[int] = set()
        """Results that pass from the last cell of a row to the first one of the next row."""
        self._find_tables()
        self._find_carried()
        for number, end in enumerate(ends):
            self.arrays.append(Arrays(end.tape, partial(self._leaf, number)))
            self._find_reads(number, end.tape)
        self._check_rows()
        distances = [distance for reads in self.places for _, distance, _ in reads.values()]
        rows, columns = self.outer.count, self.inner.count
        self.schedule = OneByOne.of(rows, columns) if self.continued else schedule_of(distances, rows, columns)
        for reads in self.places:
            for result, distance, _ in reads.values():
                delay = self.schedule.delay(distance)
                self.results[result].delay = max(self.results[result].delay, delay)

    @property
    def _device(self) -> torch.device:
        return self.results[0].like.device

    # What the cells compute --------------------------------------------------------------------------------------

    def _find_tables(self) -> None:
        spans = (self.outer, self.inner)
        writes: dict[int, list[Write | None]] = {}
        for number, end in enumerate(self.ends):
            for write in end.tape.writes:
                writes.setdefault(id(write.target), [None] * len(self.ends))[number] = write
        for group in writes.values():
            present = [write for write in group if write is not None]
            first = present[0]
            if any(not first.is_at(write) for write in present):
                raise NotKept("it writes different cells of a table in different cases")
            if any(first.target is symbol for end in self.ends for symbol in end.outer_symbols.values()):
                raise NotKept("it changes a tensor that it also replaces")
            if id(first.target) in self.ends[0].tape.origins or any(
                first.target is kept for end in self.ends for kept in end.tape.kept
            ):
                raise NotKept("it writes a row that each iteration of the outer loop creates")
            table = table_of(first, spans, self.paths)
            values = [write.value if write is not None else None for write in group]
            self.tables.append(table)
            self.results.append(Result(first.value, values, table))

    def _find_carried(self) -> None:
        """Variables that the inner loop carries from cell to cell, and those that may be read after it."""
        for name, after in self.ends[0].inner_after.items():
            values = [end.inner_after.get(name) for end in self.ends]
            if not all(isinstance(value, torch.Tensor) for value in values) or any(
                after is result.table.write.target for result in self.results if result.table is not None
            ):
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
                    target = result.table.write.target
                    if same_memory(origin.source, target):
                        raise NotKept("it reads a table through a view")
                    if origin.source is not target:
                        continue
                    if key not in tape.used and not self._is_result(number, key):
                        continue  # Only parts of it are read.
                    distance = result.table.read(origin, [tape.path])
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
                if tensor is table.write.target or same_memory(tensor, table.write.target):
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

    def _check_rows(self) -> None:
        for end in self.ends:
            if end.tape.row_writes:
                raise NotKept("it writes a tensor before or after its inner loop")
            for name, symbol in end.outer_symbols.items():
                if id(symbol) in end.tape.used:
                    raise NotKept(f"the outer loop carries {name} from row to row")

    def _is_dependent(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a value depends on earlier cells."""
        memo = self._dependent[number]
        if id(tensor) not in memo:
            tape = self.ends[number].tape
            memo[id(tensor)] = id(tensor) in self.places[number] or any(
                self._is_dependent(number, item) for item in tape.inputs(tensor)
            )
        return memo[id(tensor)]

    def _leaf(self, number: int, tensor: torch.Tensor) -> tuple[torch.Tensor, Axes] | None:
        """The array of a tensor that no call of a run has computed."""
        end = self.ends[number]
        origin = end.tape.origins.get(id(tensor))
        if not isinstance(origin, Read):
            return self._symbol(end, tensor)
        for table in self.tables:
            if origin.source is table.write.target:
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
        cells = _Cells(self)
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
            computed = cells.computed(states, schedule.numbers(time, self._device), rows, fixed, edges)
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
        (array,) = self.arrays[number].of([value], self._device)
        if not self.arrays[number].axes(value):
            array = array.unsqueeze(0).expand(self.outer.count, *array.shape)
        return array

    # After the loop ----------------------------------------------------------------------------------------------

    def finals(self) -> dict[str, Any]:
        """The variables after the nest."""
        return {
            result.name: value[-1, -1]
            for result, value in zip(self.results, self._cells_of, strict=True)
            if result.name and isinstance(self.ends[0].outer_after.get(result.name), torch.Tensor)
        }

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
            (array,) = arrays.of([value], self._device)
            if not arrays.axes(value):
                array = array.unsqueeze(0).expand(self.outer.count, *array.shape)
            lists[name] = Collected(items, array, at_front=at_front)
        return lists


class _Cells:
    """The cells of one diagonal as a function of what they read."""

    def __init__(self, wave: Wave) -> None:
        self.wave, self.schedule = wave, wave.schedule
        self.slots: list[tuple[int, torch.Tensor, torch.Tensor, Axes]] = []
        """For each value that depends on no cell: the run, the tensor of its tape, and all its values."""
        for number, end in enumerate(wave.ends):
            tape, arrays = end.tape, wave.arrays[number]
            roots = [value for result in wave.results if (value := result.values[number]) is not None]
            ends = self._frontier(number, tape, roots)
            for tensor, array in zip(ends, arrays.of(ends, wave._device), strict=True):
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
            if not self.wave._is_dependent(number, tensor):
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
