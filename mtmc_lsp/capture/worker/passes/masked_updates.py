"""Rewrites updates of masked elements, such as ``x[mask] -= 1``, to ``torch.where(mask, x - 1, x)``.

The trace gathers the selected elements into a tensor, computes on it, and scatters the results. The number of elements is known
only at run time. Elementwise operations give the same results on the full tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Target

ELEMENTWISE = frozenset(
    "add sub rsub mul div neg abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal square pow sin cos tan tanh sigmoid relu "
    "gelu silu softplus leaky_relu elu erf floor ceil round trunc sign clamp clamp_min clamp_max minimum maximum where _to_copy "
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf "
    "remainder fmod lerp addcmul addcdiv nan_to_num clone".split()
)
"""Elementwise operations."""


class _CannotExpand(Exception):
    """The update needs the selected elements alone."""


def rewrite_masked_updates(graph: Graph) -> Graph:
    """Replace each masked update by a choice between the new and the old value of every element."""
    rewriter = _Rewriter(graph)
    for node in graph.nodes:
        rewriter.add(node)
    return replace(graph, nodes=tuple(rewriter.nodes))


def refuse_unknown_sizes(graph: Graph, target: Target) -> None:
    """Refuse tensors whose size depends on the values of a tensor.

    Raises:
        TargetUnsupported: names the line of the first such tensor.
    """
    for node in graph.nodes:
        if any(_is_unknown(size, graph) for kind in node.outputs for size in kind.shape):
            raise TargetUnsupported(
                f"{target.qualname} creates a tensor whose size depends on the values of a tensor, as x[mask] does",
                where=Location(target.path, node.line or target.start_line),
                remedy=_remedy(graph, target),
            )


def _remedy(graph: Graph, target: Target) -> str:
    """Names the line of a product of the selected rows, as the experts of a mixture compute, if there is one."""
    for node in graph.nodes:
        is_product = node.op.split(".")[1] in MATRIX_PRODUCTS
        if is_product and node.line and any(_is_unknown(size, graph) for kind in node.outputs for size in kind.shape):
            return (
                f"Line {node.line} of {Path(target.path).name} multiplies the selected rows by a matrix: optimise the function "
                "or module of this computation alone, such as one expert, with a named size for the rows (x=f32[N,64])."
            )
    return (
        "Keep the shape with torch.where(mask, x, 0.0) or x[mask] = 0, or move this line into a separate function and "
        "optimise the rest."
    )


def _is_unknown(size: Size, graph: Graph) -> bool:
    return any(re.fullmatch(r"u\d+", name) and name not in graph.sizes for name in size.symbols())


class _Rewriter:
    """Rewrites the nodes in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self._used_names = {item.name for item in graph.inputs} | set(graph.named)

    def add(self, node: Node) -> None:
        """Add a node or its replacement."""
        mask = self._mask(node, 1) if node.op.startswith("aten.index_put.") and len(node.args) == 3 else None
        length = len(self.nodes)
        try:
            replacement = self._choice(node, mask) if mask is not None else node
        except _CannotExpand:
            del self.nodes[length:]
            replacement = node
        self.nodes.append(replacement)

    def _choice(self, node: Node, mask: Ref) -> Node:
        base, value = node.args[0], node.args[2]
        if not isinstance(base, Ref) or not isinstance(value, Ref):
            raise _CannotExpand
        kind, picked = self.graph.type_of(base), self.graph.type_of(value)
        if kind.dtype != picked.dtype:
            raise _CannotExpand
        inner = len(kind.shape) - len(self.graph.type_of(mask).shape)
        new = self._on_all_elements(value, mask, kind, inner, node)
        return replace(node, op="aten.where.self", args=(self._expanded_mask(mask, inner, node), new, base))

    def _mask(self, node: Node, position: int) -> Ref | None:
        """The mask that selects the elements which the node reads or writes; ``None`` if other indices select them."""
        index = node.args[position]
        if not isinstance(index, tuple) or len(index) != 1 or not isinstance(index[0], Ref):
            return None
        return index[0] if self.graph.type_of(index[0]).dtype == "bool" else None

    def _on_all_elements(self, value: Ref, mask: Ref, kind: TensorType, inner: int, update: Node) -> Ref:
        """Compute a value of the selected elements for all elements.

        Args:
            value: one row per selected element, or one row for all.
            kind: the tensor that is updated.
            inner: number of dimensions after those of the mask.
        """
        value_type = self.graph.type_of(value)
        if not value_type.shape or not any(_is_unknown(size, self.graph) for size in value_type.shape):
            if len(value_type.shape) <= inner:
                return value
            if len(value_type.shape) == inner + 1 and value_type.shape[0] == Size.of(1):
                shape = value_type.shape[1:]
                return self._add(update, "row", "aten.view.default", (value, shape), _dense(shape, value_type.dtype))
            raise _CannotExpand
        node = self.graph.named[value.name]
        name = node.op.split(".")[1]
        if name == "index" and (selecting_mask := self._mask(node, 1)) is not None and self._same(selecting_mask, mask):
            source = node.args[0]
            if isinstance(source, Ref) and self.graph.type_of(source).shape == kind.shape:
                return source
        if name not in ELEMENTWISE or len(value_type.shape) != inner + 1:
            raise _CannotExpand

        def spread(argument: Argument) -> Argument:
            if isinstance(argument, Ref):
                return self._on_all_elements(argument, mask, kind, inner, update)
            if isinstance(argument, Size) and _is_unknown(argument, self.graph):
                raise _CannotExpand
            return argument

        args = tuple(map(spread, node.args))
        return self._add(node, "everywhere", node.op, args, _dense(kind.shape, value_type.dtype))

    def _expanded_mask(self, mask: Ref, inner: int, update: Node) -> Ref:
        """The mask with trailing dimensions of size 1."""
        if not inner:
            return mask
        shape = (*self.graph.type_of(mask).shape, *[Size.of(1)] * inner)
        return self._add(update, "mask", "aten.view.default", (mask, shape), _dense(shape, "bool"))

    def _same(self, a: Ref, b: Ref) -> bool:
        """Whether two values are identical or computed in the same way: ``x[y > 0] += z[y > 0]`` compares twice."""
        nodes = self.graph.named
        if a == b or a.name not in nodes or b.name not in nodes:
            return a == b
        left, right = nodes[a.name], nodes[b.name]
        if left.draws or (left.op, left.kwargs, a.index) != (right.op, right.kwargs, b.index):
            return False
        return len(left.args) == len(right.args) and all(map(self._same_argument, left.args, right.args))

    def _same_argument(self, a: Argument, b: Argument) -> bool:
        if isinstance(a, Ref) and isinstance(b, Ref):
            return self._same(a, b)
        return type(a) is type(b) and a == b

    def _add(self, origin: Node, suffix: str, op: str, args: tuple[Argument, ...], kind: TensorType) -> Ref:
        name = next(name for name in _names(f"{origin.name}_{suffix}") if name not in self._used_names)
        self._used_names.add(name)
        kwargs = origin.kwargs if op == origin.op else {}
        self.nodes.append(Node(name, op, args, kwargs, (kind,), origin.line))
        return Ref(name)


def _names(stem: str) -> Iterator[str]:
    while True:
        yield stem
        stem += "_"


def _dense(shape: tuple[Size, ...], dtype: str) -> TensorType:
    return TensorType(shape, dtype, contiguous_stride(shape))
