"""Decompose attention logits into a mask, a constant factor, and the remaining expression.

The factor is merged into the exponent's multiplication. Blocks whose keys are all visible skip the mask.
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
"""Largest constant factor that is merged (smallest: its inverse). Beyond it, products of factors might overflow float32."""


PLAIN = ("float16", "bfloat16", "float32")
"""Dtypes to which scores may be cast without a change, since they are computed in float32."""


@dataclass(frozen=True)
class Peeled:
    """Logits in the form: ``factor`` times ``text`` where all conditions hold, and minus infinity elsewhere."""

    text: str
    factor: float = 1.0
    allowed: tuple[str, ...] = ()
    """Conditions that every block must check."""
    at_edge: tuple[str, ...] = ()
    """Conditions that provably hold for query ``m`` and keys before ``m + visible_before``."""
    visible_before: Size | None = None
    is_product: bool = False
    """Whether ``text`` is a product, which a compiler could fuse into a subtraction."""


@dataclass(frozen=True)
class Logits:
    """Analyses the logits of one attention region."""

    ir: KernelIR
    region: Region
    form: AttentionForm
    band: Band
    """The range of keys that are visible to a query."""

    def peeled(self, expressions: Expressions, name: str, at: tuple[Index, ...]) -> Peeled:
        """Decompose a value into a mask, a positive constant factor and a remaining expression."""
        prim = self.ir.prims[name]
        is_computed_here = prim.op is PrimOp.POINTWISE and name not in expressions.region.inputs
        if is_computed_here and prim.dtype in PLAIN:
            inner = [(source, expressions.aligned(source, at)) for source in prim.inputs]
            if prim.fn == "rounded" or (prim.fn == "cast" and self.ir.prims[prim.inputs[0]].dtype in PLAIN):
                return self.peeled(expressions, *inner[0])
            constants = [_number(self.ir, source) for source in prim.inputs]
            if prim.fn in ("mul", "div"):
                which = 0 if prim.fn == "mul" and constants[0] is not None else 1
                if (factor := constants[which]) is not None and factor > 0.0:
                    inner_logits = self.peeled(expressions, *inner[1 - which])
                    factor = inner_logits.factor * factor if prim.fn == "mul" else inner_logits.factor / factor
                    if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR:
                        return replace(inner_logits, factor=factor)
            if prim.fn == "where" and constants[1:].count(-float("inf")) == 1:
                shown = constants[2] == -float("inf")
                condition = expressions.value(*inner[0])
                # A condition without rows and columns may be a Python literal, for which ``~`` is not a logical
                # negation.
                if condition.rows or condition.cols:
                    inner_logits = self.peeled(expressions, *inner[1 if shown else 2])
                    return self._masked(inner_logits, condition, prim.inputs[0], shown)
        return Peeled(expressions.value(name, at).at(0), is_product=prim.fn == "mul")

    def _masked(self, logits: Peeled, condition: Code, name: str, shown: bool) -> Peeled:
        """Add the condition ``name``, which shows the value (or hides it, if ``shown`` is false)."""
        text = condition.text if shown else f"~{condition.at(UNARY)}"
        visible_before = None
        if self.band.first is None and self.band.last is not None:
            visible_before = condition_holds_before(self.ir, self.region, self.form, name, shown)
        if visible_before is not None and logits.visible_before not in (None, visible_before):
            assert logits.visible_before is not None
            # Both conditions hold before the smaller of the two bounds; symbolic bounds cannot be compared.
            is_constant_bound = visible_before.is_constant and logits.visible_before.is_constant
            visible_before = (
                Size.of(min(visible_before.constant, logits.visible_before.constant)) if is_constant_bound else None
            )
        if visible_before is None:
            return replace(logits, allowed=(*logits.allowed, text))
        return replace(logits, at_edge=(*logits.at_edge, text), visible_before=visible_before)


def _number(ir: KernelIR, name: str) -> float | None:
    """The value of a constant primitive; ``None`` for others."""
    prim = ir.prims[name]
    value = prim.attrs.get("value") if prim.op is PrimOp.CONSTANT else None
    return float(value) if isinstance(value, (int, float)) else None
