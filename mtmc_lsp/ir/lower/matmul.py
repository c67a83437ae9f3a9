"""Lowers matrix products and attention."""

from __future__ import annotations

import math

from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_low_precision
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.reductions import rounded, softmax_statistics
from mtmc_lsp.ir.primitives import ONE, VIEW_OPS, Builder, CannotLower, PrimOp, broadcast

EIGHT_BITS = frozenset({"float8_e4m3fn", "float8_e5m2", "int8", "uint8"})
"""Dtypes whose numbers both float16 and bfloat16 hold exactly."""


def matmul(b: Builder, left: str, right: str, dtype: str) -> str:
    """PyTorch's ``matmul`` for operands of at least two dimensions, batch dimensions broadcast."""
    a, c = b.shape(left), b.shape(right)
    if not is_float(dtype):
        raise CannotLower("a product of integers")
    if len(a) < 2 or len(c) < 2:
        raise CannotLower("a product with a vector")
    if a[-1] != c[-2]:
        raise CannotLower(f"a product over {a[-1]} and {c[-2]} elements")
    if _ancestors(b, left) & _ancestors(b, right):
        right = b.add(PrimOp.ALIAS, (right,), c, b.dtype(right))
    if len(c) == 2:
        # All leading dimensions of the left operand become rows of one product.
        rows = b.reshape(left, [product(a[:-1]), a[-1]])
        flat = b.add(PrimOp.MATMUL, (rows, right), [product(a[:-1]), c[-1]], dtype)
        return b.reshape(flat, [*a[:-1], c[-1]])
    batch = broadcast([a[:-2], c[:-2]])
    left, right = b.expand(left, [*batch, *a[-2:]]), b.expand(right, [*batch, *c[-2:]])
    return b.add(PrimOp.MATMUL, (left, right), [*batch, a[-2], c[-1]], dtype)


def _ancestors(b: Builder, name: str) -> set[str]:
    """The primitive and all primitives that it is computed from."""
    ancestors: set[str] = set()
    pending = [name]
    while pending:
        current = pending.pop()
        if current not in ancestors:
            ancestors.add(current)
            pending += b.prims[current].inputs
    return ancestors


@lowering("mm", "bmm", "matmul", "dot")
def mm(c: Call) -> str:
    left, right = c.tensor(0), c.tensor(1)
    if len(c.b.shape(left)) == 1:
        row = c.b.reshape(left, [1, *c.b.shape(left)])
        if len(c.b.shape(right)) > 1:
            rank = len(c.b.shape(right))
            right = c.b.permute(right, [*range(rank - 2), rank - 1, rank - 2])
            return _matrix_vector(c, right, c.b.reshape(left, [*c.b.shape(left), 1]))
        return _matrix_vector(c, row, c.b.reshape(right, [*c.b.shape(right), 1]))
    if len(c.b.shape(right)) == 1 and len(c.b.shape(left)) >= 2:
        column = c.b.reshape(right, [c.b.shape(right)[0], 1])
        return _matrix_vector(c, left, column)
    if len(c.b.shape(right)) == 2 and c.b.shape(right)[1] == ONE:
        return _matrix_vector(c, left, right)
    return _product(c, left, right)


def _product(c: Call, left: str, right: str) -> str:
    """A product of the call's dtype, of narrower operands where that changes no term of its sums.

    Tensor cores multiply 16-bit numbers, and float32 operands that were cast from such numbers hold no more bits. Their sums
    are float32 too, but less accurate than those of float32 units, so the result must be rounded to 16 bits later.
    """
    source = _source_dtype(c.b, left), _source_dtype(c.b, right)
    narrow = _common_dtype({dtype for dtype in source if dtype}) if all(source) else ""
    if c.out.dtype == "float32" and narrow and _is_rounded_later(c.b.graph, c.node.name):
        left, right = _narrowed(c.b, left, narrow), _narrowed(c.b, right, narrow)
    return matmul(c.b, left, right, c.out.dtype)


def _common_dtype(dtypes: set[str]) -> str:
    """The 16-bit dtype that holds the numbers of all these dtypes; empty if there is none."""
    wide = dtypes - EIGHT_BITS
    if len(wide) > 1 or not all(is_low_precision(dtype) for dtype in wide):
        return ""
    return next(iter(wide), "float16")


def _source_dtype(b: Builder, name: str) -> str:
    """The dtype that a value was cast from, before views of it; empty if it is not cast from another dtype."""
    prim = b.prims[name]
    while prim.op in VIEW_OPS and len(prim.inputs) == 1:
        prim = b.prims[prim.inputs[0]]
    is_cast = prim.op is PrimOp.POINTWISE and prim.fn == "cast" and not prim.attrs.get("rounds")
    return b.dtype(prim.inputs[0]) if is_cast else ""


def _narrowed(b: Builder, name: str, dtype: str) -> str:
    """The value in ``dtype``, without the cast that widened it."""
    prim = b.prims[name]
    if prim.op not in VIEW_OPS:
        return b.cast(prim.inputs[0], dtype)
    return b.add(prim.op, (_narrowed(b, prim.inputs[0], dtype),), prim.shape, dtype, **prim.attrs)


def _is_rounded_later(graph: Graph, name: str) -> bool:
    """Whether all that depends on a node's results passes through 16-bit numbers."""
    pending, seen = [name], {name}
    while pending:
        current = pending.pop()
        if any(ref.name == current for ref in graph.escaping):
            return False
        wide = [
            reader for reader in graph.readers(current) if not all(is_low_precision(o.dtype) for o in reader.outputs)
        ]
        pending += [reader.name for reader in wide if reader.name not in seen]
        seen.update(reader.name for reader in wide)
    return True


@lowering("_scaled_mm")
def scaled_product(c: Call) -> str:
    """A product of float8 operands with a scale for each operand, or for each of its rows or columns."""
    left, right, scale_a, scale_b = (c.tensor(i, n) for i, n in enumerate(("self", "mat2", "scale_a", "scale_b")))
    if c.has(5, "scale_result") or not (is_low_precision(c.out.dtype) or c.out.dtype == "float32"):
        raise c.fail("a result in float8")
    if not {c.b.dtype(left), c.b.dtype(right)} <= EIGHT_BITS:
        raise c.fail("operands that are not float8")
    rows, columns = c.out.shape
    value = matmul(c.b, c.b.cast(left, "float16"), c.b.cast(right, "float16"), "float32")
    for scale, shape in ((scale_a, (rows, ONE)), (scale_b, (ONE, columns))):
        if c.b.shape(scale) == shape:
            value = c.b.pointwise("mul", value, scale, dtype="float32")
        elif all(size == ONE for size in c.b.shape(scale)):
            value = c.b.pointwise("mul", value, c.b.reshape(scale, []), dtype="float32")
        else:
            raise c.fail("scales of blocks")
    bias = c.optional(4, "bias")
    if bias is not None:
        value = c.b.pointwise("add", value, bias, dtype="float32")
    return c.b.cast(value, c.out.dtype)


def _matrix_vector(c: Call, left: str, column: str) -> str:
    """A product with a vector as a reduction: it is memory-bound, so tensor cores would not help."""
    row = c.b.reshape(column, [1] * (len(c.b.shape(left)) - 1) + [c.b.shape(column)[0]])
    d = "float32" if c.out.dtype in ("float16", "bfloat16") else c.out.dtype
    terms = c.b.pointwise("mul", left, row, dtype=d)
    total = c.b.reduce("sum", terms, (len(c.b.shape(left)) - 1,), d)
    return c.b.cast(c.b.reshape(total, c.out.shape), c.out.dtype)


@lowering("mv")
def mv(c: Call) -> str:
    vector = c.tensor(1)
    return _matrix_vector(c, c.tensor(0), c.b.reshape(vector, [c.b.shape(vector)[0], 1]))


@lowering("addmm", "baddbmm")
def addmm(c: Call) -> str:
    value = _product(c, c.tensor(1), c.tensor(2))
    alpha, beta = c.number(4, "alpha", 1), c.number(3, "beta", 1)
    if alpha != 1:
        value = c.b.pointwise("mul", value, alpha, dtype=c.out.dtype)
    bias = c.tensor(0)
    if beta != 1:
        bias = c.b.pointwise("mul", bias, beta, dtype=c.out.dtype)
    return c.b.pointwise("add", value, bias, dtype=c.out.dtype)


@lowering("linear")
def linear(c: Call) -> str:
    weight = c.tensor(1)
    if len(c.b.shape(weight)) != 2:
        raise c.fail("a linear map to a number")
    if len(c.b.shape(c.tensor(0))) == 1:
        value = _matrix_vector(c, weight, c.b.reshape(c.tensor(0), [c.b.shape(weight)[1], 1]))
        bias = c.optional(2, "bias")
        return value if bias is None else c.b.pointwise("add", value, bias, dtype=c.out.dtype)
    if c.b.shape(weight)[0] == ONE:
        value = _matrix_vector(c, c.tensor(0), c.b.reshape(weight, [c.b.shape(weight)[1], 1]))
    else:
        value = _product(c, c.tensor(0), c.b.permute(weight, (1, 0)))
    bias = c.optional(2, "bias")
    return value if bias is None else c.b.pointwise("add", value, bias, dtype=c.out.dtype)


@lowering("scaled_dot_product_attention")
def attention(c: Call) -> str:
    q, k, v = c.tensor(0), c.tensor(1), c.tensor(2)
    if c.number(4, "dropout_p", 0.0):
        raise c.fail("attention with dropout")
    shapes = [c.b.shape(x) for x in (q, k, v)]
    if len({len(s) for s in shapes}) != 1 or len(shapes[0]) < 3:
        raise c.fail("operands of different ranks")
    q_shape = shapes[0]
    if not q_shape[-1].is_constant or not shapes[2][-1].is_constant:
        raise c.fail("a symbolic head size")
    scale_argument = c.node.kwargs.get("scale")
    scale = float(scale_argument) if isinstance(scale_argument, (int, float)) else 1.0 / math.sqrt(q_shape[-1].constant)
    batch = q_shape[:-2]
    k, v = (_with_query_heads(c, x, batch) for x in (k, v))
    d = compute_dtype(c.out.dtype)
    rank = len(q_shape)
    transposed_keys = c.b.permute(k, (*range(rank - 2), rank - 1, rank - 2))
    scores = matmul(c.b, q, transposed_keys, c.out.dtype)
    scores = c.b.pointwise("mul", scores, scale, dtype=d)
    scores = _masked_scores(c, scores, d)
    scores = rounded(c.b, scores)
    maximum, total = softmax_statistics(c.b, scores, (rank - 1,))
    weights = c.b.pointwise("exp", c.b.pointwise("sub", scores, maximum, dtype=d), dtype=d)
    probabilities = c.b.pointwise("div", weights, total, dtype=d, zero_if_fully_masked=c.has(3, "attn_mask"))
    weights = c.b.cast(probabilities, c.out.dtype)
    return matmul(c.b, weights, v, c.out.dtype)


def _masked_scores(c: Call, scores: str, d: str) -> str:
    """The scores plus the mask, or -inf at the keys that a boolean mask or causality excludes."""
    shape = c.b.shape(scores)
    masked = float("-inf")
    mask = c.optional(3, "attn_mask")
    if mask is not None:
        if c.b.dtype(mask) == "bool":
            scores = c.b.pointwise("where", mask, scores, masked, dtype=d)
        else:
            scores = c.b.pointwise("add", scores, mask, dtype=d)
    if c.flag(5, "is_causal"):
        rows = c.b.add(PrimOp.IOTA, (), [shape[-2], 1], "int64", dim=0, start=0, step=1)
        columns = c.b.add(PrimOp.IOTA, (), [1, shape[-1]], "int64", dim=1, start=0, step=1)
        allowed = c.b.pointwise("le", columns, rows, dtype="bool", operand_dtype="int64")
        scores = c.b.pointwise("where", allowed, scores, masked, dtype=d)
    return scores


def _with_query_heads(c: Call, name: str, batch: tuple[Size, ...]) -> str:
    """Keys or values expanded to the heads of the queries: each group of query heads shares one head (``enable_gqa``)."""
    shape = c.b.shape(name)
    if shape[:-2] == batch:
        return name
    heads, query_heads = shape[-3], batch[-1]
    if shape[:-3] != batch[:-1] or not (heads.is_constant and query_heads.is_constant):
        raise c.fail("batch dimensions that differ")
    group = query_heads.constant // heads.constant
    expanded = c.b.reshape(name, [*shape[:-2], 1, *shape[-2:]])
    expanded = c.b.expand(expanded, [*shape[:-2], group, *shape[-2:]])
    return c.b.reshape(expanded, [*batch, *shape[-2:]])
