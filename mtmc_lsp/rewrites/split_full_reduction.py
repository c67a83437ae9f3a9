"""Splits a full reduction into a reduction of each row and one of the row results, if earlier operations work on rows."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import (
    AlgebraRule,
    Edit,
    base_name,
    contiguous_type,
    new_node,
    producer,
    uses_other_outputs,
)

LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "kl_div": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""Elementwise losses, with the position of their ``reduction`` argument."""
REDUCTIONS = {1: "mean", 2: "sum"}
ROW_OPERATIONS = {"softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "logsumexp": 1}
"""Operations on whole rows, with the position of their dimension argument."""
REDUCTION_OPERATIONS = frozenset("sum mean amax amin var std linalg_vector_norm prod".split())
NORMS = frozenset("layer_norm rms_norm".split())
FULL_PRECISION = ("float32", "float64")
MAX_SEARCH_DEPTH = 12
"""Number of operations to search backwards for rows."""


def reduce_rows_first(graph: Graph, node: Node) -> Edit | None:
    """A full sum or mean as a sum of row sums, or a mean of row means."""
    name, kind = base_name(node), node.type
    # The row results are rounded to their dtype, which would lose accuracy in 16-bit dtypes.
    if kind.shape or kind.dtype not in FULL_PRECISION or uses_other_outputs(graph, node):
        return None
    added: list[Node] = []
    if name in LOSSES:
        elementwise = _elementwise_loss(graph, node)
        if elementwise is None:
            return None
        reduction, loss = elementwise
        added.append(loss)
        source, rank = Ref(loss.name), len(loss.type.shape)
        dims = _row_dims(graph, [ref for ref in node.inputs() if len(graph.type_of(ref).shape) == rank])
    elif name in ("sum", "mean") and node.op.endswith(".default") and not node.kwargs and isinstance(node.args[0], Ref):
        reduction, source = name, node.args[0]
        dims = _row_dims(graph, [source])
    else:
        return None
    shape = (added[-1].type if added else graph.type_of(source)).shape
    if dims is None or not 0 < len(dims) < len(shape):
        return None
    row_shape = tuple(size for i, size in enumerate(shape) if i not in dims)
    rows = new_node(
        node,
        "rows",
        f"aten.{reduction}.dim" if reduction == "mean" else "aten.sum.dim_IntList",
        (source, dims),
        contiguous_type(row_shape, kind.dtype),
    )
    total = new_node(node, "total", f"aten.{reduction}.default", (Ref(rows.name),), kind)
    why = f"the {reduction} of all elements is the {reduction} of the {reduction}s of its rows"
    return Edit(
        node.name,
        Ref(total.name),
        (*added, rows, total),
        why,
        f"compute the {reduction} of the {name} along rows first,",
    )


def _elementwise_loss(graph: Graph, node: Node) -> tuple[str, Node] | None:
    """The reduction of a loss, and a node with the loss of each element."""
    position = LOSSES[base_name(node)]
    value = node.kwargs.get("reduction", node.args[position] if len(node.args) > position else 1)
    reduction = REDUCTIONS.get(_number(value) or 0)
    first = node.args[0]
    if reduction is None or not isinstance(first, Ref):
        return None
    kind = graph.type_of(first)
    others = [graph.type_of(ref) for ref in node.inputs()]
    if any(len(other.shape) == len(kind.shape) and other.shape != kind.shape for other in others):
        return None
    args: tuple[Argument, ...] = node.args
    kwargs = dict(node.kwargs)
    if len(args) > position:
        args = (*args[:position], 0, *args[position + 1 :])
    else:
        kwargs["reduction"] = 0
    loss = replace(new_node(node, "each", node.op, args, contiguous_type(kind.shape, node.type.dtype)), kwargs=kwargs)
    return reduction, loss


def _row_dims(graph: Graph, starts: list[Ref]) -> tuple[int, ...] | None:
    """The row dimensions of the nearest earlier operation that works on whole rows."""
    pending = [(ref, 0) for ref in starts]
    rank = len(graph.type_of(starts[0]).shape) if starts else 0
    visited: set[str] = set()
    while pending:
        ref, depth = pending.pop(0)
        node = producer(graph, ref)
        if node is None or node.name in visited or depth > MAX_SEARCH_DEPTH:
            continue
        visited.add(node.name)
        dims = _dims_of_rows(graph, node)
        if dims is not None and dims[1] == rank:
            return dims[0]
        pending += [(other, depth + 1) for other in node.inputs()]
    return None


def _dims_of_rows(graph: Graph, node: Node) -> tuple[tuple[int, ...], int] | None:
    """The dimensions of the rows that a node works on, and its input's rank."""
    name = base_name(node)
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    rank = len(graph.type_of(node.args[0]).shape)
    if name in NORMS and len(node.args) > 1 and isinstance(node.args[1], tuple):
        return tuple(range(rank - len(node.args[1]), rank)), rank
    if name in ROW_OPERATIONS or (name in REDUCTION_OPERATIONS and len(node.args) > 1):
        dims = node.args[2] if name == "linalg_vector_norm" and len(node.args) > 2 else node.args[1]
        numbers = [_number(item) for item in (dims if isinstance(dims, tuple) else (dims,))]
        if numbers and rank and None not in numbers:
            return tuple(sorted({int(n) % rank for n in numbers if n is not None})), rank
    return None


def _number(value: Argument) -> int | None:
    if isinstance(value, Size):
        return int(value.constant) if value.is_constant else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


REWRITES = (
    AlgebraRule(
        "reduce-rows-first",
        reduce_rows_first,
        "Addition is associative and commutative, and all rows have the same length: sum_ij x = sum_i (sum_j x), and likewise "
        "the mean of rows' means. Only the order of fp32 additions changes.",
    ),
)
