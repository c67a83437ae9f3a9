"""Separates pooling into one pass per dimension, so that overlapping windows share partial results.

A window of ``k`` by ``k`` elements needs ``k * k`` reads. Pooling each row first, and then ``k`` of these results, needs
``k + k``. This pays if windows overlap enough to cover the cost of storing and loading the intermediate results.
"""

from __future__ import annotations

from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.convolution_layout import channels_last
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, contiguous_type, new_node

POOLS = frozenset(f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (2, 3))
DILATION = 4
"""Position of the dilation argument, which only max pooling has."""


def by_dimension(graph: Graph, node: Node) -> Edit | None:
    """Pool along the last dimension first, then along the others."""
    name = base_name(node)
    if name not in POOLS or node.kwargs or not isinstance(node.args[0], Ref):
        return None
    spatial, is_max = int(name[-2]), name.startswith("max")
    windows = [_numbers(node, 1, spatial, 1), _numbers(node, 2, spatial, 1), _numbers(node, 3, spatial, 0)]
    kernel_sizes, steps, margins = windows
    if len(node.args) < 3 or node.args[2] in (None, ()):
        steps = kernel_sizes
    dilations = _numbers(node, DILATION, spatial, 1) if is_max else (1,) * spatial
    if kernel_sizes is None or steps is None or margins is None or dilations is None:
        return None
    windows_overlap = any(kernel_size > step for kernel_size, step in zip(kernel_sizes[:-1], steps[:-1], strict=True))
    has_divisor = not is_max and len(node.args) > 6 and node.args[6] is not None
    # A mean of means in a 16-bit dtype would be rounded twice.
    exact = is_max or not is_low_precision(node.type.dtype)
    if kernel_sizes[-1] == 1 or not windows_overlap or has_divisor or not exact:
        return None
    x, kind = node.args[0], node.type
    inner = (*graph.type_of(x).shape[:-1], kind.shape[-1])
    intermediate = channels_last(inner, kind.dtype) if kind.is_channels_last else contiguous_type(inner, kind.dtype)
    nodes: list[Node] = []
    for suffix, dims, output_type in (
        ("along", {spatial - 1}, intermediate),
        ("across", set(range(spatial - 1)), kind),
    ):
        numbers = [
            tuple(value if dim in dims else neutral for dim, value in enumerate(values))
            for values, neutral in ((kernel_sizes, 1), (steps, 1), (margins, 0), (dilations, 1))
        ]
        other_args = node.args[DILATION + is_max :]
        args: tuple[Argument, ...] = (x, *numbers[: 4 if is_max else 3], *other_args)
        nodes.append(new_node(node, suffix, node.op, args, output_type))
        x = Ref(nodes[-1].name)
    return Edit(
        node.name,
        x,
        tuple(nodes),
        "overlapping windows share rows, and the result of each row is computed once",
        f"run the {name} one dimension at a time",
    )


def _numbers(node: Node, position: int, count: int, default: int) -> tuple[int, ...] | None:
    """An argument with one number per dimension; None if one is symbolic."""
    value = node.args[position] if len(node.args) > position else default
    items = value if isinstance(value, tuple) else (value,)
    numbers = [item.constant if isinstance(item, Size) and item.is_constant else item for item in items]
    if not all(isinstance(item, int) for item in numbers):
        return (default,) * count if value is None else None
    integers = tuple(int(str(item)) for item in numbers) or (default,)
    return integers * count if len(integers) == 1 else integers


REWRITES = (
    AlgebraRule(
        "separable-pooling",
        by_dimension,
        "A window is a Cartesian product of ranges, each clipped or padded separately: its maximum is the maximum of its rows' "
        "maxima, its sum the sum of its rows' sums, and the divisor of a mean the product of the divisors per dimension.",
    ),
)
