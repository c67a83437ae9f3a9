"""Operations that return their first argument unchanged, in every bit."""

from __future__ import annotations

import math

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size

DROPOUTS = frozenset("dropout native_dropout feature_dropout alpha_dropout".split())
VIEWS_OF_SHAPES = frozenset("view reshape _unsafe_view expand squeeze alias detach contiguous to _to_copy".split())
"""Operations that change nothing if the shape, dtype and strides stay."""
SAME_MEMORY = frozenset("view reshape _unsafe_view expand squeeze alias detach slice permute transpose t".split())
"""Operations that never copy a tensor whose shape and strides they keep."""

VIEWS_AND_COPIES = (
    VIEWS_OF_SHAPES
    | SAME_MEMORY
    | frozenset(
        "clone unsqueeze select split split_with_sizes unbind chunk narrow diagonal unfold as_strided flatten".split()
    )
)
"""Operations whose results may be the memory of their first argument, or a copy of it."""


def constant_number(value: Argument) -> float | None:
    """The value of a number that is known now; ``None`` for other arguments."""
    if isinstance(value, Size):
        return float(value.constant) if value.is_constant else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def is_neutral(graph: Graph, node: Node) -> bool:
    """Whether the node returns its first argument: ``x * 1``, ``x - 0``, a permutation that keeps the order.

    ``x + 0.0`` is none, since it turns -0.0 into 0.0.
    """
    name, args = node.op.split(".")[1], node.args
    if not args or not isinstance(args[0], Ref) or graph.type_of(args[0]) != node.type:
        return False
    number = constant_number(args[1]) if len(args) > 1 else None
    if name in ("mul", "div", "pow"):
        return number == 1 and not node.kwargs and len(args) == 2
    if name in ("add", "sub") and number == 0:
        is_negative_zero = math.copysign(1.0, number) < 0
        return not is_float(node.type.dtype) or is_negative_zero == (name == "add")
    if name in DROPOUTS:
        return _is_inactive_dropout(node)
    if name in ("permute", "transpose"):
        order = permutation(node)
        return order is not None and order == sorted(order)
    if name == "slice":
        # The shape stays, so the slice starts at the first element.
        return len(args) < 5 or constant_number(args[4]) == 1
    return name in VIEWS_OF_SHAPES and node.kwargs.keys() <= {"dtype"}


def permutation(node: Node) -> list[int] | None:
    """The source dimension of each result dimension of a permutation; ``None`` for other operations."""
    rank, name = len(node.type.shape), node.op.split(".")[1]
    order = list(range(rank))
    if name == "t" and rank == 2:
        return [1, 0]
    if name == "transpose":
        i, j = (int(constant_number(item) or 0) % rank for item in node.args[1:3])
        order[i], order[j] = j, i
        return order
    if name == "permute" and isinstance(node.args[1], tuple):
        return [int(constant_number(item) or 0) % rank for item in node.args[1]]
    return None


def _is_inactive_dropout(node: Node) -> bool:
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return train is False or (len(node.args) > 1 and constant_number(node.args[1]) == 0)


def earlier_tensor(graph: Graph, ref: Ref) -> Ref:
    """The first value that is this tensor: with the same memory, shape and strides. It is the value itself if no other is.

    A transposition of a transposition is the tensor before both, and a view that changes nothing is its operand.
    """
    node = graph.named.get(ref.name)
    if node is None or not node.args or node.op.split(".")[1] not in SAME_MEMORY or len(node.outputs) != 1:
        return ref
    source = node.args[0]
    if not isinstance(source, Ref):
        return ref
    if is_neutral(graph, node):
        return earlier_tensor(graph, source)
    inner = graph.named.get(earlier_tensor(graph, source).name)
    if inner is None or inner.op.split(".")[1] not in SAME_MEMORY or not inner.args:
        return ref
    before, outer_order, inner_order = inner.args[0], permutation(node), permutation(inner)
    if not isinstance(before, Ref) or outer_order is None or inner_order is None:
        return ref
    if graph.type_of(before) != node.type or [inner_order[i] for i in outer_order] != list(range(len(outer_order))):
        return ref
    return earlier_tensor(graph, before)


def changed_tensors(graph: Graph) -> frozenset[Ref]:
    """The inputs that the target changes in place, their new values, and views and copies of both."""
    changed = {ref for mutation in graph.mutations for ref in (Ref(mutation.input), mutation.value)}
    for node in graph.nodes if changed else ():
        if node.op.split(".")[1] in VIEWS_AND_COPIES and changed & set(node.inputs()):
            changed |= {Ref(node.name, i) for i in range(len(node.outputs))}
    return frozenset(changed)
