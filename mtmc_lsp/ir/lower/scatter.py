"""Lowers scatter-adds: ``index_add``, ``scatter_add`` and accumulating ``index_put``."""

from __future__ import annotations

from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.views import index_tensors, wrapped_index
from mtmc_lsp.ir.primitives import ONE, PrimOp

ATOMIC_ADD_DTYPES = frozenset({"float32", "float64", "int32", "int64"})
"""Dtypes with atomic adds that round as PyTorch does."""


@lowering("index_add")
def index_add(c: Call) -> str:
    """``base[index[i]] += alpha * source[i]`` along one dimension."""
    base, index, source = c.tensor(0), c.tensor(2), c.tensor(3)
    rank = len(c.b.shape(base))
    dim = c.dim(1, "dim", rank)
    alpha = c.number(4, "alpha", 1.0)
    if alpha != 1:
        source = c.b.pointwise("mul", source, alpha, dtype=c.out.dtype)
    return _scatter_add(c, base, dim, _along(c, index, dim, rank), source)


@lowering("scatter_add", "scatter_reduce")
def scatter_add(c: Call) -> str:
    """Like ``index_add`` with one index per element; the leading elements of a larger source are used."""
    if c.op == "scatter_reduce" and (c.raw(4, "reduce") != "sum" or c.raw(5, "include_self") is False):
        raise c.fail("a reduction other than a sum that includes the input")
    base, index, source = c.tensor(0), c.tensor(2), c.tensor(3)
    for i, size in enumerate(c.b.shape(index)):
        source = c.b.slice(source, i, 0, size)
    return _scatter_add(c, base, c.dim(1, "dim", len(c.b.shape(base))), index, source)


@lowering("index_put")
def index_put(c: Call) -> str:
    """``base.index_put((index,), source, accumulate=True)`` with a one-dimensional index."""
    base, items = c.tensor(0), c.raw(1)
    used = index_tensors(items) if isinstance(items, tuple) else []
    if c.raw(3, "accumulate") is not True or len(used) != 1:
        raise c.fail("a write at indices, which may repeat, in any order")
    ((dim, ref),) = used
    shape = [*c.b.shape(base)]
    index = wrapped_index(c, c.b.values[ref.name, ref.index], shape[dim])
    if len(c.b.shape(index)) != 1:
        raise c.fail("an index with several dimensions")
    shape[dim] = c.b.shape(index)[0]
    return _scatter_add(c, base, dim, _along(c, index, dim, len(shape)), c.b.expand(c.tensor(2), shape))


def _along(c: Call, index: str, dim: int, rank: int) -> str:
    """A vector of indices reshaped to broadcast along ``dim``."""
    shape = c.b.shape(index)
    return c.b.reshape(index, [shape[0] if shape and d == dim else ONE for d in range(rank)])


def _scatter_add(c: Call, base: str, dim: int, index: str, source: str) -> str:
    if c.out.dtype not in ATOMIC_ADD_DTYPES or c.b.dtype(source) != c.out.dtype or not c.b.shape(base):
        raise c.fail(f"atomic adds of {c.out.dtype}")
    if c.b.graph.deterministic:
        raise c.fail("atomic adds, which deterministic algorithms exclude")
    if c.b.dtype(index) not in ("int64", "int32"):
        raise c.fail("an index that is not an integer tensor")
    return c.b.add(PrimOp.SCATTER_ADD, (base, index, source), c.out.shape, c.out.dtype, dim=dim)
