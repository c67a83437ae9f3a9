"""The tiles of a chunk of iterations: keys and queries, values, and states.

All have two dimensions. A tile of keys has one row per iteration and one column per channel of the key, a tile of values one
column per channel of the value. A state has a row per channel of the key and a column per channel of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.axis_groups import Group, Mask, split_variable
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.formulas import render
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import COMPARE, TRITON_DTYPES, Code, literal
from mtmc_lsp.codegen.loop.iterations import axes_from, index_code, row_buffers
from mtmc_lsp.codegen.tile.tile_kernel import steps_far
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.loop import LoopInput, Position
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.chunks import ChunkForm
from mtmc_lsp.ir.loops.coefficients import Leaf, Term, Value
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.scan import PASSED_THROUGH
from mtmc_lsp.ir.primitives import Prim, PrimOp
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import key_block


class Side(Expressions):
    """Evaluates the body on one kind of tile; values without its columns are those of ``steps``."""

    def __init__(
        self, tiles: ChunkTiles, columns: Sequence[Group], masks: Sequence[Mask], steps: Side | None = None
    ) -> None:
        super().__init__(
            tiles.form.ir,
            tiles.form.region,
            tiles.parameters,
            [*tiles.outer, tiles.rows, *columns],
            [tiles.flat],
            masks,
            tiles.emit,
            tiles.total,
        )
        self.tiles, self.steps = tiles, steps
        self.columns = {axis for group in columns for axis in group.axes}
        if steps is not None:
            self.declared = steps.declared

    def value(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a primitive. Those that vary along rows alone are computed once for all tiles."""
        if self.steps is not None and not set(self.region.table.all_axes(name)) & self.columns:
            return self.steps.value(name, at)
        return super().value(name, at)

    def _group_term(self, group: Group, coefficients: dict[Axis, Size]) -> Code:
        if group.derived_from and group.name not in self.declared:
            self.declared.add(group.name)
            self.tiles.before.append(f"{group.name} = {self._derived_value(group)}")
        return super()._group_term(group, coefficients)

    def _load(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        position = self.tiles.positions.get(prim.name)
        if position is not None:
            at = (*at[: position.dim], self.tiles.time_index(position), *at[position.dim + 1 :])
        return super()._load(prim, at)


class ChunkTiles:
    """Index vectors, masks and values of a kernel that computes chunks of iterations by products."""

    def __init__(
        self, form: LoopForm, chunk: ChunkForm, types: Sequence[TensorType], config: LoopConfig, wide: frozenset[Axis]
    ) -> None:
        """Prepare the tiles.

        Args:
            types: of the node's arguments in memory.
            wide: axes of columns whose indices need 64 bits.
        """
        self.form, self.chunk, self.config, self.ir, self.region = form, chunk, config, form.ir, form.region
        self.parameters = Parameters(form.ir, row_buffers(form, types))
        self.before: list[str] = []
        """Statements in front of all others: index vectors and masks."""
        self.lines: list[str] = []
        self.positions = {
            form.prim(item): item.position
            for item in form.loop.inputs
            if item.position is not None and item.argument is not None
        }
        self.time = Axis(-1, form.loop.count)
        self.rows = Group((self.time,), "rows", rows=True)
        self.keys = key_block(form)
        batch = [[axis] for axis in form.region.parallel_axes if axis != chunk.values]
        self.n_outer = product([axis.size for group in batch for axis in group])
        self.flat = Group(tuple(axis for group in batch for axis in group), "outer")
        if batch:
            self.before.append("outer = tl.program_id(0).to(tl.int64)")
        self.outer = split_variable(self.flat, batch, self.parameters.names, 0) if batch else []
        row = Mask("row_mask", True, False)
        self.key_mask = self._declare("keys", chunk.keys, "KEYS", wide)
        self.value_mask = self._declare("cols", chunk.values, "BLOCK", wide)
        keys, values = (
            Group((axis,), name, cols=True) for axis, name in ((chunk.keys, "keys"), (chunk.values, "cols"))
        )
        key_masks = [Mask(self.key_mask, False, True)] if self.key_mask else []
        value_masks = [Mask(self.value_mask, False, True)] if self.value_mask else []
        self.step = Side(self, [], [row])
        self.key = Side(self, [keys], [row, *key_masks], self.step)
        self.value = Side(self, [values], [row, *value_masks], self.step)
        rows = Group((chunk.keys,), "state_keys", rows=True)
        state_masks = [Mask("state_mask", True, False)] if self.key_mask else []
        self.state = Side(self, [rows, values], [*state_masks, *value_masks])
        self.state.declared = self.step.declared

    def emit(self, text: str, cols: bool) -> None:
        """Emit a statement."""
        self.lines.append(text)

    def _declare(self, name: str, axis: Axis, block: str, wide: frozenset[Axis]) -> str:
        """Emit an index vector; returns its mask, empty if it needs none."""
        mask, width = ("key_mask", self.keys) if block == "KEYS" else ("col_mask", self.config.block)
        text = f"tl.arange(0, {block})[None, :]"
        text = text if block == "KEYS" else f"tl.program_id(1) * {block} + {text}"
        self.before.append(f"{name} = ({text}).to(tl.int64)" if axis in wide else f"{name} = {text}")
        if axis.size.terms and all(coefficient % width == 0 for _, coefficient in axis.size.terms):
            return ""
        self.parameters.name_size(axis.size, "n_keys" if block == "KEYS" else "n_values")
        self.before.append(f"{mask} = {name} < {self.parameters.size(axis.size).at(COMPARE + 1)}")
        return mask

    def declare_state_rows(self) -> None:
        """Emit the rows of a state, for states that are loaded or stored."""
        self.before.append("state_keys = tl.trans(keys)")
        if self.key_mask:
            self.before.append(f"state_mask = tl.trans({self.key_mask})")

    def far_axes(self) -> frozenset[Axis]:
        """The axes of columns along which some offset may exceed 32 bits."""
        accesses = [*self.key.accesses, *self.value.accesses, *self.state.accesses]
        axes = (self.chunk.keys, self.chunk.values)
        return frozenset(axis for axis in axes if any(steps_far([[axis]], access) for access in accesses))

    def time_index(self, position: Position) -> Index:
        """The index of the chunk's iterations along a dimension."""
        steps = Index.of(Variable(self.time.id, self.time.size, rows=True))
        return (steps * position.step).plus(position.first)

    def hold_index(self, item: LoopInput) -> None:
        """Set the number of the iteration as the body sees it."""
        assert item.position is not None
        code = replace(index_code(self.parameters, "rows", item.position), rows=True)
        prim = self.form.prim(item)
        self.step.held[prim] = (self.step.tile_index(prim), code)

    # Values ---------------------------------------------------------------------------------------------------------

    def side_of(self, prim: str) -> Side:
        """The tile on which a primitive is evaluated."""
        axes = set(self.region.table.all_axes(prim))
        if {self.chunk.keys, self.chunk.values} <= axes:
            raise CannotCode("an iteration writes or reads each element of an outer product")
        return self.key if self.chunk.keys in axes else self.value if self.chunk.values in axes else self.step

    def stripped(self, name: str) -> Prim:
        """The primitive that a view shows."""
        prim = self.ir.prims[name]
        while prim.op in PASSED_THROUGH and prim.name not in self.region.inputs:
            prim = self.ir.prims[prim.inputs[0]]
        return prim

    def leaf(self, name: str) -> Code:
        """The value of a primitive, without views of it."""
        prim = self.stripped(name)
        side = self.side_of(prim.name)
        return side.value(prim.name, side.tile_index(prim.name))

    def of(self, value: Value, dtype: str = "float32") -> Code:
        """A coefficient as an expression."""
        if isinstance(value, Leaf):
            return self.step.cast(self.leaf(value.prim), dtype)
        if not isinstance(value, Term):
            return Code(literal(float(value)), dtype)
        conditions = {"where": 1, "logical_or": 2, "logical_and": 2}.get(value.fn, 0)
        operands = [self.of(item, "bool" if i < conditions else dtype) for i, item in enumerate(value.args)]
        fn = {"logical_or": "bitwise_or", "logical_and": "bitwise_and"}.get(value.fn, value.fn)
        text, precedence = render(fn, operands, {}, dtype)
        return Code(text, dtype, any(o.rows for o in operands), any(o.cols for o in operands), precedence)

    def is_loaded(self, value: Value) -> bool:
        """Whether a coefficient is a tensor in memory, which is zero outside of the chunk."""
        return isinstance(value, Leaf) and self.stripped(value.prim).name in self.region.inputs

    def total(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        """A sum over the channels of the key that reads no state."""
        if prim.op is not PrimOp.REDUCE:
            raise CannotCode(f"{prim.origin}: {prim.op.value} is not supported in chunks of iterations")
        code = self.key.cast(self.leaf(prim.inputs[0]), prim.dtype)
        mask = f"tl.where({self.key_mask}, {code.text}, 0.0)" if self.key_mask else code.text
        return Code(f"tl.sum({mask}, axis=1, keep_dims=True)", code.dtype, True)

    # States ---------------------------------------------------------------------------------------------------------

    def initial(self, item: LoopInput, has_values: bool) -> str:
        """The state before the first iteration: a tile of keys and values, or one row of keys."""
        shape = "[KEYS, BLOCK]" if has_values else "[1, KEYS]"
        if item.initial is not None:
            return f"tl.full({shape}, {literal(float(item.initial))}, tl.float32)"
        prim = self.ir.prims[self.form.prim(item)]
        side = self.state if has_values else self.key
        code = side.cast(side.value(prim.name, side.tile_index(axes_from(self.form, item))), "float32")
        is_whole = code.rows and code.cols if has_values else code.cols
        if is_whole:
            return code.text
        if code.rows or code.cols:
            return f"tl.broadcast_to({code.text}, {shape})"
        return f"tl.full({shape}, {code.text}, {TRITON_DTYPES['float32']})"
