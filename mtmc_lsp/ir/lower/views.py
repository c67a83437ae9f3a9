"""Lowers views, concatenation, padding and indexing."""

from __future__ import annotations

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Size, SizeLike, greater_than, product
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.resampling import PAD_MODES, gathered, padded_with_values, positions
from mtmc_lsp.ir.lower.sinks import weights_without_sink
from mtmc_lsp.ir.primitives import ONE, PrimOp


@lowering("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as")
@lowering("atleast_1d", "atleast_2d", "atleast_3d")
def reshape(c: Call) -> str | tuple[str, ...]:
    argument = c.raw(0)
    if c.overload == "dtype":
        raise c.fail("another dtype for the same bits")
    if isinstance(argument, tuple):
        names = [c.b.values[item.name, item.index] for item in argument if isinstance(item, Ref)]
        return tuple(c.b.reshape(name, kind.shape) for name, kind in zip(names, c.node.outputs, strict=True))
    return c.b.reshape(c.tensor(0), c.out.shape)


@lowering("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T", "mT")
def permute(c: Call) -> str:
    x = c.tensor(0)
    rank = len(c.b.shape(x))
    order = list(range(rank))
    if c.op == "permute":
        order = [int(d) % rank for d in _ints(c, 1)]
    elif c.op in ("transpose", "swapaxes") and rank:
        i, j = c.dim(1, "dim0", rank), c.dim(2, "dim1", rank)
        order[i], order[j] = j, i
    elif c.op == "mT":
        order[-1], order[-2] = order[-2], order[-1]
    elif c.op in ("t", "numpy_T"):
        order.reverse()
    else:
        raise c.fail("movedim")
    return c.b.permute(x, order)


def _ints(c: Call, position: int) -> list[int]:
    sizes = _sizes(c, position)
    if any(isinstance(item, Size) for item in sizes):
        raise c.fail("a symbolic list")
    return [item for item in sizes if isinstance(item, int)]


def _sizes(c: Call, position: int) -> list[int | Size]:
    """A list of numbers; only symbolic ones are sizes."""
    value = c.raw(position)
    result: list[int | Size] = []
    for item in value if isinstance(value, tuple) else (value,):
        number = item.constant if isinstance(item, Size) and item.is_constant else item
        if not isinstance(number, (int, Size)):
            raise c.fail("a list of other things than numbers")
        result.append(number)
    return result


@lowering("expand", "expand_as", "broadcast_to")
def expand(c: Call) -> str:
    return c.b.expand(c.tensor(0), c.out.shape)


@lowering("repeat")
def repeat(c: Call) -> str:
    x = c.tensor(0)
    times = [Size.of(t) for t in _ints(c, 1)]
    shape = [ONE] * (len(times) - len(c.b.shape(x))) + list(c.b.shape(x))
    interleaved = [part for size in shape for part in (ONE, size)]
    repeated = [part for time, size in zip(times, shape, strict=True) for part in (time, size)]
    return c.b.reshape(c.b.expand(c.b.reshape(x, interleaved), repeated), c.out.shape)


@lowering("slice", "narrow")
def slice_(c: Call) -> str:
    x = c.tensor(0)
    dim = c.dim(1, "dim", len(c.b.shape(x)))
    start = c.raw(2, "start", 0)
    start = 0 if start is None else start
    step = c.integer(4, "step", 1) if c.op == "slice" else 1
    if not isinstance(start, (int, Size)):
        raise c.fail("a slice from a tensor")
    begin = Size.of(start)
    if begin.is_constant and begin.constant < 0:
        begin = c.b.shape(x)[dim] + begin
    is_last_column_left_out = begin == Size.of(0) and step == 1 and c.out.shape[dim] + 1 == c.b.shape(x)[dim]
    if (
        is_last_column_left_out
        and dim == len(c.out.shape) - 1
        and (weights := weights_without_sink(c.b, x, c.out.shape[dim]))
    ):
        return weights
    return c.b.slice(x, dim, begin, c.out.shape[dim], step)


@lowering("select")
def select(c: Call) -> str:
    x = c.tensor(0)
    dim = c.dim(1, "dim", len(c.b.shape(x)))
    index = Size.of(c.integer(2, "index"))
    if index.constant < 0:
        index = c.b.shape(x)[dim] + index
    return c.b.reshape(c.b.slice(x, dim, index, 1), c.out.shape)


@lowering("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "unsafe_split", "unsafe_split_with_sizes")
def split(c: Call) -> tuple[str, ...]:
    x = c.tensor(0)
    dim = c.dim(1 if c.op == "unbind" else 2, "dim", len(c.b.shape(x)))
    parts, start = [], Size.of(0)
    for output in c.node.outputs:
        length = ONE if c.op == "unbind" else output.shape[dim]
        parts.append(c.b.reshape(c.b.slice(x, dim, start, length), output.shape))
        start = start + length
    return tuple(parts)


MOST_PARTS = 16
"""Most tensors that one kernel concatenates."""


@lowering("cat", "concat", "stack")
def cat(c: Call) -> str:
    items = c.raw(0, "tensors")
    assert isinstance(items, tuple)
    if len(items) > MOST_PARTS:
        raise c.fail(f"more than {MOST_PARTS} tensors: each element would select from all of them")
    names = [c.b.values[item.name, item.index] for item in items if isinstance(item, Ref)]
    dim = c.dim(1, "dim", len(c.out.shape))
    if c.op == "stack":
        names = [c.b.reshape(n, [*c.b.shape(n)[:dim], 1, *c.b.shape(n)[dim:]]) for n in names]
    names = [c.b.cast(name, c.out.dtype) for name in names]
    return _padded_scan(c, names, dim) or c.b.add(PrimOp.CAT, names, c.out.shape, c.out.dtype, dim=dim)


def _padded_scan(c: Call, names: list[str], dim: int) -> str | None:
    """Zeros before a cumulative sum, or ones before a cumulative product, as a scan of the padded input; else ``None``."""
    scan = c.b.prims[names[-1]]
    neutral = {"sum": 0, "prod": 1}.get(scan.fn) if scan.op is PrimOp.SCAN else None
    if len(names) != 2 or neutral is None or scan.attrs["dim"] != dim or scan.attrs.get("reverse"):
        return None
    first, before = c.b.prims[names[0]], c.b.shape(names[0])[dim]
    while first.op in (PrimOp.EXPAND, PrimOp.RESHAPE):
        first = c.b.prims[first.inputs[0]]
    if first.op is not PrimOp.CONSTANT or first.attrs["value"] != neutral or not before.is_constant:
        return None
    amounts = tuple(before.constant if i == dim else 0 for i in range(len(c.out.shape)))
    longer = c.b.add(PrimOp.PAD, scan.inputs, c.out.shape, scan.dtype, before=amounts, value=float(neutral))
    return c.b.add(PrimOp.SCAN, (longer,), c.out.shape, scan.dtype, **scan.attrs)


@lowering("constant_pad_nd", "pad")
def pad(c: Call) -> str:
    x, amounts, mode = c.tensor(0), _ints(c, 1), c.raw(2, "mode", "constant") if c.op == "pad" else "constant"
    if mode in PAD_MODES:
        return padded_with_values(c, x, amounts, str(mode))
    if mode != "constant":
        raise c.fail(f"padding by {mode}")
    rank = len(c.out.shape)
    before = [0] * rank
    for i in range(len(amounts) // 2):
        dim, (front, back) = rank - 1 - i, amounts[2 * i : 2 * i + 2]
        before[dim] = max(front, 0)
        # Negative padding crops.
        x = c.b.slice(x, dim, max(-front, 0), c.b.shape(x)[dim] + min(front, 0) + min(back, 0))
    if c.b.shape(x) == c.out.shape:
        return x
    value = c.number(2 if c.op == "constant_pad_nd" else 3, "value", 0.0) or 0.0
    return c.b.add(PrimOp.PAD, (x,), c.out.shape, c.out.dtype, before=tuple(before), value=value)


@lowering("flip")
def flip(c: Call) -> str:
    x = c.tensor(0)
    dims = c.dims(1, "dims", len(c.b.shape(x)))
    scan = c.b.prims[x]
    source = c.b.prims[scan.inputs[0]] if scan.op is PrimOp.SCAN else None
    if source is not None and source.op is PrimOp.FLIP and dims == source.attrs["dims"] == (scan.attrs["dim"],):
        # Flip, scan and flip again: a reverse scan.
        attrs = {**scan.attrs, "reverse": not scan.attrs.get("reverse")}
        return c.b.add(PrimOp.SCAN, source.inputs, scan.shape, scan.dtype, **attrs)
    return c.b.add(PrimOp.FLIP, (x,), c.b.shape(x), c.b.dtype(x), dims=dims)


@lowering("roll")
def roll(c: Call) -> str:
    x, shifts = c.tensor(0), _sizes(c, 1)
    if not c.has(2, "dims") or not c.raw(2, "dims"):
        x = c.b.reshape(x, [product(c.b.shape(x))])
        dims = [0]
    else:
        dims = list(_ints(c, 2))
    is_chained = _meets_roll(c, sources=True) or _meets_roll(c, sources=False) or len(dims) > 1
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= len(c.b.shape(x))
        size = c.b.shape(x)[dim]
        if isinstance(shift, Size):
            if any(coefficient < 0 for part in (shift, size - shift) for _, coefficient in part.terms):
                raise c.fail("rolling by a symbolic size that may be larger than the dimension")
            x = _wrapped_around(c, x, dim, size - shift)
            continue
        if size.is_constant:
            split_point = Size.of((size - shift).constant % max(1, size.constant))
        elif abs(shift) > 1 and greater_than(size, abs(shift)) not in c.b.graph.conditions:
            raise c.fail("rolling along a symbolic size that may be smaller than the shift")
        else:
            split_point = size - shift if shift > 0 else Size.of(-shift)
        if split_point.terms and is_chained:
            x = _wrapped_around(c, x, dim, -(shift % size.constant) if size.is_constant else -shift)
        elif split_point.terms:
            parts = [c.b.slice(x, dim, split_point, size - split_point), c.b.slice(x, dim, 0, split_point)]
            x = c.b.add(PrimOp.CAT, parts, c.b.shape(x), c.b.dtype(x), dim=dim)
    return c.b.reshape(x, c.out.shape)


def _meets_roll(c: Call, *, sources: bool) -> bool:
    """Whether the tensor is computed from the result of another roll, or the result of another roll from it."""
    graph, pending, seen = c.b.graph, [c.node], {c.node.name}
    while pending:
        node = pending.pop()
        near = [graph.named.get(ref.name) for ref in node.inputs()] if sources else graph.readers(node.name)
        for each in near:
            if each is None or each.name in seen:
                continue
            if each.op.split(".")[1] == "roll":
                return True
            seen.add(each.name)
            pending.append(each)
    return False


def _wrapped_around(c: Call, x: str, dim: int, start: SizeLike) -> str:
    """``x`` from ``start`` on, and then from its beginning: one read at an index.

    Two slices would double the code of everything that ``x`` is computed from, with each further roll.
    """
    b, size = c.b, c.b.shape(x)[dim]
    length, is_before = b.size(size, "int64"), isinstance(start, int) and start < 0
    if isinstance(start, int):
        position = positions(b, size, start)
    else:
        position = b.pointwise("add", positions(b, size), b.size(start, "int64"), dtype="int64")
    bound: str | int = 0 if is_before else length
    is_outside = b.pointwise("lt" if is_before else "ge", position, bound, dtype="bool")
    inside = b.pointwise("add" if is_before else "sub", position, length, dtype="int64")
    return gathered(b, x, dim, b.pointwise("where", is_outside, inside, position, dtype="int64"))


@lowering("embedding")
def embedding(c: Call) -> str:
    """``weight[indices]``: a gather along dimension 0, with the index broadcast over the embedding dimension."""
    weight, index = c.tensor(0), c.tensor(1)
    return _take(c, weight, 0, index)


@lowering("index_select")
def index_select(c: Call) -> str:
    x = c.tensor(0)
    return _take(c, x, c.dim(1, "dim", len(c.b.shape(x))), c.tensor(2))


def _take(c: Call, x: str, dim: int, index: str) -> str:
    """``x`` gathered along ``dim``, which the dimensions of ``index`` replace."""
    shape, index_shape = c.b.shape(x), c.b.shape(index)
    result = [*shape[:dim], *index_shape, *shape[dim + 1 :]]
    shaped_index = c.b.reshape(index, [*[1] * dim, *index_shape, *[1] * (len(shape) - dim - 1)])
    # A gather keeps the rank of x, so several index dimensions are flattened first and restored afterwards.
    flat_index = c.b.reshape(shaped_index, [*[1] * dim, _numel(index_shape), *[1] * (len(shape) - dim - 1)])
    flat = [*shape[:dim], _numel(index_shape), *shape[dim + 1 :]]
    gathered_rows = c.b.add(PrimOp.GATHER, (x, flat_index), flat, c.out.dtype, dim=dim)
    return c.b.reshape(gathered_rows, result)


def _numel(shape: tuple[Size, ...]) -> Size:
    total = Size.of(1)
    for size in shape:
        total = total * size
    return total


@lowering("gather")
def gather(c: Call) -> str:
    x, index = c.tensor(0), c.tensor(2)
    rank = len(c.b.shape(x))
    dim = c.dim(1, "dim", rank)
    for i, size in enumerate(c.b.shape(index)):
        if i != dim:
            x = c.b.slice(x, i, 0, size)
    return c.b.add(PrimOp.GATHER, (x, index), c.out.shape, c.out.dtype, dim=dim)


@lowering("index", "_unsafe_index")
def index(c: Call) -> str:
    """``x[i]``, ``x[:, i]`` or ``x[i, :, j]`` with integer index tensors.

    Several index tensors select elements together: their dimensions are flattened into one.
    """
    x, items = c.tensor(0), c.raw(1)
    assert isinstance(items, tuple)
    indexed_dims = [dim for dim, item in enumerate(items) if isinstance(item, Ref)]
    indices = [
        wrapped_index(c, c.b.values[ref.name, ref.index], c.b.shape(x)[dim]) for dim, ref in index_tensors(items)
    ]
    if len(indexed_dims) == 1:
        return _take(c, x, indexed_dims[0], indices[0])
    shape, rank = c.b.shape(x), len(c.b.shape(x))
    adjacent = indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1))
    # If the indexed dimensions are not adjacent, the index dimensions come first in the result.
    first_dim = indexed_dims[0] if adjacent else 0
    others = [dim for dim in range(rank) if dim not in indexed_dims]
    x = c.b.permute(x, (*others[:first_dim], *indexed_dims, *others[first_dim:]))
    sizes = [shape[dim] for dim in indexed_dims]
    x = c.b.reshape(
        x, [*(shape[d] for d in others[:first_dim]), product(sizes), *(shape[d] for d in others[first_dim:])]
    )
    flat = indices[0]
    for size, next_index in zip(sizes[1:], indices[1:], strict=True):
        scaled = c.b.pointwise("mul", flat, c.b.size(size, "int64"), dtype="int64")
        flat = c.b.pointwise("add", scaled, next_index, dtype="int64")
    return _take(c, x, first_dim, flat)


def index_tensors(items: tuple[object, ...]) -> list[tuple[int, Ref]]:
    """The index tensors among the indices of a tensor, each with its dimension."""
    return [(dim, item) for dim, item in enumerate(items) if isinstance(item, Ref)]


def wrapped_index(c: Call, name: str, size: Size) -> str:
    """An index tensor with negative indices counted from the end."""
    if c.b.dtype(name) not in ("int64", "int32"):
        raise c.fail("a mask as an index")
    name = c.b.cast(name, "int64")
    negative = c.b.pointwise("lt", name, 0, dtype="bool", operand_dtype="int64")
    wrapped_index = c.b.pointwise("add", name, c.b.size(size, "int64"), dtype="int64")
    return c.b.pointwise("where", negative, wrapped_index, name, dtype="int64")


@lowering("tril", "triu")
def triangle(c: Call) -> str:
    x, diagonal = c.tensor(0), c.integer(1, "diagonal")
    shape = c.b.shape(x)
    rank = len(shape)
    rows = c.b.add(PrimOp.IOTA, (), [shape[-2], 1], "int64", dim=0, start=0, step=1)
    columns = c.b.add(PrimOp.IOTA, (), [1, shape[-1]], "int64", dim=1, start=0, step=1)
    offset = c.b.pointwise("sub", columns, rows, dtype="int64")
    fn = "le" if c.op == "tril" else "ge"
    keep = c.b.pointwise(fn, offset, diagonal, dtype="bool", operand_dtype="int64")
    assert rank >= 2
    zero: bool | float = False if c.out.dtype == "bool" else 0.0
    return c.b.pointwise("where", keep, x, zero, dtype=c.out.dtype)


@lowering("diagonal", "diag")
def diagonal(c: Call) -> str:
    """A diagonal: element ``i + offset`` of row i. For a vector, ``diag`` creates a matrix instead."""
    x = c.tensor(0)
    rank, offset = len(c.b.shape(x)), c.integer(1, "diagonal" if c.op == "diag" else "offset")
    if rank == 1:
        return _on_diagonal(c, x, offset)
    i, j = (0, 1) if c.op == "diag" else (c.dim(2, "dim1", rank, 0), c.dim(3, "dim2", rank, 1))
    x = c.b.permute(x, (*(d for d in range(rank) if d not in (i, j)), i, j))
    length = c.out.shape[-1]
    rows = c.b.slice(x, rank - 2, max(-offset, 0), length)
    across: list[SizeLike] = [*[1] * (rank - 2), length, 1]
    columns = c.b.reshape(positions(c.b, length, max(offset, 0)), across)
    shape: list[SizeLike] = [*c.b.shape(rows)[:-1], 1]
    return c.b.reshape(c.b.add(PrimOp.GATHER, (rows, columns), shape, c.b.dtype(x), dim=rank - 1), c.out.shape)


@lowering("diag_embed")
def diag_embed(c: Call) -> str:
    """Matrices with the last dimension on a diagonal, and zeros elsewhere."""
    rank = len(c.out.shape)
    i, j = c.dim(2, "dim1", rank, -2), c.dim(3, "dim2", rank, -1)
    matrices = _on_diagonal(c, c.tensor(0), c.integer(1, "offset"))
    others = iter(range(rank - 2))
    return c.b.permute(matrices, [rank - 2 if d == i else (rank - 1 if d == j else next(others)) for d in range(rank)])


def _on_diagonal(c: Call, x: str, offset: int) -> str:
    """Matrices with the last dimension of ``x`` on the diagonal ``offset``."""
    shape = c.b.shape(x)
    size = shape[-1] + abs(offset)
    if offset < 0:
        before = (*[0] * (len(shape) - 1), -offset)
        x = c.b.add(PrimOp.PAD, (x,), [*shape[:-1], size], c.b.dtype(x), before=before, value=0.0)
    elif offset:
        none = (0,) * len(shape)
        x = c.b.add(PrimOp.PAD, (x,), [*shape[:-1], size], c.b.dtype(x), before=none, value=0.0)
    rows = c.b.add(PrimOp.IOTA, (), [size, 1], "int64", dim=0, start=0, step=1)
    columns = c.b.add(PrimOp.IOTA, (), [1, size], "int64", dim=1, start=0, step=1)
    distance = c.b.pointwise("sub", columns, rows, dtype="int64")
    on_diagonal = c.b.pointwise("eq", distance, offset, dtype="bool", operand_dtype="int64")
    zero: bool | float = False if c.out.dtype == "bool" else 0.0
    return c.b.pointwise("where", on_diagonal, c.b.reshape(x, [*shape[:-1], size, 1]), zero, dtype=c.out.dtype)


@lowering("linalg_cross", "cross")
def cross(c: Call) -> str:
    """Component i is ``x[i+1] * y[i+2] - x[i+2] * y[i+1]``, with indices modulo 3."""
    rank, size_three = len(c.out.shape), Size.of(3)
    if c.has(2, "dim") or c.op == "linalg_cross":
        dim = c.dim(2, "dim", rank, -1)
    else:
        dim = next(d for d, size in enumerate(c.out.shape) if size == size_three)
    rotated = []
    for step in (1, 2):
        index = c.b.pointwise("remainder", positions(c.b, size_three, step), 3, dtype="int64")
        operands = (c.b.expand(c.tensor(i), c.out.shape) for i in (0, 1))
        rotated.append([gathered(c.b, operand, dim, index) for operand in operands])
    (x1, y1), (x2, y2) = rotated
    products = [c.b.pointwise("mul", a, b, dtype=c.out.dtype) for a, b in ((x1, y2), (x2, y1))]
    return c.b.pointwise("sub", *products, dtype=c.out.dtype)


@lowering("select_scatter", "slice_scatter")
def scatter(c: Call) -> str:
    """``x[:, 0] = y`` and ``x[:, 2:5] = y``: ``y`` at the selected indices and ``x`` elsewhere."""
    x, y = c.tensor(0), c.tensor(1)
    shape = c.b.shape(x)
    dim = c.dim(2, "dim", len(shape))
    start = c.raw(3, "index" if c.op == "select_scatter" else "start", 0) or 0
    if not isinstance(start, (int, Size)):
        raise c.fail("an index from a tensor")
    first = Size.of(start)
    if first.is_constant and first.constant < 0:
        first = shape[dim] + first
    ones: list[Size | int] = [1] * len(shape)
    ones[dim] = shape[dim]
    position = c.b.add(PrimOp.IOTA, (), ones, "int64", dim=dim, start=0, step=1)
    if c.op == "select_scatter":
        selected = c.b.pointwise("eq", position, c.b.size(first, "int64"), dtype="bool", operand_dtype="int64")
        expanded = c.b.expand(c.b.reshape(y, [*shape[:dim], 1, *shape[dim + 1 :]]), shape)
        return c.b.pointwise("where", selected, c.b.cast(expanded, c.out.dtype), x, dtype=c.out.dtype)
    length = c.b.shape(y)[dim]
    if length == shape[dim]:
        return c.b.cast(y, c.out.dtype)
    if c.integer(5, "step", 1) != 1 or not first.is_constant:
        raise c.fail("a step other than 1, or a symbolic start")
    after_start = c.b.pointwise("ge", position, first.constant, dtype="bool", operand_dtype="int64")
    before_end = c.b.pointwise("lt", position, c.b.size(first + length, "int64"), dtype="bool", operand_dtype="int64")
    selected = c.b.pointwise("logical_and", after_start, before_end, dtype="bool")
    before = tuple(first.constant if i == dim else 0 for i in range(len(shape)))
    padded = c.b.add(PrimOp.PAD, (c.b.cast(y, c.out.dtype),), shape, c.out.dtype, before=before, value=0.0)
    return c.b.pointwise("where", selected, padded, x, dtype=c.out.dtype)


@lowering("copy")
def copy(c: Call) -> str:
    """The second tensor expanded and cast to the first one's shape and dtype."""
    return c.b.expand(c.b.cast(c.tensor(1), c.out.dtype), c.out.shape)
