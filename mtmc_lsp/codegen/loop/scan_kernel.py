"""The kernels of a loop over time steps as associative scans: programs compute chunks of iterations at once.

A tile has one row per time step. Within a chunk, a scan composes the updates of the states; the states after the last step go to
the next chunk. Where segments share the iterations, one kernel per level of dependent scans first writes what each segment does
to its states, and every later kernel applies the segments in front of its own in order. There are no atomics.

Composed coefficients may overflow, or multiply zero by infinity, where one step after another gives numbers. A tile with a state
that is not finite is therefore computed again by the sequential kernel, whose launch does nothing for all other tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.axis_groups import Group, split_variable
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.formulas import render
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code, blocks_text, next_power_of_2_text
from mtmc_lsp.codegen.loop.loop_kernel import LoopWriter, of_graph, write_loop_kernel
from mtmc_lsp.codegen.loop.scan_values import (
    applied_texts,
    composed_texts,
    composition_of,
    neutral_texts,
    number_text,
    scan_dtype,
)
from mtmc_lsp.codegen.tile.tile import MAX_GRID_Y, merge_axes
from mtmc_lsp.codegen.tile.tile_kernel import steps_far
from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.graph import Node, Ref, TensorType
from mtmc_lsp.core.loop import LoopInput, LoopOutput, Position
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.loops.scan import Leaf, Recurrence, ScanForm, ScanKind, Term, Value, scan_form
from mtmc_lsp.ir.memory_order import column_axes
from mtmc_lsp.ir.primitives import KernelIR, Prim
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import MOST_ELEMENTS, LoopConfig

Updates = dict[tuple[str, ...], tuple[Scratch, ...]]
"""Names of a recurrence's states to the buffers with what each segment does to them."""


def write_scan_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernels of a loop as scans, in launch order; the one with the name ``name`` computes the results.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    form = loop_in(ir, region)
    scan, body = scan_form(form), form.region
    sources = [ir.of(ref).name for ref in form.node.args if isinstance(ref, Ref)]
    types = [buffers[source] for source in sources]
    updates: Updates = {}

    def writer(parallel: Sequence[list[Axis]], reduced: list[list[Axis]]) -> ScanWriter:
        return ScanWriter(form, scan, form.node, types, config, [*parallel], reduced, updates)

    probe = writer([[axis] for axis in body.parallel_axes], [[axis] for axis in body.reduced_axes])
    probe.result_kernel(name, docstring)
    parallel, reduced = (merge_axes(axes, probe.accesses) for axes in (body.parallel_axes, body.reduced_axes))
    columns = [group for group in parallel if group[-1] in column_axes(form.ir, body)]
    columns = columns if body.kind is RegionKind.MAP else reduced
    wide = any(steps_far(columns, access) for access in probe.accesses)

    def next_writer() -> ScanWriter:
        one = writer(parallel, reduced)
        one.wide_columns = wide
        return one

    kernels = []
    updates.clear()
    for level in range(1, scan.levels + 1) if config.segments > 1 else ():
        suffix = f"_{level}" if scan.levels > 1 else ""
        kernels.append(next_writer().updates_kernel(level, f"{name}_segments{suffix}"))
    result = next_writer()
    kernels.append(result.result_kernel(name, docstring))
    kernels = [of_graph(kernel, form, sources) for kernel in kernels]
    if result.flags is None:
        return kernels
    sequential = LoopConfig(1, config.block, config.warps, config.stages)
    summary = "Computes tiles again, one iteration after another, whose states are not all finite."
    again = write_loop_kernel(ir, region, buffers, sequential, f"{name}_again", summary, result.flags)
    if again.grid_sizes["n_cols"] != result.n_cols:
        raise CannotCode("the scan and the sequential kernel of the loop have different tiles")
    return [*kernels, again]


class _TimeExpressions(Expressions):
    """Evaluates the body for a chunk of iterations: what an iteration reads is loaded for all steps of the chunk."""

    def __init__(self, like: Expressions, writer: ScanWriter) -> None:
        super().__init__(
            like.ir,
            like.region,
            like.parameters,
            like.groups,
            like.flat,
            like.masks,
            like.emit,
            like.provide,
        )
        self.writer = writer
        self.positions = {
            writer.form.prim(item): item.position
            for item in writer.form.loop.inputs
            if item.position is not None and item.argument is not None
        }

    def _load(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        position = self.positions.get(prim.name)
        if position is not None:
            at = (*at[: position.dim], self.writer.time_index(position), *at[position.dim + 1 :])
        return super()._load(prim, at)


class ScanWriter(LoopWriter):
    """Writes the kernels of a loop whose tiles have one row per time step."""

    def __init__(
        self,
        form: LoopForm,
        scan: ScanForm,
        node: Node,
        types: Sequence[TensorType],
        config: LoopConfig,
        parallel: list[list[Axis]],
        reduced: list[list[Axis]],
        updates: Updates,
    ) -> None:
        """Prepare one kernel. ``updates`` holds what earlier kernels wrote, and receives what this one writes."""
        self.time = Axis(-1, form.loop.count)
        super().__init__(form, node, types, config, [*parallel, [self.time]], reduced)
        if self.columns_first:
            raise CannotCode(f"the loop has more than {MAX_GRID_Y} tiles of columns; leave it to the sequential kernel")
        self.scan, self.updates, self.segments = scan, updates, config.segments
        self.tile = _TimeExpressions(self.tile, self)
        self.step = "rows"
        unique = self.parameters.names.unique
        self.segment, self.earlier, self.is_last, self.unsafe, self.flags_pointer = (
            unique(name) for name in ("segment", "earlier", "is_last", "unsafe", "flags_ptr")
        )
        self.flags: Scratch | None = None
        self.read: list[tuple[str, Scratch]] = []
        self.written: list[tuple[str, Scratch]] = []
        self.carried: dict[str, Code] = {}
        """The variable of each state between chunks."""
        self.following: dict[str, Code] = {}
        """The variable of each state after the steps of the chunk."""
        self.outside: set[object] = set()
        """Keys of values that are computed in front of the chunks."""

    # Tile --------------------------------------------------------------------------------------------------------

    def _split_row_axes(self, rows: list[list[Axis]]) -> tuple[list[list[Axis]], list[list[Axis]]]:
        return [group for group in rows if self.time not in group], [[self.time]]

    def _row_variables(self) -> tuple[list[Group], list[Group]]:
        time = Group((self.time,), "rows", rows=True)
        if not self.outer_groups:
            return [time], []
        self.lines.append("outer = tl.program_id(0).to(tl.int64)")
        outer = Group(tuple(axis for group in self.outer_groups for axis in group), "outer")
        return [*split_variable(outer, self.outer_groups, self.parameters.names, 0), time], [outer]

    def _declare_tile(self) -> None:
        if not self.is_map:
            self.named_size(self.n_cols, "n_cols")
        self._declare_columns("tl.program_id(1) * BLOCK + " if self.is_map and self.col_groups else "")

    def time_index(self, position: Position) -> Index:
        """The index of the chunk's steps along a dimension."""
        steps = Index.of(Variable(self.time.id, self.time.size, rows=True))
        return (steps * position.step).plus(position.first)

    def _index(self, item: LoopInput) -> Code:
        return replace(super()._index(item), rows=True)

    # Kernels -----------------------------------------------------------------------------------------------------

    def result_kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel that computes the results."""
        count = self._before_loop()
        first, last = self._declare_segment(count)
        for item in self.scan.recurrences:
            self._declare_carried(item)
        checked = [item for item in self.scan.recurrences if self._is_checked(item)]
        if checked:
            shape = f"[ROWS, {'BLOCK' if self.col_groups else 1}]"
            self.lines.append(f"{self.unsafe} = tl.zeros({shape}, tl.int1)")
        before, self.lines = self._open_chunk()
        for item in self.scan.recurrences:
            self._scan_states(item, checked)
        for i, output in enumerate(self.form.loop.outputs):
            if output.position is not None:
                self._store_row(i, output, output.position)
        for item in self.scan.recurrences:
            self._carry_states(item)
        self._close_chunk(before, first, last, count)
        self._store_last_states()
        if checked:
            self._store_flag()
        return self._kernel(name, docstring)

    def updates_kernel(self, level: int, name: str) -> Kernel:
        """The kernel that writes what each segment does to the states of a level."""
        count = self._before_loop()
        first, last = self._declare_segment(count)
        below = [item for item in self.scan.recurrences if item.level < level]
        ours = [item for item in self.scan.recurrences if item.level == level]
        for item in below:
            self._declare_carried(item)
        total = {item.states: self._declare_update(item) for item in ours}
        before, self.lines = self._open_chunk()
        for item in below:
            self._scan_states(item, [])
        for item in ours:
            self._compose_chunk(item, total[item.states])
        for item in below:
            self._carry_states(item)
        self._close_chunk(before, first, last, count)
        for item in ours:
            buffers = []
            for variable, component in zip(total[item.states], composition_of(item).names, strict=True):
                state = item.states[0]
                scratch = Scratch(f"{state.name}_{component}", self._update_shape(), scan_dtype(item))
                pointer = self.parameters.names.unique(f"{state.name}_{component}_ptr")
                self.written.append((pointer, scratch))
                self.lines.append(
                    f"tl.store({pointer} + {self._update_offset(self.segment, item)}, {variable}{self._lane_mask(item)})"
                )
                buffers.append(scratch)
            self.updates[self._key(item)] = tuple(buffers)
        names = ", ".join(state.name for item in ours for state in item.states)
        return self._kernel(name, f"What the iterations of each segment do to {names}, as one update.")

    def _declare_segment(self, count: str) -> tuple[str, str]:
        """Emit the range of iterations of the program; returns its first and last one, exclusive."""
        if self.segments == 1:
            return "0", count
        begin, end, length = (self.parameters.names.unique(name) for name in ("begin", "end", "length"))
        self.lines += [
            f"{self.segment} = tl.program_id(2)",
            f"{length} = tl.cdiv(tl.cdiv({count}, ROWS), SEGMENTS) * ROWS",
            f"{begin} = {self.segment} * {length}",
            f"{end} = tl.minimum({begin} + {length}, {count})",
        ]
        return begin, end

    def _open_chunk(self) -> tuple[list[str], list[str]]:
        self.outside = set(self.tile.cache)
        lines = ["rows = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)"]
        if self.row_masked:
            n_rows = self.named_size(self.n_rows, "n_rows")
            lines.append(f"row_mask = rows < {n_rows}")
            lines.append(f"{self.is_last} = rows == tl.minimum(start + ROWS, {n_rows}) - 1")
        else:
            lines.append(f"{self.is_last} = rows == start + ROWS - 1")
        before, self.lines = self.lines, lines
        for item in self.form.loop.inputs:
            if item.is_index:
                self._hold(item, self._index(item))
        return before, lines

    def _close_chunk(self, before: list[str], first: str, last: str, count: str) -> None:
        inside, self.lines = self.lines, before
        self.tile.cache = {key: code for key, code in self.tile.cache.items() if key in self.outside}
        self.known.clear()
        stages = f", num_stages={self.config.stages}" if self.config.stages > 1 else ""
        self.lines.append(f"for start in tl.range({first}, {last}, ROWS{stages}):")
        self.lines += [f"    {line}" for line in inside]

    # States ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(item: Recurrence) -> tuple[str, ...]:
        return tuple(state.name for state in item.states)

    def _varies(self, item: Recurrence | LoopInput) -> bool:
        """Whether a state varies along the columns."""
        state = item.states[0] if isinstance(item, Recurrence) else item
        axes = set(self.region.table.all_axes(self._axes_from(state)))
        return any(axes & set(group.axes) for group in self.tile.groups if group.cols)

    def _shape(self, item: Recurrence | LoopInput, rows: str) -> str:
        return f"[{rows}, {'BLOCK' if self._varies(item) else 1}]"

    def _declare_carried(self, item: Recurrence) -> None:
        """Emit the states in front of the program's first iteration."""
        for state in item.states:
            code = self._initial(state)
            self.carried[state.name] = code
            del self.tile.held[self.form.prim(state)]
        if self.segments > 1:
            self._apply_segments(item)

    def _initial(self, item: LoopInput) -> Code:
        code = super()._initial(item)
        if not code.cols:
            # One element, but with the dimensions of the tile.
            assert self.lines[-1].startswith(f"{code.text} = ")
            value = self.lines.pop().partition(" = ")[2]
            if not value.startswith("tl.full([1, 1]"):
                value = f"tl.full([1, 1], {value}, {TRITON_DTYPES[code.dtype]})"
            self.lines.append(f"{code.text} = {value}")
        return code

    def _apply_segments(self, item: Recurrence) -> None:
        """Emit a loop that applies the updates of the segments in front of the program's, in order."""
        names = [self.carried[state.name] for state in item.states]
        dtype = scan_dtype(item)
        lines, loaded = [], []
        for scratch in self.updates.get(self._key(item), ()):
            pointer, variable = (self.parameters.names.unique(f"{scratch.name}{end}") for end in ("_ptr", ""))
            self.read.append((pointer, scratch))
            mask = self._lane_mask(item)
            other = f", other={number_text(0.0, dtype)}" if mask else ""
            lines.append(f"{variable} = tl.load({pointer} + {self._update_offset(self.earlier, item)}{mask}{other})")
            loaded.append(variable)
        if not loaded:
            # The first pass, which only collects accesses.
            return
        texts = self._applied(item, loaded, names)
        lines.append(f"{', '.join(code.text for code in names)} = {', '.join(texts)}")
        self.lines.append(f"for {self.earlier} in range(0, {self.segment}):")
        self.lines += [f"    {line}" for line in lines]

    def _applied(self, item: Recurrence, components: Sequence[str], states: Sequence[Code]) -> list[str]:
        """The states after an update, in their dtype."""
        texts = applied_texts(item, components, [self._as_number(code) for code in states])
        if item.is_wide:
            return [f"({text}).to({TRITON_DTYPES[code.dtype]})" for text, code in zip(texts, states, strict=True)]
        return [self._as_state(text, code.dtype) for text, code in zip(texts, states, strict=True)]

    @staticmethod
    def _as_number(code: Code) -> str:
        return f"{code.text}.to(tl.int32)" if code.dtype == "bool" else code.text

    @staticmethod
    def _as_state(text: str, dtype: str) -> str:
        return f"({text}) != 0" if dtype == "bool" else text

    def _components(self, item: Recurrence) -> list[str]:
        """Emit the coefficients of an update for all steps of the chunk; returns their variables."""
        dtype, values = scan_dtype(item), list(item.coefficients)
        names = composition_of(item).names
        if item.kind is ScanKind.SHIFT:
            values.insert(0, 0.0)
        shape = self._shape(item, "ROWS")
        variables = []
        for name, value in zip(names, values, strict=True):
            code = self._value(value, dtype)
            is_full = code.rows and (code.cols or not self._varies(item))
            if not is_full:
                has_shape = code.rows or code.cols
                text = (
                    f"tl.broadcast_to({code.text}, {shape})"
                    if has_shape
                    else f"tl.full({shape}, {code.text}, {TRITON_DTYPES[dtype]})"
                )
                code = replace(code, text=text)
            if not code.text.isidentifier():
                code = self.tile.assign(code, f"{item.states[0].name}_{name}")
            variables.append(code.text)
        return variables

    def _value(self, value: Value, dtype: str) -> Code:
        """A coefficient as an expression."""
        if isinstance(value, Leaf):
            return self.tile.cast(self.tile.value(value.prim, self.tile.tile_index(value.prim)), dtype)
        if not isinstance(value, Term):
            return Code(number_text(value, dtype), dtype)
        if value.fn == "where":
            condition, *branches = value.args
            operands = [self._value(condition, "bool"), *(self._value(item, dtype) for item in branches)]
        else:
            operands = [self._value(item, dtype) for item in value.args]
        fn = {"logical_or": "bitwise_or", "logical_and": "bitwise_and"}.get(value.fn, value.fn)
        text, precedence = render(fn, operands, {}, dtype)
        return Code(text, dtype, any(o.rows for o in operands), any(o.cols for o in operands), precedence)

    def _composed(self, item: Recurrence) -> list[str]:
        """Emit the scan of a chunk; returns the variables of the composed updates."""
        components, unique = self._components(item), self.parameters.names.unique
        form, state = composition_of(item), item.states[0].name
        names = [unique(f"{state}_{name}") for name in form.names]
        several = len(components) > 1
        operand = f"({', '.join(components)})" if several else components[0]
        self.lines.append(f"{', '.join(names)} = tl.associative_scan({operand}, 0, {form.function})")
        return names

    def _scan_states(self, item: Recurrence, checked: Sequence[Recurrence]) -> None:
        """Emit the states after each step of the chunk, and before it where the body reads them."""
        codes = [self.carried[state.name] for state in item.states]
        composed: list[str] = []
        if item.kind is ScanKind.SHIFT:
            results = [self._components_of_shift(item)]
        else:
            composed = self._composed(item)
            results = self._applied(item, composed, codes)
        following = []
        for state, text, code in zip(item.states, results, codes, strict=True):
            name = text if text.isidentifier() else self._following_name(state)
            if name != text:
                self.lines.append(f"{name} = {text}")
            following.append(Code(name, code.dtype, True, code.cols))
        self.following |= {state.name: code for state, code in zip(item.states, following, strict=True)}
        for state, code in zip(item.states, following, strict=True):
            assert state.next is not None
            prim = self.ir.of(state.next).name
            self.tile.held.setdefault(prim, (self.tile.tile_index(prim), code))
        for state, code in zip(item.states, following, strict=True):
            if state.name in self.scan.previous and self.form.prim(state) not in self.tile.held:
                self._shift(state, code)
        if item in checked:
            self._check(item, [code.text for code in following], composed)

    def _components_of_shift(self, item: Recurrence) -> str:
        (code,) = (self._value(value, scan_dtype(item)) for value in item.coefficients)
        state = item.states[0]
        if not code.rows or code.cols != self._varies(item):
            shape = self._shape(item, "ROWS")
            whole = f"tl.full({shape}, {code.text}, {TRITON_DTYPES[code.dtype]})"
            code = replace(code, text=f"tl.broadcast_to({code.text}, {shape})" if code.rows or code.cols else whole)
        return self._as_state(code.text, compute_dtype(state.type.dtype))

    def _following_name(self, state: LoopInput) -> str:
        assert state.next is not None
        node = self.ir.graph.named.get(state.next.name)
        return self.parameters.names.unique((node.variable if node is not None else "") or state.name)

    def _shift(self, state: LoopInput, code: Code) -> None:
        """Emit the state before each step: that after the step before, or the carried one."""
        name, carried = self.parameters.names.unique(f"{state.name}_before"), self.carried[state.name].text
        row = "tl.arange(0, ROWS)[:, None]"
        at = f"tl.broadcast_to(tl.maximum({row} - 1, 0), {self._shape(state, 'ROWS')})"
        value = self._as_number(code)
        shifted = self._as_state(f"tl.gather({value}, {at}, 0)", code.dtype)
        self.lines.append(f"{name} = tl.where({row} == 0, {carried}, {shifted})")
        self._hold(state, Code(name, code.dtype, True, code.cols))

    def _carry_states(self, item: Recurrence) -> None:
        """Emit the states after the last step of the chunk."""
        for state in item.states:
            code = self.following[state.name]
            carried = self.carried[state.name].text
            self.lines.append(f"{carried} = {self._last_row(code)}")

    def _last_row(self, code: Code) -> str:
        """The last row of a tile that is an iteration."""
        return self._as_state(f"_row_of({self._as_number(code)}, {self.is_last})", code.dtype)

    def _declare_update(self, item: Recurrence) -> list[str]:
        """Emit an update that changes nothing; returns the variables of its components."""
        dtype, names = scan_dtype(item), composition_of(item).names
        variables = [self.parameters.names.unique(f"{item.states[0].name}_{name}") for name in names]
        shape = self._shape(item, "1")
        for variable, text in zip(variables, neutral_texts(item), strict=True):
            self.lines.append(f"{variable} = tl.full({shape}, {text}, {TRITON_DTYPES[dtype]})")
        return variables

    def _compose_chunk(self, item: Recurrence, total: Sequence[str]) -> None:
        """Emit the composition of the segment's update so far with that of the chunk."""
        code = Code("", scan_dtype(item), True, self._varies(item))
        parts = self._components(item) if item.kind is ScanKind.SHIFT else self._composed(item)
        last = [self._last_row(replace(code, text=name)) for name in parts]
        names = [self.parameters.names.unique(f"chunk_{name}") for name in composition_of(item).names]
        self.lines += [f"{name} = {text}" for name, text in zip(names, last, strict=True)]
        self.lines.append(f"{', '.join(total)} = {composed_texts(item, total, names)}")

    # Non-finite values -------------------------------------------------------------------------------------------

    @staticmethod
    def _is_checked(item: Recurrence) -> bool:
        return composition_of(item).may_overflow and is_float(item.states[0].type.dtype)

    def _check(self, item: Recurrence, states: Sequence[str], composed: Sequence[str]) -> None:
        """Emit the check of a chunk: a coefficient that is not finite leaves no finite state, except in a maximum."""
        extremes = (ScanKind.MAX_PLUS, ScanKind.MIN_PLUS)
        texts = composed[:1] if item.kind in extremes else states
        masks = [mask.text for mask in self.masks if mask.rows or (mask.cols and self.col_groups)]
        for text in texts:
            terms = [f'~(tl.abs({text}) < float("inf"))', *masks]
            self.lines.append(f"{self.unsafe} = {self.unsafe} | ({' & '.join(terms)})")

    def _store_flag(self) -> None:
        """Emit the store of whether the program met a state that is not finite."""
        blocks = Size.of(1)
        if self.is_map and self.col_groups:
            blocks = Size.parse(f"({self.n_cols} + {self.block - 1}) // {self.block}")
        self.flags = Scratch("flags", (self.n_outer, blocks, Size.of(self.segments)), "int32")
        self.written.append((self.flags_pointer, self.flags))
        outer = "outer * tl.num_programs(1) + " if self.outer_groups else ""
        at = f"{outer}tl.program_id(1)"
        if self.segments > 1:
            at = f"({at}) * SEGMENTS + {self.segment}"
        self.lines.append(f"tl.store({self.flags_pointer} + {at}, tl.max({self.unsafe}.to(tl.int32)))")

    # Memory ------------------------------------------------------------------------------------------------------

    def _update_shape(self) -> tuple[Size, ...]:
        return (self.n_outer, Size.of(self.segments), self.n_cols)

    def _update_offset(self, segment: str, item: Recurrence) -> str:
        """Offset of a segment's update."""
        row = f"(outer * SEGMENTS + {segment})" if self.outer_groups else f"tl.cast({segment}, tl.int64)"
        lane = "cols" if self._varies(item) else "tl.arange(0, 1)[:, None]"
        return f"{row} * {self.named_size(self.n_cols, 'n_cols')} + {lane}" if self.col_groups else f"{row} + {lane}"

    def _lane_mask(self, item: Recurrence) -> str:
        return ", mask=col_mask" if self.col_masked and self._varies(item) else ""

    def _store_row(self, number: int, output: LoopOutput, position: Position) -> None:
        """Store the rows of all steps of the chunk."""
        kind = self.node.outputs[number]
        prim = self.ir.prims[self.ir.of(output.value).name]
        at, rest = self.tile.tile_index(prim.name), position.dim + (len(prim.shape) == len(kind.shape))
        code = self.tile.value(prim.name, at)
        offset = self.tile.offset(kind, (*at[: position.dim], self.time_index(position), *at[rest:]))
        address = self.tile.address(self._pointer(number), offset)
        self.lines.append(f"tl.store({address}, {code.text}{self.tile.mask_argument(offset, None)})")

    def _store_last_states(self) -> None:
        """Store the states after the last iteration, which the last segment has."""
        stores, before = [], self.lines
        for i, output in enumerate(self.form.loop.outputs):
            if output.position is None:
                self.lines = []
                self._store_last(i, output, self.carried)
                stores += self.lines
        self.lines = before
        if stores and self.segments > 1:
            stores = [f"if {self.segment} == SEGMENTS - 1:", *(f"    {line}" for line in stores)]
        self.lines += stores

    def _store_value(self, pointer: str, prim: str, kind: TensorType, value: Code | None) -> None:
        at = self.tile.tile_index(prim)
        code = value if value is not None else self.tile.value(prim, at)
        offset = self.tile.offset(kind, at)
        if not offset.cols:
            offset = Code(f"{offset.text} + tl.arange(0, 1)[:, None]", offset.dtype)
        mask = self.tile.mask_argument(offset, None)
        self.lines.append(f"tl.store({self.tile.address(pointer, offset)}, {code.text}{mask})")

    def _kernel(self, name: str, docstring: str) -> Kernel:
        constexprs: dict[str, int | bool | str] = {"ROWS": self.rows_per_program}
        dynamic: dict[str, str] = {}
        limits: tuple[str, ...] = ()
        blocks = "1"
        if self.is_map and self.col_groups:
            constexprs["BLOCK"], blocks = self.block, blocks_text("n_cols", self.block)
            limits = () if self.n_cols.is_constant else (f"{self.n_cols} <= {MAX_GRID_Y * self.block}",)
        elif self.n_cols.is_constant:
            constexprs["BLOCK"] = self._static_block()
        else:
            dynamic["BLOCK"] = next_power_of_2_text("n_cols")
            limits = (f"{self.n_cols} <= {MOST_ELEMENTS // self.rows_per_program}",)
        if not self.col_groups:
            constexprs.pop("BLOCK", None)
        grid = ["n_outer" if self.outer_groups else "1", blocks]
        if self.segments > 1:
            constexprs["SEGMENTS"] = self.segments
            grid.append(str(self.segments))
        return assemble(
            name,
            self.parameters,
            constexprs,
            docstring,
            self.lines,
            grid=tuple(grid),
            grid_sizes={"n_cols": self.n_cols, "n_outer": self.n_outer},
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            dynamic=dynamic,
            limits=limits,
            scratch_written=tuple(self.written),
            scratch_read=tuple(self.read),
        )
