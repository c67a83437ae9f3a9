"""Lowers matrix products and attention."""

from __future__ import annotations

import math

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.reductions import rounded, softmax_statistics
from mtmc_lsp.ir.primitives import ONE, Builder, CannotLower, PrimOp, broadcast


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
    return matmul(c.b, left, right, c.out.dtype)


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
    value = matmul(c.b, c.tensor(1), c.tensor(2), c.out.dtype)
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
        value = matmul(c.b, c.tensor(0), c.b.permute(weight, (1, 0)), c.out.dtype)
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
