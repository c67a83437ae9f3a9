"""Kernels over a tile of rows and columns: elementwise maps, reductions along the columns, and scans.

``rows`` are independent; ``columns`` are what is reduced (or, for a map, the axis that lies densest in memory). A reduction
either holds a whole row of columns at once, or loops over blocks of columns, once per level of reductions that need each
other's results and once more to write what still varies along the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.macro.axes import Axis
from mtmc_lsp.macro.configs import MOST_ELEMENTS, next_power_of_two
from mtmc_lsp.macro.prims import Prim, PrimOp, Program
from mtmc_lsp.macro.regions import Region, RegionKind
from mtmc_lsp.micro.builtin.code import TRITON_DTYPES, Code
from mtmc_lsp.micro.builtin.expressions import Expressions, Group, Mask, Parameters, taken_apart
from mtmc_lsp.micro.builtin.index import Index
from mtmc_lsp.micro.builtin.kernel import Kernel, assemble
from mtmc_lsp.micro.builtin.persistence import one_group_after_another

Config = Mapping[str, "int | str | bool"]
MOST_PROGRAMS = 65535
"""Size of a grid's second dimension."""

SCANS = {
    "sum": ("0.0", "tl.cumsum({value}, axis={axis})", "{} + {}", "tl.sum({value}, axis={axis}, keep_dims=True)"),
    "prod": (
        "1.0",
        "tl.cumprod({value}, axis={axis})",
        "{} * {}",
        "tl.reduce({value}, {axis}, _multiply, keep_dims=True)",
    ),
    "log_sum_exp": (
        '-float("inf")',
        "tl.associative_scan({value}, {axis}, _log_add_exp)",
        "_log_add_exp({}, {})",
        "tl.reduce({value}, {axis}, _log_add_exp, keep_dims=True)",
    ),
}
"""For each scan: what changes nothing, the scan of a block, how two results are joined, and a block's total."""

LOWEST = "-3.4028234663852886e38"
"""Start of a running maximum of float32: finite, so the difference to an infinite value stays defined."""


def write_tile_kernel(
    program: Program,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: Config,
    name: str,
    docstring: str,
) -> Kernel:
    """Render a map, reduce or scan region.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    # A first pass with every axis apart shows which neighbouring axes all accesses walk as one.
    apart = [[axis] for axis in region.kept], [[axis] for axis in region.reduced]
    probe = TileWriter(program, region, buffers, config, *apart)
    probe.write()
    kept = merge_axes(region.kept, probe.accesses)
    reduced = merge_axes(region.reduced, probe.accesses)
    columns = kept[-1:] if region.kind is RegionKind.MAP else reduced
    writer = TileWriter(program, region, buffers, config, kept, reduced)
    writer.wide_columns = any(_steps_far(columns, access) for access in probe.accesses)
    body = writer.write()
    if config.get("persist"):
        body = one_group_after_another(body, writer.pieces())
    return writer.finish(name, docstring, body)


def _steps_far(columns: Sequence[Sequence[Axis]], access: Index) -> bool:
    """Whether an access may go beyond 32 bits along the columns: it does not walk them densely, and no size bounds it."""
    axes = [axis for group in columns for axis in group]
    steps = {variable.id: coefficient for variable, coefficient in access.terms if not variable.code}
    reach, below, dense = Size.of(0), Size.of(1), True
    for axis in reversed(axes):
        step = steps.get(axis.id, Size.of(0))
        dense = dense and (step == below or not step.terms)
        reach = reach + step * (axis.size - 1)
        below = below * axis.size
    return not dense and not (reach.is_constant and reach.constant < 2**31)


def merge_axes(axes: Sequence[Axis], accesses: Sequence[Index]) -> list[list[Axis]]:
    """Join each axis to its outer neighbour where every access steps over it as over one dense axis."""
    groups: list[list[Axis]] = []
    for axis in axes:
        if groups and all(_dense(groups[-1][-1], axis, access) for access in accesses):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def _dense(outer: Axis, inner: Axis, access: Index) -> bool:
    steps = {variable.id: coefficient for variable, coefficient in access.terms if not variable.code}
    zero = Size.of(0)
    return steps.get(outer.id, zero) == steps.get(inner.id, zero) * inner.size


class TileWriter:
    """Writes the body of one kernel over tiles of rows and columns."""

    def __init__(
        self,
        program: Program,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: Config,
        kept: list[list[Axis]],
        reduced: list[list[Axis]],
    ) -> None:
        self.program = program
        self.region = region
        self.config = config
        self.is_map = region.kind is RegionKind.MAP
        self.wide_columns = False
        """Whether column indices must be 64-bit."""
        if self.is_map:
            kept, reduced = kept[:-1], kept[-1:]
        self.n_rows = product([axis.size for group in kept for axis in group])
        self.n_cols = product([axis.size for group in reduced for axis in group])
        self.has_rows = bool(kept)
        self.columns_first = self.is_map and self.has_rows and bool(reduced) and config.get("order") == "columns"
        self.rows_per_program = int(config.get("rows", 1)) if self.has_rows else 1
        self.block = int(config.get("block", 1024))
        if self.is_map and not self.has_rows:
            # All axes run as one, so the tile's rows and columns do too.
            self.block *= int(config.get("rows", 1))
        self.loop = bool(config.get("loop", False)) and not self.is_map and bool(reduced)
        self.loop = self.loop or region.kind is RegionKind.SCAN
        self.parameters = Parameters(program, buffers)
        self.lines: list[str] = []
        self.body: list[str] | None = None
        self.known: dict[str, Code] = {}
        self.extremes: dict[str, str] = {}
        """The variable that holds the value that an arg-reduction found."""
        self.axis = 1 if self.rows_per_program > 1 else 0
        self.row_groups, self.col_groups = kept, reduced
        self.row_masked = self.rows_per_program > 1 and not _divides(self.rows_per_program, self.n_rows)
        self.col_masked = self._columns_need_mask()
        self.masks = [Mask("row_mask", True, False)] * self.row_masked + [
            Mask("col_mask", False, True)
        ] * self.col_masked
        groups, flat = self._row_variables()
        column_groups, flat_columns = self._column_variables()
        self.tile = Expressions(
            program,
            region,
            self.parameters,
            [*groups, *column_groups],
            [*flat, *flat_columns],
            self.masks,
            self._emit,
            self._provide,
        )

    @property
    def accesses(self) -> list[Index]:
        return self.tile.accesses

    # Structure ---------------------------------------------------------------------------------------------------

    def _columns_need_mask(self) -> bool:
        if not self.n_cols.is_constant and not (self.loop or self.is_map):
            return True
        return not _divides(self._static_block(), self.n_cols)

    @property
    def _fits_in_32_bits(self) -> bool:
        return self.n_cols.value(self.program.graph.sizes) < 2**31

    def _static_block(self) -> int:
        """Columns of a tile: all of them, rounded up to a power of two, where nothing loops."""
        if self.loop or self.is_map:
            return self.block
        return next_power_of_two(self.n_cols.constant) if self.n_cols.is_constant else self.block

    def _emit(self, text: str, cols: bool) -> None:
        (self.body if cols and self.body is not None else self.lines).append(text)

    def _row_variables(self) -> tuple[list[Group], list[Group]]:
        """Set the row index (or vector of them); gives the variables taken out of it, and itself."""
        if not self.has_rows:
            return [], []
        vector = self.rows_per_program > 1
        name = "rows" if vector else "row"
        text = f"tl.program_id({1 if self.columns_first else 0}).to(tl.int64)"
        self.lines.append(f"{name} = {text} * ROWS + tl.arange(0, ROWS)[:, None]" if vector else f"{name} = {text}")
        if self.row_masked:
            self.lines.append(f"row_mask = {name} < {self.named_size(self.n_rows, 'n_rows')}")
        whole = Group(tuple(axis for group in self.row_groups for axis in group), name, rows=vector)
        return taken_apart(whole, self.row_groups, self.parameters.names, 0), [whole]

    def _column_variables(self) -> tuple[list[Group], list[Group]]:
        """The variables taken out of the column vector, and itself; :meth:`_declare_columns` sets it."""
        if not self.col_groups:
            return [], []
        whole = Group(tuple(axis for group in self.col_groups for axis in group), "cols", cols=True)
        return taken_apart(whole, self.col_groups, self.parameters.names, len(self.row_groups)), [whole]

    def _declare_columns(self, start: str) -> None:
        wide = "[None, :]" if self.rows_per_program > 1 else ""
        if not self.col_groups:
            return
        text = f"{start}tl.arange(0, BLOCK){wide}"
        self._emit(f"cols = ({text}).to(tl.int64)" if self.wide_columns else f"cols = {text}", True)
        if self.col_masked:
            self._emit(f"col_mask = cols < {self.named_size(self.n_cols, 'n_cols')}", True)

    def pieces(self) -> str:
        """How many pieces of work there are for programs to do one after another.

        Raises:
            CannotCode: there is but one.
        """
        if self.has_rows:
            n_rows = self.named_size(self.n_rows, "n_rows")
            return f"tl.cdiv({n_rows}, ROWS)" if self.rows_per_program > 1 else n_rows
        if self.is_map and self.col_groups:
            return f"tl.cdiv({self.named_size(self.n_cols, 'n_cols')}, BLOCK)"
        raise CannotCode("one program does all of it already")

    def named_size(self, size: Size, name: str) -> str:
        """A size by a name of its own."""
        self.parameters.name_size(size, name)
        return self.parameters.size(size).text

    # Writing -----------------------------------------------------------------------------------------------------

    def write(self) -> list[str]:
        """The body's lines."""
        if self.is_map:
            offset = ""
            if self.col_groups:
                wide = "" if self.has_rows and self._fits_in_32_bits else ".to(tl.int64)"
                offset = f"tl.program_id({0 if self.columns_first or not self.has_rows else 1}){wide} * BLOCK + "
            if self._draws():
                self.lines.append(f"first = {offset.removesuffix(' + ')}")
                offset = "first + "
                self.tile.first_column = "first" if self.rows_per_program == 1 and self.block >= 4 else None
                self.tile.row_length = self.n_cols
            self._declare_columns(offset)
            self._store_all(self.region.outputs)
            return self.lines
        self.named_size(self.n_cols, "n_cols")
        if not self.loop:
            self._declare_columns("")
            self._store_all(self.region.outputs)
            return self.lines
        if self.region.kind is RegionKind.SCAN:
            self._write_scan()
        else:
            self._write_loops()
        return self.lines

    def _draws(self) -> bool:
        """Whether random numbers are drawn for the columns."""
        return bool(self.col_groups) and any(self.program.prims[p].op is PrimOp.RANDOM for p in self.region.prims)

    def _store_all(self, outputs: Sequence[Ref]) -> None:
        for ref in outputs:
            self._store(ref)

    def _store(self, ref: Ref) -> None:
        prim = self.program.of(ref)
        at = self.tile.own_index(prim.name)
        value = self.tile.value(prim.name, at)
        pointer = self.parameters.output(ref)
        offset = self.tile.offset(self.program.graph.type_of(ref), at)
        mask = self.tile.mask_argument(offset, None)
        self._emit(f"tl.store({Expressions.address(pointer, offset)}, {value.text}{mask})", offset.cols)

    def _open_loop(self) -> None:
        self.body = []
        self._declare_columns("start + ")

    def _close_loop(self, *, backwards: bool = False) -> None:
        assert self.body is not None
        bound = self.named_size(self.n_cols, "n_cols")
        if backwards:
            self.lines.append("# Backwards, so that what was read last is still in the cache.")
            self.lines.append(f"for back in range(0, {bound}, BLOCK):")
            self.lines.append(f"    start = (tl.cdiv({bound}, BLOCK) - 1) * BLOCK - back")
        else:
            self.lines.append(f"for start in {self._column_range(bound)}:")
        self.lines += [f"    {line}" for line in self.body]
        self.body = None
        self.tile.cache = {key: code for key, code in self.tile.cache.items() if not code.cols}
        self.tile.declared -= {group.name for group in self.tile.groups if group.cols}

    def _column_range(self, bound: str) -> str:
        """Where the blocks of columns start."""
        return f"range(0, {bound}, BLOCK)"

    def _reduce_in_loop(self, wanted: Sequence[Prim], eviction: str = "") -> None:
        """One loop over the columns for reductions that do not need each other."""
        self._open_loop()
        self.tile.eviction = eviction
        paired = {prim.inputs[1] for prim in wanted if prim.fn == "sum_exp"}
        accumulators = [self._accumulate(prim) for prim in wanted if prim.name not in paired]
        self._close_loop()
        for prim, names in accumulators:
            self._finish_reduction(prim, names)

    def _write_loops(self) -> None:
        levels = self.levels()
        full = [ref for ref in self.region.outputs if self._varies_along_columns(ref)]
        several = len(set(levels.values())) + bool(full) > 1
        for level in sorted(set(levels.values())):
            wanted = [self.program.prims[name] for name, own in levels.items() if own == level]
            self._reduce_in_loop(wanted, "evict_last" if several else "")
        if full:
            self._open_loop()
            self.tile.eviction = "evict_first" if several else ""
            self._store_all(full)
            self._close_loop(backwards=several)
        self.tile.eviction = ""
        self._store_all([ref for ref in self.region.outputs if ref not in full])

    def _varies_along_columns(self, ref: Ref) -> bool:
        return bool(set(self.region.table.all_axes(self.program.of(ref).name)) & set(self.region.reduced))

    def levels(self) -> dict[str, int]:
        """Reductions by how many loops must come before theirs."""
        level: dict[str, int] = {}
        own: dict[str, int] = {}
        for name in self.region.prims:
            prim = self.program.prims[name]
            below = max((level.get(source, 0) for source in prim.inputs), default=0)
            if prim.op is PrimOp.REDUCE:
                # A sum of exponentials runs in the loop of its maximum (online softmax).
                own[name] = level.get(prim.inputs[0], 0) + 1 if prim.fn == "sum_exp" else below + 1
                level[name] = own[name]
            else:
                level[name] = below
        return own

    # Reductions --------------------------------------------------------------------------------------------------

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.op is not PrimOp.REDUCE and prim.op is not PrimOp.SCAN:
            raise CannotCode(f"{prim.op.value} inside an elementwise kernel")
        own = self.tile.own_index(prim.name)
        if any(a != b for a, b in zip(at, own, strict=True)):
            raise CannotCode("a reduction's result is read at another place than its own")
        if prim.name not in self.known:
            if self.loop:
                raise CannotCode("a reduction is read before its loop has ended")
            self._reduce_now(prim)
        return self.known[prim.name]

    def _operand(self, prim: Prim, neutral: str) -> str:
        """The reduced value over the whole tile, with ``neutral`` where the tile sticks out."""
        source = prim.inputs[0]
        code = self.tile.value(source, self.tile.own_index(source))
        if prim.fn in ("any", "all"):
            code = Code(f"{code.at(100)}.to(tl.int32)", "int32", code.rows, code.cols)
        elif not prim.fn.startswith("arg"):
            code = self.tile.cast(code, prim.dtype)
        text = self._spread(code)
        if self.col_masked and not (neutral == "0.0" and self._zero_outside(source)):
            text = f"tl.where(col_mask, {text}, {neutral})"
        return text

    def _spread(self, code: Code) -> str:
        """The value over the whole tile."""
        if code.cols and (code.rows or self.rows_per_program == 1):
            return code.text
        shape = "[ROWS, BLOCK]" if self.rows_per_program > 1 else "[BLOCK]"
        if code.cols or code.rows:
            return f"tl.broadcast_to({code.text}, {shape})"
        return f"tl.full({shape}, {code.text}, {TRITON_DTYPES[code.dtype]})"

    def _zero_outside(self, name: str) -> bool:
        """Whether the value is certainly 0 in columns beyond the last: what was loaded there is 0."""
        prim = self.program.prims[name]
        axes = set(self.region.table.all_axes(name))
        if name in self.region.inputs:
            return bool(axes & set(self.region.reduced))
        if prim.op in (PrimOp.RESHAPE, PrimOp.PERMUTE):
            return self._zero_outside(prim.inputs[0])
        if prim.op is PrimOp.POINTWISE and prim.fn in ("cast", "square", "abs", "neg", "relu", "mul", "add", "sub"):
            return all(self._zero_outside(source) for source in prim.inputs)
        return False

    def _neutral(self, prim: Prim) -> str:
        floating = is_float(self.program.prims[prim.inputs[0]].dtype)
        if prim.fn in ("sum", "sum_exp", "any"):
            return "0.0" if is_float(prim.dtype) else "0"
        if prim.fn in ("prod", "all"):
            return "1.0" if is_float(prim.dtype) else "1"
        if prim.fn in ("max", "argmax"):
            return '-float("inf")' if floating else str(-(2**63) if self._wide(prim) else -(2**31))
        return 'float("inf")' if floating else str(2**63 - 1 if self._wide(prim) else 2**31 - 1)

    def _wide(self, prim: Prim) -> bool:
        return self.program.prims[prim.inputs[0]].dtype == "int64"

    def _result_name(self, prim: Prim) -> str:
        source = self.program.prims[prim.inputs[0]]
        base = next((n.variable for n in self.program.graph.nodes if n.name == source.origin and n.variable), "")
        word = {"sum_exp": "total", "sum": "sum", "max": "max", "min": "min"}.get(prim.fn, prim.fn)
        return self.parameters.names.unique(f"{base}_{word}" if base and prim.fn != "sum_exp" else f"row_{word}")

    def _set(self, prim: Prim, text: str, dtype: str) -> None:
        name = self._result_name(prim)
        self._emit(f"{name} = {text}", False)
        self.known[prim.name] = Code(name, dtype, rows=self.rows_per_program > 1)

    def _across(self, call: str, value: str, extra: str = "") -> str:
        keep = ", keep_dims=True" if self.rows_per_program > 1 else ""
        return f"{call}({value}, axis={self.axis}{extra}{keep})"

    def _collapse(self, prim: Prim, value: str) -> str:
        """Reduce a tile along its columns."""
        fn = prim.fn
        if fn in ("sum", "sum_exp"):
            return self._across("tl.sum", value)
        if fn in ("any", "all"):
            return self._across("tl.max" if fn == "any" else "tl.min", value) + " != 0"
        if fn in ("argmax", "argmin"):
            return self._across(f"tl.{fn}", value)
        keep = ", keep_dims=True" if self.rows_per_program > 1 else ""
        if fn == "prod":
            return f"tl.reduce({value}, {self.axis}, _multiply{keep})"
        if is_float(prim.dtype) and not self._only_for_softmax(prim):
            return f"tl.reduce({value}, {self.axis}, _{fn}_nan{keep})"
        return self._across(f"tl.{fn}", value)

    def _only_for_softmax(self, prim: Prim) -> bool:
        """Whether a maximum only shifts exponentials, where a NaN shows up in the sum anyway."""
        return any(
            self.program.prims[name].fn == "sum_exp" and prim.name in self.program.prims[name].inputs
            for name in self.region.prims
        )

    def _reduce_now(self, prim: Prim) -> None:
        if prim.fn == "sum_exp":
            top = self._provide(self.program.prims[prim.inputs[1]], self.tile.own_index(prim.inputs[1]))
            source = prim.inputs[0]
            value = self.tile.value(source, self.tile.own_index(source))
            text = self._spread(Code(f"tl.exp({value.at(60)} - {top.text})", prim.dtype, value.rows, value.cols))
            text = f"tl.where(col_mask, {text}, 0.0)" if self.col_masked else text
            self._set(prim, self._across("tl.sum", text), prim.dtype)
            return
        value_text = self._operand(prim, self._neutral(prim))
        result = self._collapse(prim, value_text)
        dtype = compute_dtype(prim.dtype)
        if prim.fn.startswith("arg"):
            result += ".to(tl.int64)"
        self._set(prim, result, dtype)

    def _accumulate(self, prim: Prim) -> tuple[Prim, tuple[str, ...]]:
        """Statements that add one block of columns to running values, one per lane; returns their names."""
        names = self.parameters.names
        shape = "[ROWS, BLOCK]" if self.rows_per_program > 1 else "[BLOCK]"
        kind = TRITON_DTYPES["int32" if prim.fn in ("any", "all") else compute_dtype(prim.dtype)]
        if prim.fn == "sum_exp":
            return prim, self._accumulate_online(prim, shape)
        neutral = self._neutral(prim)
        value = self._operand(prim, neutral)
        if prim.fn.startswith("arg"):
            source_kind = TRITON_DTYPES[compute_dtype(self.program.prims[prim.inputs[0]].dtype)]
            best, where = names.unique("best"), names.unique("best_at")
            self.lines.append(f"{best} = tl.full({shape}, {neutral}, {source_kind})")
            self.lines.append(f"{where} = tl.zeros({shape}, tl.int{64 if self.wide_columns else 32})")
            candidate = names.unique("candidate")
            better = ">" if prim.fn == "argmax" else "<"
            self._emit(f"{candidate} = {value}", True)
            self._emit(f"{where} = tl.where({candidate} {better} {best}, cols, {where})", True)
            self._emit(f"{best} = tl.where({candidate} {better} {best}, {candidate}, {best})", True)
            return prim, (best, where)
        total = names.unique("running")
        self.lines.append(f"{total} = tl.full({shape}, {neutral}, {kind})")
        if prim.fn == "sum":
            self._emit(f"{total} += {value}", True)
        elif prim.fn == "prod":
            self._emit(f"{total} *= {value}", True)
        else:
            name = "maximum" if prim.fn in ("max", "any") else "minimum"
            nan = ", propagate_nan=tl.PropagateNan.ALL" if kind.startswith("tl.float") else ""
            self._emit(f"{total} = tl.{name}({total}, {value}{nan})", True)
        return prim, (total,)

    def _accumulate_online(self, prim: Prim, shape: str) -> tuple[str, ...]:
        """Running maximum and sum of exponentials below it, per lane (arXiv 1805.02867)."""
        top, total, higher = (self.parameters.names.unique(n) for n in ("lane_max", "lane_total", "new_max"))
        self.lines.append(f"{top} = tl.full({shape}, {LOWEST}, tl.float32)")
        self.lines.append(f"{total} = tl.zeros({shape}, tl.float32)")
        source = prim.inputs[0]
        value = self.tile.value(source, self.tile.own_index(source)).text
        if self.col_masked:
            value = f'tl.where(col_mask, {value}, -float("inf"))'
        if not value.isidentifier():
            name = self.parameters.names.unique("value")
            self._emit(f"{name} = {value}", True)
            value = name
        self._emit(f"{higher} = tl.maximum({top}, {value})", True)
        self._emit(f"{total} = {total} * tl.exp({top} - {higher}) + tl.exp({value} - {higher})", True)
        self._emit(f"{top} = {higher}", True)
        return top, total

    def _finish_reduction(self, prim: Prim, names: tuple[str, ...]) -> None:
        if prim.fn == "sum_exp":
            if prim.inputs[1] not in self.known:
                self._set(self.program.prims[prim.inputs[1]], self._across("tl.max", names[0]), prim.dtype)
            top = self.known[prim.inputs[1]]
            self._set(prim, self._across("tl.sum", f"{names[1]} * tl.exp({names[0]} - {top.text})"), prim.dtype)
        elif prim.fn.startswith("arg"):
            best = self.parameters.names.unique("extreme")
            self.extremes[prim.name] = best
            self._emit(f"{best} = {self._across('tl.max' if prim.fn == 'argmax' else 'tl.min', names[0])}", False)
            first = self._across("tl.min", f"tl.where({names[0]} == {best}, {names[1]}, 2147483647)")
            self._set(prim, f"{first}.to(tl.int64)", "int64")
        else:
            self._set(prim, self._collapse(prim, names[0]), compute_dtype(prim.dtype))

    # Scans -------------------------------------------------------------------------------------------------------

    def _write_scan(self) -> None:
        """Block after block of columns, carrying the running total of each row."""
        prim = next(p for p in map(self.program.prims.__getitem__, self.region.prims) if p.op is PrimOp.SCAN)
        carry = self.parameters.names.unique("carry")
        neutral, scan, join, total = SCANS[prim.fn]
        if not is_float(prim.dtype):
            neutral = neutral.removesuffix(".0")
        kind = TRITON_DTYPES[compute_dtype(prim.dtype)]
        shape = "[ROWS, 1]" if self.rows_per_program > 1 else "[1]"
        self.lines.append(f"{carry} = tl.full({shape}, {neutral}, {kind})")
        self._open_loop()
        value = self.parameters.names.unique("value")
        self._emit(f"{value} = {self._operand(prim, neutral)}", True)
        scanned = self.parameters.names.unique("scanned")
        within = scan.format(value=value, axis=self.axis)
        self._emit(f"{scanned} = {join.format(within, carry)}", True)
        self.known[prim.name] = Code(scanned, compute_dtype(prim.dtype), self.rows_per_program > 1, True)
        self._store_all(self.region.outputs)
        self._emit(f"{carry} = {join.format(total.format(value=value, axis=self.axis), carry)}", True)
        self._close_loop()

    # Finishing ---------------------------------------------------------------------------------------------------

    def finish(self, name: str, docstring: str, body: list[str]) -> Kernel:
        """The kernel with its launch."""
        constexprs: dict[str, int | bool | str] = {}
        dynamic: dict[str, str] = {}
        limits: tuple[str, ...] = ()
        sizes: dict[str, Size] = {"n_cols": self.n_cols}
        grid: list[str] = []
        if self.has_rows:
            grid.append(_cdiv("n_rows", self.rows_per_program))
            sizes["n_rows"] = self.n_rows
        if self.rows_per_program > 1:
            constexprs["ROWS"] = self.rows_per_program
        if self.is_map and self.col_groups:
            grid.append(_cdiv("n_cols", self.block))
        if not grid:
            grid.append("1")
        if self.columns_first:
            grid.reverse()
            limits = (f"{self.n_rows} <= {MOST_PROGRAMS * self.rows_per_program}",)
        if self.config.get("persist"):
            grid[0] = f"min({self.config['persist']}, {grid[0]})"
        if self.loop or self.is_map or self.n_cols.is_constant:
            constexprs["BLOCK"] = self._static_block()
        else:
            dynamic["BLOCK"] = "triton.next_power_of_2(n_cols)"
            limits = (*limits, f"{self.n_cols} <= {MOST_ELEMENTS // self.rows_per_program}")
        if self.is_map and self.has_rows and not self.n_cols.is_constant and self._fits_in_32_bits:
            limits = (*limits, f"{self.n_cols} < {2**31}")
        if self.tile.needs_quads:
            dynamic["QUADS"] = "n_cols % 4 == 0"
        if not self.col_groups and self.is_map:
            constexprs.pop("BLOCK", None)
        return assemble(
            name,
            self.parameters,
            constexprs,
            docstring,
            body,
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=int(self.config.get("warps", 4)),
            num_stages=int(self.config.get("stages", 2)),
            dynamic=dynamic,
            limits=limits,
        )


def _cdiv(name: str, block: int) -> str:
    return name if block == 1 else f"triton.cdiv({name}, {block})"


def _divides(block: int, size: Size) -> bool:
    return bool(size.terms) and all(coefficient % block == 0 for _, coefficient in size.terms)
