"""Recognises attention among primitives: two matrix products with a softmax of the first one's scores between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.primitives import Prim, PrimOp

LARGEST_HEAD = 256
"""Largest supported head size; larger ones do not fit in registers."""
LARGEST_GRADIENT_HEAD = 128
"""Largest head size with gradients, whose kernels hold two more tiles in registers."""


@dataclass(frozen=True)
class AttentionForm:
    """``softmax(f(q @ k)) @ v`` with an elementwise ``f``."""

    scores: Prim
    """The first product."""
    logits: str
    """Input of the softmax: ``f`` of the scores."""
    rank: int
    """Dimensions of the logits."""
    weights: str
    """The left operand of the second product."""
    result: Prim
    """The second product."""
    zero_if_fully_masked: bool
    """Whether a query without any key gives zeros, as in PyTorch's fused attention, instead of NaN."""
    maximum: str
    """The largest logit of each row."""
    total: str
    """The sum of the exponentials of a row, relative to the largest one."""
    sink: str = ""
    """A further logit of each row, without a value: it is part of the maximum and of the sum. Empty for other attentions."""

    def is_log_total(self, prims: Mapping[str, Prim], name: str) -> bool:
        """Whether a value is the logarithm of the sum of the exponentials of each row, relative to the largest one."""
        return prims[name].fn == "log" and prims[name].inputs == (self.total,)

    def is_statistic(self, prims: Mapping[str, Prim], name: str) -> bool:
        """Whether a value is the maximum of each row, or the logarithm of its sum: the backward pass needs both."""
        return not self.sink and (name == self.maximum or self.is_log_total(prims, name))


@dataclass(frozen=True)
class GradientForm:
    """Gradients of an attention: products of probabilities or their gradients, which are computed tile by tile."""

    scores: Prim
    """The product of queries and keys."""
    logits: str
    """The value whose exponential gives the probabilities: an elementwise function of the scores."""
    inner: tuple[Prim, ...]
    """The products with an element for each pair of a query and a key; the scores are one of them."""
    results: tuple[Prim, ...]
    """The products that sum such values over the queries or the keys."""

    def is_tile(self, prims: Mapping[str, Prim], name: str) -> bool:
        """Whether a value has an element for each pair of a query and a key: it depends on such a product."""
        return _depends_on_any(prims, name, self.inner)


def attention_form(members: list[Prim]) -> AttentionForm | None:
    """The attention that ``members`` form; ``None`` if they do not."""
    prims = {prim.name: prim for prim in members}
    products = [prim for prim in members if prim.op is PrimOp.MATMUL]
    reductions = sorted(prim.fn for prim in members if prim.op is PrimOp.REDUCE)
    if any("dims" in prim.attrs for prim in products):
        return None
    if len(products) != 2 or reductions not in (["max", "sum"], ["max", "sum_exp"]):
        return None
    if any(prim.op is PrimOp.SCAN for prim in members):
        return None
    scores, result = products
    if "float64" in (scores.dtype, result.dtype):
        return None
    quotient = _skip_casts(prims, result.inputs[0])
    if quotient is None or quotient.fn != "div":
        return None
    power, total = prims.get(quotient.inputs[0]), prims.get(quotient.inputs[1])
    if power is None or total is None or power.fn != "exp":
        return None
    shifted = prims.get(power.inputs[0])
    if shifted is None or shifted.fn != "sub":
        return None
    logits, largest = shifted.inputs
    maximum, sink = _apart_from_sink(prims, largest, "maximum")
    exponentials, weight = _apart_from_sink(prims, total.name, "add")
    if maximum is None or exponentials is None or not _is_weight(prims, weight, sink, largest):
        return None
    # The sum of a softmax, or that of its exponentials written out.
    if exponentials.inputs != (shifted.inputs if exponentials.fn == "sum_exp" else (power.name,)):
        return None
    if maximum.fn != "max" or maximum.inputs != (logits,):
        return None
    rows = (len(exponentials.shape) - 1,)
    if (exponentials.attrs["dims"], maximum.attrs["dims"]) != (rows, rows) or not _elementwise_from(
        prims, logits, scores
    ):
        return None
    return AttentionForm(
        scores,
        logits,
        len(exponentials.shape),
        result.inputs[0],
        result,
        bool(quotient.attrs.get("zero_if_fully_masked")),
        largest,
        total.name,
        sink,
    )


def _apart_from_sink(prims: Mapping[str, Prim], name: str, fn: str) -> tuple[Prim | None, str]:
    """A reduction, and the value of each row that ``fn`` combines with it; empty without one."""
    prim = prims.get(name)
    if prim is None or prim.op is PrimOp.REDUCE:
        return prim, ""
    if prim.fn == fn and len(prim.inputs) == 2:
        for reduced, other in (prim.inputs, prim.inputs[::-1]):
            found = prims.get(reduced)
            if found is not None and found.op is PrimOp.REDUCE:
                return found, other
    return None, ""


def _is_weight(prims: Mapping[str, Prim], weight: str, sink: str, largest: str) -> bool:
    """Whether a value is the exponential of the sink, relative to the largest logit; without a sink both are empty."""
    if not weight or not sink:
        return weight == sink
    power = prims.get(weight)
    shifted = prims.get(power.inputs[0]) if power is not None and power.fn == "exp" else None
    if shifted is None or shifted.fn != "sub" or shifted.inputs[1] != largest:
        return False
    products = [prim for prim in prims.values() if prim.op in (PrimOp.MATMUL, PrimOp.REDUCE)]
    return _is_same(prims, shifted.inputs[0], sink) and not _depends_on_any(prims, sink, products)


def _is_same(prims: Mapping[str, Prim], left: str, right: str) -> bool:
    """Whether two values are equal by their operations; what the kernel reads is one value."""
    a, b = prims.get(left), prims.get(right)
    if a is None or b is None or left == right:
        return left == right
    is_alike = (a.op, a.shape, a.dtype, a.attrs, len(a.inputs)) == (b.op, b.shape, b.dtype, b.attrs, len(b.inputs))
    return is_alike and a.op in BIASES and all(_is_same(prims, x, y) for x, y in zip(a.inputs, b.inputs, strict=True))


def gradient_form(members: list[Prim]) -> GradientForm | None:
    """The gradients of an attention that ``members`` compute; ``None`` if they are something else."""
    prims = {prim.name: prim for prim in members}
    products = [prim for prim in members if prim.op is PrimOp.MATMUL]
    if any("dims" in prim.attrs or len(prim.inputs) > 2 or prim.dtype == "float64" for prim in products):
        return None
    if any(prim.op not in (*BIASES, PrimOp.ALIAS, PrimOp.MATMUL) for prim in members):
        return None
    inner = tuple(prim for prim in products if not any(_depends_on_any(prims, name, products) for name in prim.inputs))
    results = tuple(prim for prim in products if prim not in inner)
    sides = [[_depends_on_any(prims, name, products) for name in prim.inputs] for prim in results]
    if not results or any(sum(each) != 1 for each in sides):
        return None
    if any(_depends_on_any(prims, name, results) for prim in results for name in prim.inputs):
        return None
    for prim in members:
        shifted = prims.get(prim.inputs[0]) if prim.fn == "exp" else None
        if shifted is None or shifted.fn != "sub" or _depends_on_any(prims, shifted.inputs[1], products):
            continue
        scores = [each for each in inner if _depends_on(prims, shifted.inputs[0], each)]
        if len(scores) == 1 and _elementwise_from(prims, shifted.inputs[0], scores[0]):
            return GradientForm(scores[0], shifted.inputs[0], inner, results)
    return None


def join_tiles(members: Sequence[Prim], table: AxisTable) -> None:
    """Unify the axes of tiles of pairs with those of their aliases: operands that a product reads beside their sources."""
    prims = {prim.name: prim for prim in members}
    products = [prim for prim in members if prim.op is PrimOp.MATMUL]
    for prim in members:
        if prim.op is PrimOp.ALIAS and _depends_on_any(prims, prim.name, products):
            for dim in range(len(prim.shape)):
                table.align(table.axes(prim.inputs[0], dim), table.axes(prim.name, dim))


def why_no_gradients(form: GradientForm, table: AxisTable, graph: Graph) -> str:
    """Why gradients of an attention cannot be one kernel; empty if they can."""
    scores = table.of_product(form.scores)
    for prim in form.inner:
        roles = table.of_product(prim)
        if roles.batch != scores.batch or {roles.m, roles.n} != {scores.m, scores.n}:
            return "the products of the gradients of an attention run over different queries or keys"
    if len({table.of_product(prim).k for prim in form.results}) != 1:
        return "one kernel sums over the queries or over the keys, not over both"
    for prim in form.results:
        roles = table.of_product(prim)
        if roles.batch != scores.batch or roles.k not in (scores.m, scores.n):
            return "the products of the gradients of an attention run over different queries or keys"
    for roles in map(table.of_product, (*form.inner, *form.results)):
        for axes in (roles.m, roles.n, roles.k):
            size = product([axis.size for axis in axes]).value(graph.sizes)
            if axes not in (scores.m, scores.n) and size > LARGEST_GRADIENT_HEAD:
                return f"an attention head size of {size} is above {LARGEST_GRADIENT_HEAD}, the largest with gradients"
    return ""


def _depends_on_any(prims: Mapping[str, Prim], name: str, products: Sequence[Prim]) -> bool:
    return any(_depends_on(prims, name, each) for each in products)


def why_not_attention(members: list[Prim], table: AxisTable, graph: Graph) -> str:
    """Why the attention that ``members`` form cannot be one kernel, which loops over keys; empty if it can."""
    form = attention_form(members)
    if form is None:
        return "it is no attention: a product, a softmax of its rows, and a product"
    scores, result = table.of_product(form.scores), table.of_product(form.result)
    logits = table.axes(form.logits, form.rank - 1)
    if scores.n != result.k or scores.m != result.m or logits != scores.n:
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
    aliases: dict[Axis, Axis] = {}
    """Axes of an alias, with those of its input."""
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        prim, axes = prims[name], table.all_axes(name)
        if name in inputs or not prim.inputs:
            read |= set(axes)
            continue
        pending += prim.inputs
        before = [axis for item in prim.inputs for axis in table.all_axes(item)]
        if prim.op is PrimOp.ALIAS and [axis.size for axis in axes] == [axis.size for axis in before]:
            aliases |= dict(zip(axes, before, strict=True))
        elif prim.op is not PrimOp.EXPAND:
            # A part of another axis, such as a head in a row of all heads: its elements are in memory.
            read |= {*axes} - {*before}
    return [
        axis for axis in table.of_product(form.result).batch if axis not in read and aliases.get(axis, axis) not in read
    ]


def _skip_casts(prims: dict[str, Prim], name: str) -> Prim | None:
    """The primitive that computes a value, looking through casts and changes of the layout."""
    prim = prims.get(name)
    while prim is not None and (prim.fn == "cast" or prim.op in (PrimOp.RESHAPE, PrimOp.PERMUTE)):
        prim = prims.get(prim.inputs[0])
    return prim


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


def _depends_on(prims: Mapping[str, Prim], name: str, scores: Prim) -> bool:
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
