"""Moves reductions before a linear map: ``sum_j (x @ W.T + b)_j = x @ (sum_j W_j) + sum_j b_j``, and likewise over rows.

A matrix product becomes a product with a vector (or with a few rows): O(M K + N K) instead of O(M N K) operations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.rewrites.graph_editing import (
    AlgebraRule,
    Edit,
    base_name,
    contiguous_type,
    is_only_reader,
    new_node,
    numbers,
    producer,
)

ONE = Size.of(1)


@dataclass(frozen=True)
class _Linear:
    """``x @ weight + bias``, times ``factor``, plus ``terms``."""

    node: Node
    x: Ref
    weight: Ref
    bias: Ref | None
    features: int
    """The dimension of ``weight`` that is the output features."""
    factor: float
    terms: tuple[tuple[Ref, float], ...] = ()
    """Vectors along the features that are added, each with a factor."""


@dataclass(frozen=True)
class _Reduction:
    node: Node
    mean: bool
    dims: tuple[int, ...]


def _reduction(node: Node, rank: int) -> _Reduction | None:
    name = base_name(node)
    if name not in ("sum", "mean") or len(node.args) < 2 or node.kwargs or not isinstance(node.args[1], tuple):
        return None
    dims = [int(str(d)) % rank for d in node.args[1] if not isinstance(d, Ref)]
    return _Reduction(node, name == "mean", tuple(sorted(dims))) if dims else None


def through_factors(graph: Graph, value: Argument, reader: Node) -> tuple[Node, float] | None:
    """The node and the factor whose product is ``value``; ``None`` if another node than ``reader`` reads it or a node between."""
    match = _match_factors(graph, value, reader, features=False)
    return (match[0], match[1]) if match is not None else None


def _match_factors(
    graph: Graph, value: Argument, reader: Node, *, features: bool
) -> tuple[Node, float, tuple[tuple[Ref, float], ...]] | None:
    """A value as ``(node, factor, terms)`` with ``node * factor + sum(vector * its factor)``.

    The vectors have one number per element of the last dimension; they are only accepted if ``features`` is set.
    """
    factor, terms = 1.0, list[tuple[Ref, float]]()
    node = producer(graph, value)
    while node is not None and is_only_reader(graph, node.name, reader.name):
        name, other = base_name(node), node.args[1] if len(node.args) == 2 and not node.kwargs else None
        if name in ("mul", "div") and isinstance(other, (int, float)) and not isinstance(other, bool) and other != 0:
            factor = factor * other if name == "mul" else factor / other
        elif features and name in ("add", "sub") and isinstance(other, Ref) and _is_vector_for(graph, other, node):
            terms.append((other, factor if name == "add" else -factor))
        else:
            return node, factor, tuple(terms)
        reader, node = node, producer(graph, node.args[0])
    return None


def _is_vector_for(graph: Graph, other: Ref, node: Node) -> bool:
    """Whether ``other`` has one number per element of the last dimension, and the other operand has the result's shape."""
    kind, source = graph.type_of(other), node.args[0]
    has_full_shape = isinstance(source, Ref) and graph.type_of(source).shape == node.type.shape
    return has_full_shape and kind.shape == node.type.shape[-1:] and kind.dtype == node.type.dtype


def _linear(graph: Graph, value: Argument, reader: Node) -> _Linear | None:
    """The linear map, factor and vectors that a value consists of; ``None`` if a node in between has another reader."""
    match = _match_factors(graph, value, reader, features=True)
    if match is None or match[0].type.dtype not in ("float32", "float64") or match[0].kwargs:
        return None
    linear = _operands(graph, match[0], match[1])
    return replace(linear, terms=match[2]) if linear is not None else None


def _operands(graph: Graph, node: Node, factor: float) -> _Linear | None:
    name, refs = base_name(node), [item for item in node.args if isinstance(item, Ref)]
    if name == "linear":
        linear = _Linear(node, refs[0], refs[1], refs[2] if len(refs) > 2 else None, 0, factor)
    elif name in ("mm", "matmul"):
        linear = _Linear(node, refs[0], refs[1], None, 1, factor)
    elif name == "addmm" and len(node.args) == 3:
        linear = _Linear(node, refs[1], refs[2], refs[0], 1, factor)
    else:
        return None
    is_plain = len(graph.type_of(linear.weight).shape) == 2 and len(graph.type_of(linear.x).shape) >= 2
    if linear.bias is not None and len(graph.type_of(linear.bias).shape) != 1:
        return None
    return linear if is_plain else None


def over_features(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over the output features, which needs only the reduced weights."""
    reduction = _reduction(node, _rank(graph, node))
    linear = _linear(graph, node.args[0], node) if reduction is not None else None
    if reduction is None or linear is None or reduction.dims != (len(linear.node.type.shape) - 1,):
        return None
    dtype, reduction_name = node.type.dtype, "mean" if reduction.mean else "sum"
    x, weight = graph.type_of(linear.x), graph.type_of(linear.weight)
    input_features = weight.shape[1 - linear.features]
    nodes = [_reduced(node, "weights", linear.weight, (linear.features,), reduction.mean, (input_features,))]
    vector = Ref(nodes[-1].name)
    nodes.append(
        new_node(node, "product", "aten.matmul.default", (linear.x, vector), contiguous_type(x.shape[:-1], dtype))
    )
    if linear.bias is not None:
        nodes.append(
            new_node(node, "bias", f"aten.{reduction_name}.default", (linear.bias,), contiguous_type((), dtype))
        )
        args = (Ref(nodes[-2].name), Ref(nodes[-1].name))
        nodes.append(new_node(node, "shifted", "aten.add.Tensor", args, contiguous_type(x.shape[:-1], dtype)))
    nodes += _scale_nodes(node, Ref(nodes[-1].name), x.shape[:-1], linear.factor)
    for i, (term, factor) in enumerate(linear.terms):
        before = Ref(nodes[-1].name)
        nodes.append(new_node(node, f"term{i}", f"aten.{reduction_name}.default", (term,), contiguous_type((), dtype)))
        nodes += _scale_nodes(node, Ref(nodes[-1].name), (), factor, f"factor{i}")
        args = (before, Ref(nodes[-1].name))
        nodes.append(new_node(node, f"with_term{i}", "aten.add.Tensor", args, contiguous_type(x.shape[:-1], dtype)))
    nodes += _reshape_nodes(node, Ref(nodes[-1].name), x.shape[:-1])
    output_features = weight.shape[linear.features]
    why = (
        f"the {reduction_name} over {output_features} outputs is one product with the {reduction_name} of the weights, "
        f"so {_count(graph, linear)} operations become {_count(graph, linear, reduced=True)}"
    )
    return _edit_from(
        node, nodes, why, f"move the {reduction_name} over features in front of the {base_name(linear.node)}"
    )


def over_rows(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over rows: the linear map of the reduced rows."""
    reduction = _reduction(node, _rank(graph, node))
    linear = _linear(graph, node.args[0], node) if reduction is not None else None
    if reduction is None or linear is None or linear.terms or len(linear.node.type.shape) - 1 in reduction.dims:
        return None
    x = graph.type_of(linear.x)
    rows = product([x.shape[d] for d in reduction.dims])
    if linear.bias is not None and not reduction.mean and not rows.is_constant:
        return None
    shape = tuple(ONE if d in reduction.dims else size for d, size in enumerate(x.shape))
    reduction_name = "mean" if reduction.mean else "sum"
    nodes = [_reduced(node, "rows", linear.x, reduction.dims, reduction.mean, shape, keep=True)]
    kind = contiguous_type((*shape[:-1], linear.node.type.shape[-1]), node.type.dtype)
    # The bias stays separate: a sum of n rows contains it n times.
    op = "aten.linear.default" if linear.features == 0 else "aten.matmul.default"
    nodes.append(new_node(node, "mapped", op, (Ref(nodes[-1].name), linear.weight), kind))
    if linear.bias is not None:
        bias = linear.bias
        if not reduction.mean:
            times = new_node(
                node,
                "times",
                "aten.mul.Tensor",
                (bias, rows.constant),
                contiguous_type(graph.type_of(bias).shape, node.type.dtype),
            )
            nodes.append(times)
            bias = Ref(times.name)
        nodes.append(new_node(node, "shifted", "aten.add.Tensor", (Ref(f"{node.name}_mapped"), bias), kind))
    nodes += _scale_nodes(node, Ref(nodes[-1].name), kind.shape, linear.factor)
    nodes += _reshape_nodes(node, Ref(nodes[-1].name), kind.shape)
    why = (
        f"the {reduction_name} of {rows} mapped rows is the map of their {reduction_name}, "
        f"which needs far fewer than {_count(graph, linear)} operations"
    )
    return _edit_from(node, nodes, why, f"move the {reduction_name} over rows in front of the {base_name(linear.node)}")


def _rank(graph: Graph, node: Node) -> int:
    source = node.args[0] if node.args else None
    return max(1, len(graph.type_of(source).shape)) if isinstance(source, Ref) else 1


def _reduced(
    node: Node,
    suffix: str,
    source: Ref,
    dims: tuple[int, ...],
    mean: bool,
    shape: tuple[Size, ...],
    *,
    keep: bool = False,
) -> Node:
    op = "aten.mean.dim" if mean else "aten.sum.dim_IntList"
    return new_node(node, suffix, op, (source, dims, keep), contiguous_type(shape, node.type.dtype))


def _scale_nodes(node: Node, value: Ref, shape: tuple[Size, ...], factor: float, suffix: str = "scaled") -> list[Node]:
    """The multiplication by the factor, unless it is 1."""
    if factor == 1.0:
        return []
    return [new_node(node, suffix, "aten.mul.Tensor", (value, factor), contiguous_type(shape, node.type.dtype))]


def _reshape_nodes(node: Node, value: Ref, shape: tuple[Size, ...]) -> list[Node]:
    """The reshape to the shape of ``node``, if needed."""
    if shape == node.type.shape:
        return []
    kind = contiguous_type(node.type.shape, node.type.dtype)
    return [new_node(node, "shaped", "aten.reshape.default", (value, numbers(node.type.shape)), kind)]


def _edit_from(node: Node, nodes: list[Node], why: str, text: str) -> Edit:
    named_nodes = (*nodes[:-1], replace(nodes[-1], variable=node.variable))
    return Edit(node.name, Ref(named_nodes[-1].name), named_nodes, why, text)


def _count(graph: Graph, linear: _Linear, *, reduced: bool = False) -> str:
    """Multiply-adds of the linear map as text, or of the product with one vector that replaces it."""
    weight = graph.type_of(linear.weight).shape
    rows = product(linear.node.type.shape[:-1])
    input_features = weight[1 - linear.features]
    number = (rows * input_features * (weight[linear.features] if not reduced else ONE)).value(graph.sizes)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


REWRITES = (
    AlgebraRule(
        "hoist-feature-reduction",
        over_features,
        "sum_j (sum_k x_k W_jk + b_j) = sum_k x_k (sum_j W_jk) + sum_j b_j: two finite sums are exchanged.",
    ),
    AlgebraRule(
        "hoist-row-reduction",
        over_rows,
        "sum_i (x_i W + b) = (sum_i x_i) W + n b: the map is linear. The mean is the sum divided by a constant.",
    ),
)
