"""Recognises attention among primitives: two matrix products with a softmax of the first one's scores between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.primitives import Prim, PrimOp

LARGEST_HEAD = 256
"""Largest supported head size; larger ones do not fit in registers."""


@dataclass(frozen=True)
class AttentionForm:
    """``softmax(f(q @ k)) @ v`` with an elementwise ``f``."""

    scores: Prim
    """The first product."""
    logits: str
    """Input of the softmax: ``f`` of the scores."""
    weights: str
    """The left operand of the second product."""
    result: Prim
    """The second product."""
    zero_if_fully_masked: bool
    """Whether a query without any key gives zeros, as in PyTorch's fused attention, instead of NaN."""


def attention_form(members: list[Prim]) -> AttentionForm | None:
    """The attention that ``members`` form; ``None`` if they do not."""
    prims = {prim.name: prim for prim in members}
    products = [prim for prim in members if prim.op is PrimOp.MATMUL]
    reductions = sorted(prim.fn for prim in members if prim.op is PrimOp.REDUCE)
    if any("dims" in prim.attrs for prim in products):
        return None
    if len(products) != 2 or reductions != ["max", "sum_exp"] or any(p.op is PrimOp.SCAN for p in members):
        return None
    scores, result = products
    if "float64" in (scores.dtype, result.dtype):
        return None
    quotient = _skip_casts(prims, result.inputs[0])
    if quotient is None or quotient.fn != "div":
        return None
    power, total = prims.get(quotient.inputs[0]), prims.get(quotient.inputs[1])
    if power is None or total is None or power.fn != "exp" or total.fn != "sum_exp":
        return None
    shifted = prims.get(power.inputs[0])
    if shifted is None or shifted.fn != "sub" or shifted.inputs != total.inputs:
        return None
    rank = len(prims[total.name].shape)
    if total.attrs["dims"] != (rank - 1,) or not _elementwise_from(prims, total.inputs[0], scores):
        return None
    return AttentionForm(
        scores, total.inputs[0], result.inputs[0], result, bool(quotient.attrs.get("zero_if_fully_masked"))
    )


def why_not_attention(members: list[Prim], table: AxisTable, graph: Graph) -> str:
    """Why the attention that ``members`` form cannot be one kernel, which loops over keys; empty if it can."""
    form = attention_form(members)
    if form is None:
        return "it is no attention: a product, a softmax of its rows, and a product"
    scores, result = table.of_product(form.scores), table.of_product(form.result)
    if scores.n != result.k or scores.m != result.m:
        return "the two products of an attention run over different rows or keys"
    for axes in (scores.k, result.n):
        size = product([axis.size for axis in axes]).value(graph.sizes)
        if size > LARGEST_HEAD:
            return f"an attention head size of {size} is above the supported {LARGEST_HEAD}"
    return ""


def grouped_axes(
    prims: Mapping[str, Prim], inputs: Collection[str], table: AxisTable, form: AttentionForm
) -> list[Axis]:
    """The batch axes that keys and values in memory do not have: heads of a group, which share them.

    Args:
        inputs: what the region reads from memory.
    """
    pending, read, visited = [form.scores.inputs[1], form.result.inputs[1]], set[Axis](), set[str]()
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        if name in inputs or not prims[name].inputs:
            read |= set(table.all_axes(name))
        else:
            pending += prims[name].inputs
    return [axis for axis in table.of_product(form.result).batch if axis not in read]


def _skip_casts(prims: dict[str, Prim], name: str) -> Prim | None:
    prim = prims.get(name)
    while prim is not None and (prim.fn == "cast" or (prim.op is PrimOp.RESHAPE and _only_ones_differ(prims, prim))):
        prim = prims.get(prim.inputs[0])
    return prim


def _only_ones_differ(prims: dict[str, Prim], prim: Prim) -> bool:
    source = prims.get(prim.inputs[0])
    one = Size.of(1)
    return source is not None and [s for s in source.shape if s != one] == [s for s in prim.shape if s != one]


ELEMENTWISE = (PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.EXPAND, PrimOp.CONSTANT, PrimOp.IOTA, PrimOp.PERMUTE)
BIASES = (*ELEMENTWISE, PrimOp.GATHER, PrimOp.SLICE)
"""Operations that compute a bias or a mask: a table of relative positions is read by index."""


def _elementwise_from(prims: dict[str, Prim], name: str, scores: Prim) -> bool:
    """Whether a value depends on the scores only through elementwise operations."""
    prim = prims.get(name)
    if prim is None or prim is scores:
        return True
    allowed = ELEMENTWISE if _depends_on(prims, name, scores) else BIASES
    return prim.op in allowed and all(_elementwise_from(prims, source, scores) for source in prim.inputs)


def _depends_on(prims: dict[str, Prim], name: str, scores: Prim) -> bool:
    """Whether a value is computed from the scores."""
    pending, visited = [name], set[str]()
    while pending:
        prim = prims.get(pending.pop())
        if prim is scores:
            return True
        if prim is not None and prim.name not in visited:
            visited.add(prim.name)
            pending += prim.inputs
    return False
