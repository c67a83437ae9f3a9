"""Sums over everything, taken along rows first, where the rows are what the operations before work on."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import (
    AlgebraRule,
    Edit,
    base_name,
    dense,
    made,
    made_by,
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
"""Elementwise losses, and where their reduction stands among the arguments."""
REDUCTIONS = {1: "mean", 2: "sum"}
ALONG = {"softmax": 1, "_softmax": 1, "log_softmax": 1, "_log_softmax": 1, "logsumexp": 1}
"""Operations that look at a whole row, and where they say along which dimension."""
REDUCED = frozenset("sum mean amax amin var std linalg_vector_norm prod".split())
NORMS = frozenset("layer_norm rms_norm".split())
WIDE = ("float32", "float64")
DEPTH = 12
"""How many operations back the rows are looked for."""


def rows_first(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over everything as one of row sums, or row means."""
    name, kind = base_name(node), node.type
    # Sums in between are rounded to their dtype: in half precision that would be seen.
    if kind.shape or kind.dtype not in WIDE or uses_other_outputs(graph, node):
        return None
    added: list[Node] = []
    if name in LOSSES:
        split = _elementwise(graph, node)
        if split is None:
            return None
        how, every = split
        added.append(every)
        source, rank = Ref(every.name), len(every.type.shape)
        dims = _rows(graph, [ref for ref in node.inputs() if len(graph.type_of(ref).shape) == rank])
    elif name in ("sum", "mean") and node.op.endswith(".default") and not node.kwargs and isinstance(node.args[0], Ref):
        how, source = name, node.args[0]
        dims = _rows(graph, [source])
    else:
        return None
    shape = (added[-1].type if added else graph.type_of(source)).shape
    if dims is None or not 0 < len(dims) < len(shape):
        return None
    left = tuple(size for i, size in enumerate(shape) if i not in dims)
    rows = made(
        node,
        "rows",
        f"aten.{how}.dim" if how == "mean" else "aten.sum.dim_IntList",
        (source, dims),
        dense(left, kind.dtype),
    )
    total = made(node, "total", f"aten.{how}.default", (Ref(rows.name),), kind)
    why = f"the {how} of everything is the {how} of its rows' {how}s"
    return Edit(
        node.name, Ref(total.name), (*added, rows, total), why, f"take the {how} of the {name} along rows first,"
    )


def _elementwise(graph: Graph, node: Node) -> tuple[str, Node] | None:
    """How a loss is reduced, and the loss of each element."""
    place = LOSSES[base_name(node)]
    given = node.kwargs.get("reduction", node.args[place] if len(node.args) > place else 1)
    how = REDUCTIONS.get(_number(given) or 0)
    first = node.args[0]
    if how is None or not isinstance(first, Ref):
        return None
    kind = graph.type_of(first)
    others = [graph.type_of(ref) for ref in node.inputs()]
    if any(len(other.shape) == len(kind.shape) and other.shape != kind.shape for other in others):
        return None
    args: tuple[Argument, ...] = node.args
    kwargs = dict(node.kwargs)
    if len(args) > place:
        args = (*args[:place], 0, *args[place + 1 :])
    else:
        kwargs["reduction"] = 0
    every = replace(made(node, "each", node.op, args, dense(kind.shape, node.type.dtype)), kwargs=kwargs)
    return how, every


def _rows(graph: Graph, starts: list[Ref]) -> tuple[int, ...] | None:
    """The dimensions of the rows that what was computed before has looked at as a whole."""
    pending = [(ref, 0) for ref in starts]
    rank = len(graph.type_of(starts[0]).shape) if starts else 0
    seen: set[str] = set()
    while pending:
        ref, depth = pending.pop(0)
        node = made_by(graph, ref)
        if node is None or node.name in seen or depth > DEPTH:
            continue
        seen.add(node.name)
        dims = _looked_along(graph, node)
        if dims is not None and dims[1] == rank:
            return dims[0]
        pending += [(other, depth + 1) for other in node.inputs()]
    return None


def _looked_along(graph: Graph, node: Node) -> tuple[tuple[int, ...], int] | None:
    """Along which dimensions a node works on whole rows, and of how many."""
    name = base_name(node)
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    rank = len(graph.type_of(node.args[0]).shape)
    if name in NORMS and len(node.args) > 1 and isinstance(node.args[1], tuple):
        return tuple(range(rank - len(node.args[1]), rank)), rank
    if name in ALONG or (name in REDUCED and len(node.args) > 1):
        given = node.args[2] if name == "linalg_vector_norm" and len(node.args) > 2 else node.args[1]
        numbers = [_number(item) for item in (given if isinstance(given, tuple) else (given,))]
        if numbers and rank and None not in numbers:
            return tuple(sorted({int(n) % rank for n in numbers if n is not None})), rank
    return None


def _number(value: Argument) -> int | None:
    if isinstance(value, Size):
        return int(value.constant) if value.is_constant else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


RULES = (
    AlgebraRule(
        "rows-first",
        rows_first,
        "Addition is associative and commutative, and all rows are of one length: sum_ij x = sum_i (sum_j x), and likewise the "
        "mean of rows' means. Only the order of fp32 additions changes.",
    ),
)
