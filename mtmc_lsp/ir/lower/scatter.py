"""Rows added to others at looked-up places: messages of a graph's edges to its nodes, tokens to their expert."""

from __future__ import annotations

from mtmc_lsp.ir.lower import Call, rule
from mtmc_lsp.ir.lower.views import refs, wrapped
from mtmc_lsp.ir.primitives import ONE, PrimOp

ADDABLE = frozenset({"float32", "float64", "int32", "int64"})
"""What GPUs add to memory as one step with the rounding that PyTorch has."""


@rule("index_add")
def index_add(c: Call) -> str:
    """``base[index[i]] += alpha * source[i]`` along one dimension."""
    base, index, source = c.tensor(0), c.tensor(2), c.tensor(3)
    rank = len(c.b.shape(base))
    dim = c.dim(1, "dim", rank)
    alpha = c.number(4, "alpha", 1.0)
    if alpha != 1:
        source = c.b.pointwise("mul", source, alpha, dtype=c.out.dtype)
    return _added(c, base, dim, _along(c, index, dim, rank), source)


@rule("scatter_add", "scatter_reduce")
def scatter_add(c: Call) -> str:
    """As ``index_add``, with an index for each element; of a longer source the first elements count."""
    if c.op == "scatter_reduce" and (c.raw(4, "reduce") != "sum" or c.raw(5, "include_self") is False):
        raise c.fail("reduced otherwise than by a sum into what is there")
    base, index, source = c.tensor(0), c.tensor(2), c.tensor(3)
    for i, size in enumerate(c.b.shape(index)):
        source = c.b.slice(source, i, 0, size)
    return _added(c, base, c.dim(1, "dim", len(c.b.shape(base))), index, source)


@rule("index_put")
def index_put(c: Call) -> str:
    """``base.index_put((index,), source, accumulate=True)`` with one row of indices."""
    base, items = c.tensor(0), c.raw(1)
    used = refs(items) if isinstance(items, tuple) else []
    if c.raw(3, "accumulate") is not True or len(used) != 1:
        raise c.fail("written at looked-up places, in no order")
    ((dim, ref),) = used
    shape = [*c.b.shape(base)]
    index = wrapped(c, c.b.values[ref.name, ref.index], shape[dim])
    if len(c.b.shape(index)) != 1:
        raise c.fail("several indices for each row")
    shape[dim] = c.b.shape(index)[0]
    return _added(c, base, dim, _along(c, index, dim, len(shape)), c.b.expand(c.tensor(2), shape))


def _along(c: Call, index: str, dim: int, rank: int) -> str:
    """One index for each row along ``dim``."""
    shape = c.b.shape(index)
    return c.b.reshape(index, [shape[0] if shape and d == dim else ONE for d in range(rank)])


def _added(c: Call, base: str, dim: int, index: str, source: str) -> str:
    if c.out.dtype not in ADDABLE or c.b.dtype(source) != c.out.dtype or not c.b.shape(base):
        raise c.fail(f"adding {c.out.dtype}")
    if c.b.dtype(index) not in ("int64", "int32"):
        raise c.fail("no indices")
    return c.b.add(PrimOp.SCATTER_ADD, (base, index, source), c.out.shape, c.out.dtype, dim=dim)
