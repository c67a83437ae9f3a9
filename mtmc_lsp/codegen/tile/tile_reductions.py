"""Reductions along the columns of a tile: over a whole row at once, or in a loop over blocks of columns."""

from __future__ import annotations

from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code, literal
from mtmc_lsp.codegen.tile.reduction_formulas import neutral, only_for_softmax
from mtmc_lsp.codegen.tile.tile import TileBase
from mtmc_lsp.core.dtypes import MAX_FINITE, compute_dtype, is_float
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.primitives import CENTRED, Prim, PrimOp

LOWEST = {dtype: literal(-MAX_FINITE[dtype]) for dtype in ("float32", "float64")}
"""Initial value of a running maximum. It is finite, so that the difference to an infinite value is defined."""


class ReducingTile(TileBase):
    """A tile with support for reductions along its columns."""

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.op is not PrimOp.REDUCE and prim.op is not PrimOp.SCAN:
            return super()._provide(prim, at)
        tile_position = self.tile.tile_index(prim.name)
        if any(a != b for a, b in zip(at, tile_position, strict=True)):
            raise CannotCode(
                f"{prim.origin}: its kernel reads this reduction at another position; put the reader into a separate kernel"
            )
        if prim.name not in self.known:
            if self.loop:
                raise CannotCode(
                    f"{prim.origin}: its kernel reads this reduction before its loop ends; put the reader into a separate kernel"
                )
            self._reduce_now(prim)
        return self.known[prim.name]

    def _operand(self, prim: Prim, neutral: str) -> str:
        """The operand of a reduction over the whole tile, with ``neutral`` in masked-out columns."""
        source = prim.inputs[0]
        code = self.tile.value(source, self.tile.tile_index(source))
        if prim.fn in ("any", "all"):
            code = Code(f"{code.at(100)}.to(tl.int32)", "int32", code.rows, code.cols)
        elif not prim.fn.startswith("arg"):
            code = self.tile.cast(code, prim.dtype)
        text = self._broadcast(code)
        if self.col_masked and not (neutral == "0.0" and self._zero_outside(source)):
            text = f"tl.where(col_mask, {text}, {neutral})"
        return text

    def _broadcast(self, code: Code) -> str:
        """The value, broadcast to the whole tile."""
        if code.cols and (code.rows or self.rows_per_program == 1):
            return code.text
        shape = "[ROWS, BLOCK]" if self.rows_per_program > 1 else "[BLOCK]"
        if code.cols or code.rows:
            return f"tl.broadcast_to({code.text}, {shape})"
        return f"tl.full({shape}, {code.text}, {TRITON_DTYPES[code.dtype]})"

    def _zero_outside(self, name: str) -> bool:
        """Whether the value is provably 0 in masked-out columns, where loads return 0."""
        prim = self.ir.prims[name]
        axes = set(self.region.table.all_axes(name))
        if name in self.region.inputs:
            # The states of a loop are not loaded: their masked-out columns are computed, too.
            return name not in self.tile.held and bool(axes & set(self.region.reduced_axes))
        if prim.op in (PrimOp.RESHAPE, PrimOp.PERMUTE):
            return self._zero_outside(prim.inputs[0])
        if prim.op is PrimOp.POINTWISE and prim.fn in ("cast", "square", "abs", "neg", "relu", "mul", "add", "sub"):
            return all(self._zero_outside(source) for source in prim.inputs)
        return False

    def _neutral(self, prim: Prim) -> str:
        return neutral(prim, self.ir)

    def _result_name(self, prim: Prim) -> str:
        source = self.ir.prims[prim.inputs[0]]
        base = next((n.variable for n in self.ir.graph.nodes if n.name == source.origin and n.variable), "")
        word = {"sum_exp": "total", "sum": "sum", "max": "max", "min": "min"}.get(prim.fn, prim.fn)
        return self.parameters.names.unique(f"{base}_{word}" if base and prim.fn != "sum_exp" else f"row_{word}")

    def _set(self, prim: Prim, text: str, dtype: str) -> None:
        name = self._result_name(prim)
        self._emit(f"{name} = {text}", False)
        self.known[prim.name] = Code(name, dtype, rows=self.rows_per_program > 1)

    def _across(self, call: str, value: str) -> str:
        keep = ", keep_dims=True" if self.rows_per_program > 1 else ""
        return f"{call}({value}, axis={self.axis}{keep})"

    def _collapse(self, prim: Prim, value: str) -> str:
        """Expression that reduces a tile along its columns."""
        fn = prim.fn
        if fn in ("sum", "sum_exp"):
            return self._across("tl.sum", value)
        if fn in ("any", "all"):
            return self._across("tl.max" if fn == "any" else "tl.min", value) + " != 0"
        keep = ", keep_dims=True" if self.rows_per_program > 1 else ""
        if fn == "prod":
            return f"tl.reduce({value}, {self.axis}, _multiply{keep})"
        return (
            self._across(f"tl.{fn}", value) if self._only_for_softmax(prim) else self._extremum(fn, prim.dtype, value)
        )

    def _only_for_softmax(self, prim: Prim) -> bool:
        return only_for_softmax(prim, self.region, self.ir)

    def _reduce_now(self, prim: Prim) -> None:
        if prim.fn == "sum_exp":
            top = self._provide(self.ir.prims[prim.inputs[1]], self.tile.tile_index(prim.inputs[1]))
            source = prim.inputs[0]
            value = self.tile.value(source, self.tile.tile_index(source))
            text = self._broadcast(Code(f"tl.exp({value.at(60)} - {top.text})", prim.dtype, value.rows, value.cols))
            text = f"tl.where(col_mask, {text}, 0.0)" if self.col_masked else text
            self._set(prim, self._across("tl.sum", text), prim.dtype)
            return
        text = self._operand(prim, self._neutral(prim))
        if not prim.fn.startswith("arg"):
            self._set(prim, self._collapse(prim, text), compute_dtype(prim.dtype))
            return
        extreme = self._extreme_of(prim)
        if extreme is not None:
            self._provide(extreme, self.tile.tile_index(extreme.name))
        self._set_position(prim, self._named_text(text, "value", cols=True), "cols")

    @property
    def _has_wide_positions(self) -> bool:
        """Whether column positions are 64-bit integers."""
        return self.wide_columns

    def _extreme_of(self, prim: Prim) -> Prim | None:
        """The max or min reduction of this region with the same operand as an arg-reduction; None if there is none."""
        for name in self.region.prims:
            candidate = self.ir.prims[name]
            has_same_operand = (
                candidate.op is PrimOp.REDUCE
                and candidate.inputs == prim.inputs
                and candidate.attrs["dims"] == prim.attrs["dims"]
            )
            if has_same_operand and f"arg{candidate.fn}" == prim.fn and not self._only_for_softmax(candidate):
                return candidate
        return None

    def _set_position(self, prim: Prim, values: str, positions: str) -> None:
        """Emit the first position of the extreme of ``values``; NaN counts as the extreme of both maximum and minimum.

        Masked-out columns hold the neutral element and follow all valid columns, so they are never the first.
        """
        extreme, dtype = self._extreme_of(prim), self.ir.prims[prim.inputs[0]].dtype
        if extreme is not None and extreme.name in self.known:
            best = self.known[extreme.name].text
        else:
            best = self._named_text(self._extremum(prim.fn.removeprefix("arg"), dtype, values), "extreme", cols=False)
        self.extremes[prim.name] = best
        is_extreme = f"({values} == {best}) | ({values} != {values})" if is_float(dtype) else f"{values} == {best}"
        first = self._across("tl.min", f"tl.where({is_extreme}, {positions}, {self.named_size(self.n_cols, 'n_cols')})")
        self._set(prim, f"{first}.to(tl.int64)", "int64")

    def _extremum(self, fn: str, dtype: str, value: str) -> str:
        """The largest or smallest value of each row; NaN if the row contains NaN."""
        if not is_float(dtype):
            return self._across(f"tl.{fn}", value)
        keep = ", keep_dims=True" if self.rows_per_program > 1 else ""
        return f"tl.reduce({value}, {self.axis}, _{fn}_nan{keep})"

    def _named_text(self, text: str, preferred_name: str, *, cols: bool) -> str:
        """Assign ``text`` to a variable unless it is one."""
        if text.isidentifier():
            return text
        name = self.parameters.names.unique(preferred_name)
        self._emit(f"{name} = {text}", cols)
        return name

    def _accumulate(self, prim: Prim) -> tuple[Prim, tuple[str, ...]]:
        """Emit statements that accumulate one block of columns, with one accumulator per lane; returns their names."""
        names = self.parameters.names
        shape = "[ROWS, BLOCK]" if self.rows_per_program > 1 else "[BLOCK]"
        kind = TRITON_DTYPES["int32" if prim.fn in ("any", "all") else compute_dtype(prim.dtype)]
        if prim.fn == "sum_exp":
            return prim, self._accumulate_online(prim, shape)
        if self._is_centred(prim):
            return prim, self._accumulate_moments(prim, shape)
        neutral = self._neutral(prim)
        value = self._operand(prim, neutral)
        if prim.fn.startswith("arg"):
            dtype = compute_dtype(self.ir.prims[prim.inputs[0]].dtype)
            best, position, candidate, is_further = (
                names.unique(n) for n in ("best", "best_at", "candidate", "further")
            )
            self.lines.append(f"{best} = tl.full({shape}, {neutral}, {TRITON_DTYPES[dtype]})")
            self.lines.append(f"{position} = tl.zeros({shape}, tl.int{64 if self._has_wide_positions else 32})")
            self._emit(f"{candidate} = {value}", True)
            further, nearer = (">", "<=") if prim.fn == "argmax" else ("<", ">=")
            # NaN is the extreme value, and the first NaN wins.
            numbers = f"~({candidate} {nearer} {best}) & ({best} == {best})"
            self._emit(f"{is_further} = {numbers if is_float(dtype) else f'{candidate} {further} {best}'}", True)
            self._emit(f"{position} = tl.where({is_further}, cols, {position})", True)
            self._emit(f"{best} = tl.where({is_further}, {candidate}, {best})", True)
            return prim, (best, position)
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
        """Running maximum and sum of exponentials relative to it, per lane (arXiv 1805.02867)."""
        top, total, higher = (self.parameters.names.unique(n) for n in ("lane_max", "lane_total", "new_max"))
        kind = TRITON_DTYPES[prim.dtype]
        self.lines.append(f"{top} = tl.full({shape}, {LOWEST[prim.dtype]}, {kind})")
        self.lines.append(f"{total} = tl.zeros({shape}, {kind})")
        source = prim.inputs[0]
        value = self.tile.value(source, self.tile.tile_index(source)).text
        if self.col_masked:
            value = f'tl.where(col_mask, {value}, -float("inf"))'
        value = self._named_text(value, "value", cols=True)
        nan = "" if self._only_for_softmax(self.ir.prims[prim.inputs[1]]) else ", propagate_nan=tl.PropagateNan.ALL"
        self._emit(f"{higher} = tl.maximum({top}, {value}{nan})", True)
        self._emit(f"{total} = {total} * tl.exp({top} - {higher}) + tl.exp({value} - {higher})", True)
        self._emit(f"{top} = {higher}", True)
        return top, total

    def _is_centred(self, prim: Prim) -> bool:
        """Whether a sum of squared deviations is computed in the same loop as its mean."""
        return self.loop and prim.attrs.get(CENTRED) in self.region.prims

    def _accumulate_moments(self, prim: Prim, shape: str) -> tuple[str, ...]:
        """Running mean and sum of squared deviations, per lane (Welford, Technometrics 4, 1962)."""
        mean, spread, step = (self.parameters.names.unique(n) for n in ("lane_mean", "lane_spread", "delta"))
        for name in (mean, spread):
            self.lines.append(f"{name} = tl.zeros({shape}, {TRITON_DTYPES[prim.dtype]})")
        source = self.ir.prims[str(prim.attrs[CENTRED])].inputs[0]
        value = self._broadcast(self.tile.cast(self.tile.value(source, self.tile.tile_index(source)), prim.dtype))
        value = self._named_text(value, "value", cols=True)
        delta = f"{value} - {mean}"
        self._emit(f"{step} = tl.where(col_mask, {delta}, 0.0)" if self.col_masked else f"{step} = {delta}", True)
        self._emit(f"{mean} += {step} * (1.0 / (start // {self._stride_text} + 1))", True)
        self._emit(f"{spread} += {step} * ({value} - {mean})", True)
        return mean, spread

    _stride_text = "BLOCK"
    """Distance between consecutive blocks of columns of a program instance, as text."""
    _first_text = ""
    """First column of a program instance, as text; empty for 0."""

    def _finish_moments(self, prim: Prim, mean: str, spread: str) -> None:
        """Combine the moments of all lanes (Chan, Golub & LeVeque, The American Statistician 37, 1983)."""
        unique = self.parameters.names.unique
        broadcast = "[None, :]" if self.rows_per_program > 1 else ""
        counts, total = unique("lane_counts"), self.ir.prims[str(prim.attrs[CENTRED])]
        first = f" - {self._first_text}" if self._first_text else ""
        remaining = f"{self.named_size(self.n_cols, 'n_cols')}{first} - tl.arange(0, BLOCK){broadcast}"
        step = self._stride_text
        self._emit(
            f"{counts} = (tl.maximum({remaining} + {step} - 1, 0) // {step}).to({TRITON_DTYPES[prim.dtype]})", False
        )
        self._set(total, self._across("tl.sum", f"{mean} * {counts}"), prim.dtype)
        number = unique("count")
        broadcast_counts = f"tl.broadcast_to({counts}, [ROWS, BLOCK])" if self.rows_per_program > 1 else counts
        self._emit(f"{number} = tl.maximum({self._across('tl.sum', broadcast_counts)}, 1.0)", False)
        mean_difference = unique("mean_difference")
        self._emit(f"{mean_difference} = {mean} - {self.known[total.name].text} / {number}", False)
        self._set(
            prim, self._across("tl.sum", f"{spread} + {counts} * {mean_difference} * {mean_difference}"), prim.dtype
        )

    def _finish_reduction(self, prim: Prim, names: tuple[str, ...]) -> None:
        if prim.fn == "sum_exp":
            if prim.inputs[1] not in self.known:
                maximum = self.ir.prims[prim.inputs[1]]
                self._set(maximum, self._collapse(maximum, names[0]), prim.dtype)
            top = self.known[prim.inputs[1]]
            self._set(prim, self._across("tl.sum", f"{names[1]} * tl.exp({names[0]} - {top.text})"), prim.dtype)
        elif self._is_centred(prim):
            self._finish_moments(prim, *names)
        elif prim.fn.startswith("arg"):
            self._set_position(prim, *names)
        else:
            self._set(prim, self._collapse(prim, names[0]), compute_dtype(prim.dtype))
