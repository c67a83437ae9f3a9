"""Reductions moved in front of a linear map: ``sum_j (x @ W.T + b)_j = x @ (sum_j W_j) + sum_j b_j``, and likewise over rows.

A whole matrix product becomes a product with a vector (or with a few rows): from O(M N K) operations to O(M K + N K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, dense, is_only_for, made, made_by

ONE = Size.of(1)


@dataclass(frozen=True)
class _Linear:
    """``x @ weight + bias``, times ``factor``, plus ``terms``."""

    node: Node
    x: Ref
    weight: Ref
    bias: Ref | None
    features: int
    """The dimension of ``weight`` that the output features run along."""
    factor: float
    terms: tuple[tuple[Ref, float], ...] = ()
    """Vectors along the features that are added to it, with a factor each."""


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
    """What a value is multiplied from, and the factor; nobody but ``reader`` may read it or what is between."""
    found = _through(graph, value, reader, features=False)
    return (found[0], found[1]) if found is not None else None


def _through(
    graph: Graph, value: Argument, reader: Node, *, features: bool
) -> tuple[Node, float, tuple[tuple[Ref, float], ...]] | None:
    """A value as ``node * factor + sum(vector * its factor)``.

    The vectors have one number per element of the last dimension, and are seen through where ``features`` is set.
    """
    factor, terms = 1.0, list[tuple[Ref, float]]()
    node = made_by(graph, value)
    while node is not None and is_only_for(graph, node.name, reader.name):
        name, other = base_name(node), node.args[1] if len(node.args) == 2 and not node.kwargs else None
        if name in ("mul", "div") and isinstance(other, (int, float)) and not isinstance(other, bool) and other != 0:
            factor = factor * other if name == "mul" else factor / other
        elif features and name in ("add", "sub") and isinstance(other, Ref) and _is_vector_for(graph, other, node):
            terms.append((other, factor if name == "add" else -factor))
        else:
            return node, factor, tuple(terms)
        reader, node = node, made_by(graph, node.args[0])
    return None


def _is_vector_for(graph: Graph, other: Ref, node: Node) -> bool:
    """Whether it has one number for each element of the last dimension, and the other operand the result's shape."""
    kind, source = graph.type_of(other), node.args[0]
    whole = isinstance(source, Ref) and graph.type_of(source).shape == node.type.shape
    return whole and kind.shape == node.type.shape[-1:] and kind.dtype == node.type.dtype


def _linear(graph: Graph, value: Argument, reader: Node) -> _Linear | None:
    """The linear map that a value is, seen through factors and vectors; nobody else may read what is between."""
    found = _through(graph, value, reader, features=True)
    if found is None or found[0].type.dtype not in ("float32", "float64") or found[0].kwargs:
        return None
    linear = _operands(graph, found[0], found[1])
    return replace(linear, terms=found[2]) if linear is not None else None


def _operands(graph: Graph, node: Node, factor: float) -> _Linear | None:
    name, refs = base_name(node), [item for item in node.args if isinstance(item, Ref)]
    if name == "linear":
        found = _Linear(node, refs[0], refs[1], refs[2] if len(refs) > 2 else None, 0, factor)
    elif name in ("mm", "matmul"):
        found = _Linear(node, refs[0], refs[1], None, 1, factor)
    elif name == "addmm" and len(node.args) == 3:
        found = _Linear(node, refs[1], refs[2], refs[0], 1, factor)
    else:
        return None
    plain = len(graph.type_of(found.weight).shape) == 2 and len(graph.type_of(found.x).shape) >= 2
    if found.bias is not None and len(graph.type_of(found.bias).shape) != 1:
        return None
    return found if plain else None


def over_features(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over the output features: the weights' own sum is all that is needed."""
    reduction = _reduction(node, _rank(graph, node))
    linear = _linear(graph, node.args[0], node) if reduction is not None else None
    if reduction is None or linear is None or reduction.dims != (len(linear.node.type.shape) - 1,):
        return None
    dtype, word = node.type.dtype, "mean" if reduction.mean else "sum"
    x, weight = graph.type_of(linear.x), graph.type_of(linear.weight)
    depth = weight.shape[1 - linear.features]
    added = [_reduced(node, "weights", linear.weight, (linear.features,), reduction.mean, (depth,))]
    vector = Ref(added[-1].name)
    added.append(made(node, "product", "aten.matmul.default", (linear.x, vector), dense(x.shape[:-1], dtype)))
    if linear.bias is not None:
        added.append(made(node, "bias", f"aten.{word}.default", (linear.bias,), dense((), dtype)))
        args = (Ref(added[-2].name), Ref(added[-1].name))
        added.append(made(node, "shifted", "aten.add.Tensor", args, dense(x.shape[:-1], dtype)))
    added += _scaled(node, Ref(added[-1].name), x.shape[:-1], linear.factor)
    for i, (term, factor) in enumerate(linear.terms):
        before = Ref(added[-1].name)
        added.append(made(node, f"term{i}", f"aten.{word}.default", (term,), dense((), dtype)))
        added += _scaled(node, Ref(added[-1].name), (), factor, f"factor{i}")
        args = (before, Ref(added[-1].name))
        added.append(made(node, f"with_term{i}", "aten.add.Tensor", args, dense(x.shape[:-1], dtype)))
    added += _shaped(node, Ref(added[-1].name), x.shape[:-1])
    n = weight.shape[linear.features]
    why = (
        f"the {word} over {n} outputs is one product with the {word} of the weights, "
        f"so {_count(graph, linear)} operations become {_count(graph, linear, reduced=True)}"
    )
    return _finish(node, added, why, f"move the {word} over features in front of the {base_name(linear.node)}")


def over_rows(graph: Graph, node: Node) -> Edit | None:
    """A sum or mean over rows: the map of the rows' sum."""
    reduction = _reduction(node, _rank(graph, node))
    linear = _linear(graph, node.args[0], node) if reduction is not None else None
    if reduction is None or linear is None or linear.terms or len(linear.node.type.shape) - 1 in reduction.dims:
        return None
    x = graph.type_of(linear.x)
    rows = product([x.shape[d] for d in reduction.dims])
    if linear.bias is not None and not reduction.mean and not rows.is_constant:
        return None
    shape = tuple(ONE if d in reduction.dims else size for d, size in enumerate(x.shape))
    word = "mean" if reduction.mean else "sum"
    added = [_reduced(node, "rows", linear.x, reduction.dims, reduction.mean, shape, keep=True)]
    kind = dense((*shape[:-1], linear.node.type.shape[-1]), node.type.dtype)
    # The bias stays apart: n rows carry it n times.
    op = "aten.linear.default" if linear.features == 0 else "aten.matmul.default"
    added.append(made(node, "mapped", op, (Ref(added[-1].name), linear.weight), kind))
    if linear.bias is not None:
        bias = linear.bias
        if not reduction.mean:
            times = made(
                node,
                "times",
                "aten.mul.Tensor",
                (bias, rows.constant),
                dense(graph.type_of(bias).shape, node.type.dtype),
            )
            added.append(times)
            bias = Ref(times.name)
        added.append(made(node, "shifted", "aten.add.Tensor", (Ref(f"{node.name}_mapped"), bias), kind))
    added += _scaled(node, Ref(added[-1].name), kind.shape, linear.factor)
    added += _shaped(node, Ref(added[-1].name), kind.shape)
    why = (
        f"the {word} of {rows} mapped rows is the map of their {word}, so {_count(graph, linear)} operations become few"
    )
    return _finish(node, added, why, f"move the {word} over rows in front of the {base_name(linear.node)}")


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
    return made(node, suffix, op, (source, dims, keep), dense(shape, node.type.dtype))


def _scaled(node: Node, value: Ref, shape: tuple[Size, ...], factor: float, suffix: str = "scaled") -> list[Node]:
    """The multiplication by a factor that was seen through, where there is one."""
    if factor == 1.0:
        return []
    return [made(node, suffix, "aten.mul.Tensor", (value, factor), dense(shape, node.type.dtype))]


def _shaped(node: Node, value: Ref, shape: tuple[Size, ...]) -> list[Node]:
    """The reshape to what readers expect, where it is needed."""
    if shape == node.type.shape:
        return []
    wanted = tuple(size.constant if size.is_constant else size for size in node.type.shape)
    return [made(node, "shaped", "aten.reshape.default", (value, wanted), dense(node.type.shape, node.type.dtype))]


def _finish(node: Node, added: list[Node], why: str, text: str) -> Edit:
    nodes = (*added[:-1], replace(added[-1], variable=node.variable))
    return Edit(node.name, Ref(nodes[-1].name), nodes, why, text)


def _count(graph: Graph, linear: _Linear, *, reduced: bool = False) -> str:
    """Multiply-adds of the map in words, or of the product with one vector in its place."""
    weight = graph.type_of(linear.weight).shape
    rows = product(linear.node.type.shape[:-1])
    depth = weight[1 - linear.features]
    number = (rows * depth * (weight[linear.features] if not reduced else ONE)).value(graph.sizes)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


RULES = (
    AlgebraRule(
        "sum-before-features",
        over_features,
        "sum_j (sum_k x_k W_jk + b_j) = sum_k x_k (sum_j W_jk) + sum_j b_j: two finite sums change places.",
    ),
    AlgebraRule(
        "sum-before-rows",
        over_rows,
        "sum_i (x_i W + b) = (sum_i x_i) W + n b: the map is linear. The mean is the sum over a number.",
    ),
)
