"""Sums and means over the places of a convolution's result, moved in front of it.

The sum over places ``p`` of ``sum_{c,t} w[o,c,t] x[c, p s + t d - m]`` is ``sum_{c,t} w[o,c,t] T[c,t]``, where ``T[c,t]``
sums the elements that tap ``t`` meets: a range of the input, with steps. So each tap needs one sum of part of the input, and
the whole convolution becomes a product with as many rows as there are images. Dimensions that are not summed over stay a
convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, dense, made, numbers_of
from mtmc_lsp.rewrites.reduction_hoisting import through_factors

ONE = Size.of(1)


@dataclass(frozen=True)
class _Convolution:
    """A convolution with one number per spatial dimension of what windows have."""

    node: Node
    x: Ref
    weight: Ref
    bias: Ref | None
    transposed: bool
    steps: tuple[int, ...]
    margins: tuple[int, ...]
    beyond: tuple[int, ...]
    """The padding of the output, of a transposed one."""
    dilations: tuple[int, ...]
    groups: int


def _convolution(node: Node) -> _Convolution | None:
    """A node as one, where all its numbers are known."""
    name = base_name(node)
    if name not in {f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)} or node.kwargs:
        return None
    if node.op.endswith(".padding") or node.type.dtype not in ("float32", "float64"):
        return None
    spatial, transposed = int(name[-2]), "transpose" in name
    if len(node.type.shape) != spatial + 2:
        return None
    places = {"steps": 3, "margins": 4, **({"beyond": 5, "dilations": 7} if transposed else {"dilations": 5})}
    found = {"beyond": (0,) * spatial}
    for key, place in places.items():
        default = 0 if key in ("margins", "beyond") else 1
        value = numbers_of(node.args[place], spatial) if len(node.args) > place else (default,) * spatial
        if value is None:
            return None
        found[key] = value
    groups = node.args[6] if len(node.args) > 6 else 1
    x, weight, bias = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or not isinstance(groups, int):
        return None
    own = bias if isinstance(bias, Ref) else None
    return _Convolution(node, x, weight, own, transposed, groups=groups, **found)


def _summed(node: Node, rank: int) -> tuple[bool, tuple[int, ...]] | None:
    """Whether a node takes a mean, and over which dimensions it, or a sum, goes."""
    name = base_name(node)
    if name.startswith("adaptive_avg_pool") and len(node.args) == 2:
        spatial = int(name[-2])
        if rank == spatial + 2 and numbers_of(node.args[1], spatial) == (1,) * spatial:
            return True, tuple(range(2, rank))
        return None
    if name not in ("sum", "mean") or len(node.args) < 2 or node.kwargs or not isinstance(node.args[1], tuple):
        return None
    dims = tuple(sorted(int(str(d)) % rank for d in node.args[1] if isinstance(d, int)))
    return (name == "mean", dims) if dims and len(dims) == len(node.args[1]) and min(dims) >= 2 else None


def _ranges(
    convolution: _Convolution, dim: int, size: int, places: int, taps: int
) -> list[tuple[int, int, int]] | None:
    """For each tap the first, last and step of the elements that it meets; None where one meets none."""
    s, m, d = (part[dim] for part in (convolution.steps, convolution.margins, convolution.dilations))
    found: list[tuple[int, int, int]] = []
    for tap in range(taps):
        if convolution.transposed:
            # Place s * i + d * tap - m is in the result.
            first, last, step = max(0, -((d * tap - m) // s)), min(size - 1, (places - 1 + m - d * tap) // s), 1
        else:
            low, high = max(0, -((tap * d - m) // s)), min(places - 1, (size - 1 + m - tap * d) // s)
            first, last, step = low * s + tap * d - m, high * s + tap * d - m, s
        if last < first:
            return None
        found.append((first, last, step))
    return found


class _Nodes:
    """New nodes in the place of one."""

    def __init__(self, graph: Graph, like: Node) -> None:
        self.types: dict[str, TensorType] = {}
        self.graph, self.like, self.nodes = graph, like, list[Node]()

    def type_of(self, ref: Ref) -> TensorType:
        return self.types.get(ref.name) or self.graph.type_of(ref)

    def add(self, op: str, args: tuple[Argument, ...], kind: TensorType, **kwargs: Argument) -> Ref:
        node = made(self.like, f"places{len(self.nodes)}", f"aten.{op}", args, kind)
        self.nodes.append(Node(node.name, node.op, args, kwargs, (kind,), node.line))
        self.types[node.name] = kind
        return Ref(node.name)

    def reshaped(self, x: Ref, shape: Sequence[Size]) -> Ref:
        """A dense tensor in another shape."""
        kind = dense(tuple(shape), self.type_of(x).dtype)
        numbers = tuple(size.constant if size.is_constant else size for size in shape)
        return self.add("reshape.default", (x, numbers), kind)

    def permuted(self, x: Ref, order: tuple[int, ...]) -> Ref:
        """A dense tensor with dimensions in that order."""
        kind = self.type_of(x)
        if order == tuple(range(len(order))) and kind.stride == contiguous_stride(kind.shape):
            return x
        shape, stride = (tuple(part[d] for d in order) for part in (kind.shape, kind.stride))
        view = self.add("permute.default", (x, order), TensorType(shape, kind.dtype, stride))
        return self.add("clone.default", (view,), dense(shape, kind.dtype), memory_format="torch.contiguous_format")

    def sums(self, x: Ref, dim: int, ranges: list[tuple[int, int, int]]) -> Ref:
        """The sum of each range along a dimension, side by side."""
        kind = self.type_of(x)
        each: dict[tuple[int, int, int], Ref] = {}
        for own in ranges:
            if own in each:
                continue
            (first, last, step), part = own, x
            length = Size.of((last - first) // step + 1)
            if length != kind.shape[dim]:
                shape = tuple(length if i == dim else size for i, size in enumerate(kind.shape))
                stride = tuple(item * step if i == dim else item for i, item in enumerate(kind.stride))
                view = TensorType(shape, kind.dtype, stride)
                part = self.add("slice.Tensor", (x, dim, first, last + 1, step), view)
            kept = tuple(ONE if i == dim else size for i, size in enumerate(kind.shape))
            each[own] = self.add("sum.dim_IntList", (part, (dim,), True), dense(kept, kind.dtype))
        if len(ranges) == 1:
            return each[ranges[0]]
        shape = tuple(Size.of(len(ranges)) if i == dim else size for i, size in enumerate(kind.shape))
        return self.add("cat.default", (tuple(each[own] for own in ranges), dim), dense(shape, kind.dtype))


def over_places(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over spatial dimensions of a convolution, seen through factors."""
    found = through_factors(graph, node.args[0], node) if node.args else None
    convolution = _convolution(found[0]) if found is not None else None
    if found is None or convolution is None:
        return None
    rank = len(convolution.node.type.shape)
    summed = _summed(node, rank)
    x, weight = graph.type_of(convolution.x), graph.type_of(convolution.weight)
    if summed is None or len(x.shape) != rank:
        return None
    mean, dims = summed
    sized = (x.shape, convolution.node.type.shape, weight.shape)
    if not all(shape[d].is_constant for shape in sized for d in dims):
        return None
    kept = tuple(d for d in range(2, rank) if d not in dims)
    if convolution.groups != 1 and (convolution.transposed or not kept):
        return None
    nodes, sums = _Nodes(graph, node), convolution.x
    for dim in dims:
        ranges = _ranges(convolution, dim - 2, *(shape[dim].constant for shape in sized))
        if ranges is None:
            return None
        sums = nodes.sums(sums, dim, ranges)
    count = prod(convolution.node.type.shape[d].constant for d in dims)
    value = _product(nodes, convolution, sums, dims, kept)
    value = _finished(nodes, convolution, value, found[1], count, mean)
    if nodes.type_of(value).shape != node.type.shape:
        value = nodes.reshaped(value, node.type.shape)
    added = (*nodes.nodes[:-1], replace(nodes.nodes[-1], variable=node.variable))
    word, name = ("mean" if mean else "sum"), base_name(convolution.node)
    what = "a product with the weights" if not kept else f"a convolution of {len(kept)} dimensions"
    why = f"the {word} over {count} places needs {what} of the sums of what each tap meets, and no other result of the {name}"
    return Edit(node.name, Ref(added[-1].name), added, why, f"move the {word} over places in front of the {name}")


def _product(nodes: _Nodes, own: _Convolution, sums: Ref, dims: tuple[int, ...], kept: tuple[int, ...]) -> Ref:
    """The sums, taps as further channels, with the weights: a linear map, or a convolution of the other dimensions."""
    source, weight = nodes.type_of(sums), nodes.type_of(own.weight)
    taps = prod(weight.shape[d].constant for d in dims)
    sums = nodes.reshaped(
        nodes.permuted(sums, (0, 1, *dims, *kept)),
        [source.shape[0], source.shape[1] * taps, *(source.shape[d] for d in kept)],
    )
    # Output channels come first, but for a transposed convolution that stays one.
    swapped = own.transposed and not kept
    if own.transposed and kept:
        turned = nodes.permuted(own.weight, (0, *dims, 1, *kept))
        shape = [weight.shape[0] * taps, weight.shape[1], *(weight.shape[d] for d in kept)]
    else:
        turned = nodes.permuted(own.weight, (1, 0, *dims) if swapped else (0, 1, *dims, *kept))
        shape = [weight.shape[int(swapped)], weight.shape[1 - swapped] * taps, *(weight.shape[d] for d in kept)]
    factors = nodes.reshaped(turned, shape)
    outputs = own.node.type.shape[1]
    result = dense((source.shape[0], outputs, *(own.node.type.shape[d] for d in kept)), own.node.type.dtype)
    if not kept:
        return nodes.add("linear.default", (sums, factors), result)
    steps, margins, beyond, dilations = (
        tuple(part[d - 2] for d in kept) for part in (own.steps, own.margins, own.beyond, own.dilations)
    )
    if own.transposed:
        overload = "default" if len(kept) == 1 else "input"
        args: tuple[Argument, ...] = (sums, factors, None, steps, margins, beyond, 1, dilations)
        return nodes.add(f"conv_transpose{len(kept)}d.{overload}", args, result)
    return nodes.add(f"conv{len(kept)}d.default", (sums, factors, None, steps, margins, dilations, own.groups), result)


def _finished(nodes: _Nodes, own: _Convolution, value: Ref, factor: float, count: int, mean: bool) -> Ref:
    """The value times the factor, of which a mean has a part, and the bias, which each place had once."""
    kind = nodes.type_of(value)
    if factor != 1 or (mean and count != 1):
        value = nodes.add("mul.Tensor", (value, factor / count if mean else factor), kind)
    if own.bias is None:
        return value
    times = factor if mean else factor * count
    channels = nodes.type_of(own.bias)
    bias = nodes.add("mul.Tensor", (own.bias, times), channels) if times != 1 else own.bias
    shaped = nodes.reshaped(bias, [channels.shape[0], *[ONE] * (len(kind.shape) - 2)]) if len(kind.shape) > 2 else bias
    return nodes.add("add.Tensor", (value, shaped), kind)


RULES = (
    AlgebraRule(
        "sum-before-places",
        over_places,
        "sum_p sum_ct w_ct x_c[p s + t d] = sum_ct w_ct (sum_p x_c[p s + t d]): finite sums change places, and the elements "
        "that a tap meets are a range of the input, outside of which the padding is 0.",
    ),
)
