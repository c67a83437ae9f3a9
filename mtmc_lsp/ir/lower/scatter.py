"""Lowers writes at indices: ``index_add``, ``scatter_add``, accumulating ``index_put``, and ``index_fill``."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import MOST_FILLED
from mtmc_lsp.core.sizes import Number, product
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


@lowering("index_fill")
def index_fill(c: Call) -> str:
    """``x`` with a value at the positions along ``dim`` that equal one of few indices."""
    x, index = c.tensor(0), c.tensor(2)
    rank = len(c.b.shape(x))
    dim = c.dim(1, "dim", rank)
    count = product(c.b.shape(index))
    if not count.is_constant or not 0 < count.constant <= MOST_FILLED:
        raise c.fail(f"not a constant number of indices up to {MOST_FILLED}")
    value = c.operand(3, "value")
    if isinstance(value, Number) and value.kind == "float" and not is_float(c.out.dtype):
        raise c.fail("integers filled with a float that is known at run time")
    size = c.b.shape(x)[dim]
    wrapped = c.b.reshape(wrapped_index(c, index, size), [1, count])
    position = c.b.add(PrimOp.IOTA, (), [size, 1], "int64", dim=0, start=0, step=1)
    matches = c.b.pointwise("eq", position, wrapped, dtype="bool", operand_dtype="int64")
    filled = c.b.unrolled_reduce("sum", c.b.cast(matches, "int32"), (1,), "int32")
    along = [size if i == dim else ONE for i in range(rank)]
    is_filled = c.b.pointwise("ne", c.b.reshape(filled, along), 0, dtype="bool", operand_dtype="int32")
    return c.b.pointwise("where", is_filled, value, x, dtype=c.out.dtype)


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
