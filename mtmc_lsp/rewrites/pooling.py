"""Pooling along one dimension after the other: windows that overlap share what their rows have in common.

A window of ``k`` by ``k`` elements reads ``k * k`` of them; the largest (or the mean) of each row first, and then of ``k`` rows,
takes ``k + k``. It pays where windows overlap enough for the results between to be written and read once more.
"""

from __future__ import annotations

from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.convolution_layout import channels_last
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, dense, made

POOLS = frozenset(f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (2, 3))
DILATION = 4
"""The argument of max pooling that mean pooling lacks."""


def by_dimension(graph: Graph, node: Node) -> Edit | None:
    """The last dimension of each window first, then the others."""
    name = base_name(node)
    if name not in POOLS or node.kwargs or not isinstance(node.args[0], Ref):
        return None
    spatial, is_max = int(name[-2]), name.startswith("max")
    windows = [_numbers(node, 1, spatial, 1), _numbers(node, 2, spatial, 1), _numbers(node, 3, spatial, 0)]
    taps, steps, margins = windows
    if len(node.args) < 3 or node.args[2] in (None, ()):
        steps = taps
    dilations = _numbers(node, DILATION, spatial, 1) if is_max else (1,) * spatial
    if taps is None or steps is None or margins is None or dilations is None:
        return None
    shared = any(tap > step for tap, step in zip(taps[:-1], steps[:-1], strict=True))
    overridden = not is_max and len(node.args) > 6 and node.args[6] is not None
    # A mean of means in half precision would be rounded twice.
    exact = is_max or not is_low_precision(node.type.dtype)
    if taps[-1] == 1 or not shared or overridden or not exact:
        return None
    x, kind = node.args[0], node.type
    inner = (*graph.type_of(x).shape[:-1], kind.shape[-1])
    between = channels_last(inner, kind.dtype) if kind.is_channels_last else dense(inner, kind.dtype)
    nodes: list[Node] = []
    for suffix, own, written in (("along", {spatial - 1}, between), ("across", set(range(spatial - 1)), kind)):
        numbers = [
            tuple(value if dim in own else neutral for dim, value in enumerate(values))
            for values, neutral in ((taps, 1), (steps, 1), (margins, 0), (dilations, 1))
        ]
        rest = node.args[DILATION + is_max :]
        args: tuple[Argument, ...] = (x, *numbers[: 4 if is_max else 3], *rest)
        nodes.append(made(node, suffix, node.op, args, written))
        x = Ref(nodes[-1].name)
    return Edit(
        node.name,
        x,
        tuple(nodes),
        "windows that overlap have rows in common, and what a row comes to is found once for all of them",
        f"run the {name} along one dimension after the other",
    )


def _numbers(node: Node, position: int, count: int, default: int) -> tuple[int, ...] | None:
    """An argument with one number per dimension; None where one is symbolic."""
    value = node.args[position] if len(node.args) > position else default
    items = value if isinstance(value, tuple) else (value,)
    numbers = [item.constant if isinstance(item, Size) and item.is_constant else item for item in items]
    if not all(isinstance(item, int) for item in numbers):
        return (default,) * count if value is None else None
    whole = tuple(int(str(item)) for item in numbers) or (default,)
    return whole * count if len(whole) == 1 else whole


RULES = (
    AlgebraRule(
        "pool-by-dimension",
        by_dimension,
        "A window is all combinations of its places along each dimension, clipped or padded along each by itself: the largest "
        "of all is the largest of its rows' largest, and the sum that of its rows' sums; the number that a mean divides by is "
        "the product of those along each dimension.",
    ),
)
