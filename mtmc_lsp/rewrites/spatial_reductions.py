"""Moves sums and means over output positions before a convolution.

The sum over positions ``p`` of ``sum_{c,t} w[o,c,t] x[c, p s + t d - m]`` is ``sum_{c,t} w[o,c,t] T[c,t]``, where ``T[c,t]``
sums the input elements that meet kernel position ``t``: a strided range of the input. So each kernel position needs one sum
over part of the input, and the convolution becomes a matrix product with one row per image. Dimensions that are not reduced
stay a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import (
    CONVOLUTIONS,
    AlgebraRule,
    Chain,
    Edit,
    base_name,
    constants_of,
    contiguous_type,
    numbers,
)
from mtmc_lsp.rewrites.reduction_hoisting import through_factors

ONE = Size.of(1)


@dataclass(frozen=True)
class _Convolution:
    """A convolution with its arguments, one number per spatial dimension each."""

    node: Node
    x: Ref
    weight: Ref
    bias: Ref | None
    transposed: bool
    steps: tuple[int, ...]
    paddings: tuple[int, ...]
    output_padding: tuple[int, ...]
    """``output_padding`` of a transposed convolution."""
    dilations: tuple[int, ...]
    groups: int


def _convolution(node: Node) -> _Convolution | None:
    """A node as a convolution with constant arguments; ``None`` for others."""
    name = base_name(node)
    if name not in CONVOLUTIONS or node.kwargs:
        return None
    if node.op.endswith(".padding") or node.type.dtype not in ("float32", "float64"):
        return None
    spatial, transposed = int(name[-2]), "transpose" in name
    if len(node.type.shape) != spatial + 2:
        return None
    argument_positions = {
        "steps": 3,
        "paddings": 4,
        **({"output_padding": 5, "dilations": 7} if transposed else {"dilations": 5}),
    }
    arguments = {"output_padding": (0,) * spatial}
    for key, position in argument_positions.items():
        default = 0 if key in ("paddings", "output_padding") else 1
        value = constants_of(node.args[position], spatial) if len(node.args) > position else (default,) * spatial
        if value is None:
            return None
        arguments[key] = value
    groups = node.args[6] if len(node.args) > 6 else 1
    x, weight, bias = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or not isinstance(groups, int):
        return None
    bias_ref = bias if isinstance(bias, Ref) else None
    return _Convolution(node, x, weight, bias_ref, transposed, groups=groups, **arguments)


def _spatial_reduction(node: Node, rank: int) -> tuple[bool, tuple[int, ...]] | None:
    """For a sum or mean over spatial dimensions: whether it is a mean, and its dimensions."""
    name = base_name(node)
    if name.startswith("adaptive_avg_pool") and len(node.args) == 2:
        spatial = int(name[-2])
        if rank == spatial + 2 and constants_of(node.args[1], spatial) == (1,) * spatial:
            return True, tuple(range(2, rank))
        return None
    if name not in ("sum", "mean") or len(node.args) < 2 or node.kwargs or not isinstance(node.args[1], tuple):
        return None
    dims = tuple(sorted(int(str(d)) % rank for d in node.args[1] if isinstance(d, int)))
    return (name == "mean", dims) if dims and len(dims) == len(node.args[1]) and min(dims) >= 2 else None


def _ranges(
    convolution: _Convolution, dim: int, size: int, outputs: int, kernel_size: int
) -> list[tuple[int, int, int]] | None:
    """First, last and step of the input elements for each kernel position; None if a kernel position has none."""
    s, m, d = (argument[dim] for argument in (convolution.steps, convolution.paddings, convolution.dilations))
    ranges: list[tuple[int, int, int]] = []
    for kernel_position in range(kernel_size):
        if convolution.transposed:
            # Input i contributes to output s * i + d * kernel_position - m.
            first, last, step = (
                max(0, -((d * kernel_position - m) // s)),
                min(size - 1, (outputs - 1 + m - d * kernel_position) // s),
                1,
            )
        else:
            low, high = (
                max(0, -((kernel_position * d - m) // s)),
                min(outputs - 1, (size - 1 + m - kernel_position * d) // s),
            )
            first, last, step = low * s + kernel_position * d - m, high * s + kernel_position * d - m, s
        if last < first:
            return None
        ranges.append((first, last, step))
    return ranges


class _NodeBuilder(Chain):
    """Builds the nodes that replace one node."""

    def reshaped(self, x: Ref, shape: Sequence[Size]) -> Ref:
        """Reshape a dense tensor."""
        kind = contiguous_type(tuple(shape), self.type_of(x).dtype)
        return self.add("reshape.default", (x, numbers(shape)), kind)

    def permuted(self, x: Ref, order: tuple[int, ...]) -> Ref:
        """A dense tensor with its dimensions in that order."""
        kind = self.type_of(x)
        if order == tuple(range(len(order))) and kind.stride == contiguous_stride(kind.shape):
            return x
        shape, stride = (tuple(part[d] for d in order) for part in (kind.shape, kind.stride))
        view = self.add("permute.default", (x, order), TensorType(shape, kind.dtype, stride))
        return self.add(
            "clone.default", (view,), contiguous_type(shape, kind.dtype), memory_format="torch.contiguous_format"
        )

    def sums(self, x: Ref, dim: int, ranges: list[tuple[int, int, int]]) -> Ref:
        """The concatenated sums of each range along a dimension."""
        kind = self.type_of(x)
        sum_of: dict[tuple[int, int, int], Ref] = {}
        for item_range in ranges:
            if item_range in sum_of:
                continue
            (first, last, step), part = item_range, x
            length = Size.of((last - first) // step + 1)
            if length != kind.shape[dim]:
                shape = tuple(length if i == dim else size for i, size in enumerate(kind.shape))
                stride = tuple(item * step if i == dim else item for i, item in enumerate(kind.stride))
                view = TensorType(shape, kind.dtype, stride)
                part = self.add("slice.Tensor", (x, dim, first, last + 1, step), view)
            reduced_shape = tuple(ONE if i == dim else size for i, size in enumerate(kind.shape))
            sum_of[item_range] = self.add(
                "sum.dim_IntList", (part, (dim,), True), contiguous_type(reduced_shape, kind.dtype)
            )
        if len(ranges) == 1:
            return sum_of[ranges[0]]
        shape = tuple(Size.of(len(ranges)) if i == dim else size for i, size in enumerate(kind.shape))
        return self.add(
            "cat.default", (tuple(sum_of[item_range] for item_range in ranges), dim), contiguous_type(shape, kind.dtype)
        )


def over_positions(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over spatial dimensions of a convolution, possibly multiplied by a factor."""
    match = through_factors(graph, node.args[0], node) if node.args else None
    convolution = _convolution(match[0]) if match is not None else None
    if match is None or convolution is None:
        return None
    rank = len(convolution.node.type.shape)
    summed = _spatial_reduction(node, rank)
    x, weight = graph.type_of(convolution.x), graph.type_of(convolution.weight)
    if summed is None or len(x.shape) != rank:
        return None
    mean, dims = summed
    shapes = (x.shape, convolution.node.type.shape, weight.shape)
    if not all(shape[d].is_constant for shape in shapes for d in dims):
        return None
    kept_dims = tuple(d for d in range(2, rank) if d not in dims)
    if convolution.groups != 1 and (convolution.transposed or not kept_dims):
        return None
    nodes, sums = _NodeBuilder(node, graph, "spatial"), convolution.x
    for dim in dims:
        ranges = _ranges(convolution, dim - 2, *(shape[dim].constant for shape in shapes))
        if ranges is None:
            return None
        sums = nodes.sums(sums, dim, ranges)
    positions = prod(convolution.node.type.shape[d].constant for d in dims)
    value = _product(nodes, convolution, sums, dims, kept_dims)
    value = _with_factor_and_bias(nodes, convolution, value, match[1], positions, mean)
    if nodes.type_of(value).shape != node.type.shape:
        value = nodes.reshaped(value, node.type.shape)
    named_nodes = (*nodes.nodes[:-1], replace(nodes.nodes[-1], variable=node.variable))
    reduction_name, name = ("mean" if mean else "sum"), base_name(convolution.node)
    replacement = "a product with the weights" if not kept_dims else f"a convolution of {len(kept_dims)} dimensions"
    why = (
        f"the {reduction_name} over {positions} positions needs only {replacement} of the input sums for each kernel position, "
        f"not the {name}"
    )
    return Edit(
        node.name,
        Ref(named_nodes[-1].name),
        named_nodes,
        why,
        f"move the {reduction_name} over positions in front of the {name}",
    )


def _product(
    nodes: _NodeBuilder, conv: _Convolution, sums: Ref, dims: tuple[int, ...], kept_dims: tuple[int, ...]
) -> Ref:
    """The product of sums and weights, with kernel positions as channels: linear, or a convolution of the other dimensions."""
    source, weight = nodes.type_of(sums), nodes.type_of(conv.weight)
    kernel_positions = prod(weight.shape[d].constant for d in dims)
    sums = nodes.reshaped(
        nodes.permuted(sums, (0, 1, *dims, *kept_dims)),
        [source.shape[0], source.shape[1] * kernel_positions, *(source.shape[d] for d in kept_dims)],
    )
    # Output channels come first, except for a remaining transposed convolution.
    is_swapped = conv.transposed and not kept_dims
    if conv.transposed and kept_dims:
        permuted_weight = nodes.permuted(conv.weight, (0, *dims, 1, *kept_dims))
        shape = [weight.shape[0] * kernel_positions, weight.shape[1], *(weight.shape[d] for d in kept_dims)]
    else:
        permuted_weight = nodes.permuted(conv.weight, (1, 0, *dims) if is_swapped else (0, 1, *dims, *kept_dims))
        shape = [
            weight.shape[int(is_swapped)],
            weight.shape[1 - is_swapped] * kernel_positions,
            *(weight.shape[d] for d in kept_dims),
        ]
    weight_matrix = nodes.reshaped(permuted_weight, shape)
    outputs = conv.node.type.shape[1]
    result = contiguous_type(
        (source.shape[0], outputs, *(conv.node.type.shape[d] for d in kept_dims)), conv.node.type.dtype
    )
    if not kept_dims:
        return nodes.add("linear.default", (sums, weight_matrix), result)
    steps, paddings, output_padding, dilations = (
        tuple(part[d - 2] for d in kept_dims)
        for part in (conv.steps, conv.paddings, conv.output_padding, conv.dilations)
    )
    if conv.transposed:
        overload = "default" if len(kept_dims) == 1 else "input"
        args: tuple[Argument, ...] = (sums, weight_matrix, None, steps, paddings, output_padding, 1, dilations)
        return nodes.add(f"conv_transpose{len(kept_dims)}d.{overload}", args, result)
    return nodes.add(
        f"conv{len(kept_dims)}d.default", (sums, weight_matrix, None, steps, paddings, dilations, conv.groups), result
    )


def _with_factor_and_bias(
    nodes: _NodeBuilder, conv: _Convolution, value: Ref, factor: float, count: int, mean: bool
) -> Ref:
    """The value times the factor (divided by ``count`` for a mean), plus the bias once per reduced position."""
    kind = nodes.type_of(value)
    if factor != 1 or (mean and count != 1):
        value = nodes.add("mul.Tensor", (value, factor / count if mean else factor), kind)
    if conv.bias is None:
        return value
    times = factor if mean else factor * count
    bias_type = nodes.type_of(conv.bias)
    bias = nodes.add("mul.Tensor", (conv.bias, times), bias_type) if times != 1 else conv.bias
    shaped_bias = (
        nodes.reshaped(bias, [bias_type.shape[0], *[ONE] * (len(kind.shape) - 2)]) if len(kind.shape) > 2 else bias
    )
    return nodes.add("add.Tensor", (value, shaped_bias), kind)


REWRITES = (
    AlgebraRule(
        "hoist-spatial-reduction",
        over_positions,
        "sum_p sum_ct w_ct x_c[p s + t d] = sum_ct w_ct (sum_p x_c[p s + t d]): finite sums are exchanged, and each kernel "
        "position meets a range of the input; the padding outside it is 0.",
    ),
)
