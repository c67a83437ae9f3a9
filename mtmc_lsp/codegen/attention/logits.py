"""An attention's logits, taken apart: which scores a mask shows, what constant they are all multiplied by, and the rest.

The constant goes into the exponent's own multiplication, and a mask that all keys of a block pass need not be asked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.snippets import UNARY, Code
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.attention_mask import Band, condition_holds_before
from mtmc_lsp.ir.attention_pattern import AttentionForm
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region

LARGEST_FACTOR = 2.0**100
"""A constant factor of logits above this, or below its inverse, stays where it is: float32 might not hold it with others."""


PLAIN = ("float16", "bfloat16", "float32")
"""Dtypes that scores may go through without a change of what they are worth; computed in float32."""


@dataclass(frozen=True)
class Peeled:
    """Logits: ``factor`` times ``text`` where all conditions hold, minus infinity elsewhere."""

    text: str
    factor: float = 1.0
    allowed: tuple[str, ...] = ()
    """Conditions to ask of each key."""
    at_edge: tuple[str, ...] = ()
    """Conditions that surely hold for query ``m`` and keys before ``m + sure``."""
    sure: Size | None = None
    is_product: bool = False
    """Whether the text is one, which could become a part of a subtraction."""


@dataclass(frozen=True)
class Logits:
    """Those of one attention."""

    ir: KernelIR
    region: Region
    form: AttentionForm
    band: Band
    """The keys that a query may see."""

    def peeled(self, expressions: Expressions, name: str, at: tuple[Index, ...]) -> Peeled:
        """A value as a mask around a positive constant times something.

        Args:
            expressions: what gives the text of a value in the kernel.
            name: of the value.
            at: the place in it.
        """
        prim = self.ir.prims[name]
        is_own = prim.op is PrimOp.POINTWISE and name not in expressions.region.inputs
        if is_own and prim.dtype in PLAIN:
            inner = [(source, expressions.aligned(source, at)) for source in prim.inputs]
            if prim.fn == "rounded" or (prim.fn == "cast" and self.ir.prims[prim.inputs[0]].dtype in PLAIN):
                return self.peeled(expressions, *inner[0])
            constants = [_number(self.ir, source) for source in prim.inputs]
            if prim.fn in ("mul", "div"):
                which = 0 if prim.fn == "mul" and constants[0] is not None else 1
                if (factor := constants[which]) is not None and factor > 0.0:
                    found = self.peeled(expressions, *inner[1 - which])
                    factor = found.factor * factor if prim.fn == "mul" else found.factor / factor
                    if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR:
                        return replace(found, factor=factor)
            if prim.fn == "where" and constants[1:].count(-float("inf")) == 1:
                shown = constants[2] == -float("inf")
                condition = expressions.value(*inner[0])
                # What is the same for all may be a number, which is inverted otherwise.
                if condition.rows or condition.cols:
                    found = self.peeled(expressions, *inner[1 if shown else 2])
                    return self._masked(found, condition, prim.inputs[0], shown)
        return Peeled(expressions.value(name, at).at(0), is_product=prim.fn == "mul")

    def _masked(self, found: Peeled, condition: Code, name: str, shown: bool) -> Peeled:
        """A value that a condition, ``name``, shows (or, not ``shown``, hides)."""
        text = condition.text if shown else f"~{condition.at(UNARY)}"
        sure = None
        if self.band.first is None and self.band.last is not None:
            sure = condition_holds_before(self.ir, self.region, self.form, name, shown)
        if sure is not None and found.sure not in (None, sure):
            assert found.sure is not None
            # Before the nearer of two edges both conditions hold; which that is, sizes may not tell.
            known = sure.is_constant and found.sure.is_constant
            sure = Size.of(min(sure.constant, found.sure.constant)) if known else None
        if sure is None:
            return replace(found, allowed=(*found.allowed, text))
        return replace(found, at_edge=(*found.at_edge, text), sure=sure)


def _number(ir: KernelIR, name: str) -> float | None:
    """A constant's value; ``None`` for all else."""
    prim = ir.prims[name]
    value = prim.attrs.get("value") if prim.op is PrimOp.CONSTANT else None
    return float(value) if isinstance(value, (int, float)) else None
