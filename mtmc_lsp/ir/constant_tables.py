"""Finds tables: tensors that depend only on sizes and constants, such as masks, positions and rotary embeddings.

Torch computes an expensive table once for each device and size. A cheap one, such as ``torch.arange``, is computed inside the
kernels, which is free. Where no kernel computes it, a launcher keeps it as well: its launch takes as long as that of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, InputKind, Node
from mtmc_lsp.ir.run_time_numbers import numbers_of_node

HEAVY = frozenset(
    "sin cos tan tanh exp exp2 expm1 log log2 log1p pow sqrt rsqrt sigmoid erf atan atan2 softmax sum mean prod amax amin cumsum "
    "cumprod max min argmax argmin sort argsort topk mm bmm matmul outer einsum index_put scatter index_copy".split()
)
"""Operations that cost much more than index arithmetic."""
MOST_CHEAP_NODES = 24
"""Number of cheap operations that a kernel repeats for each element without a noticeable cost."""
LARGEST_BYTES = 16 << 20
"""Larger tables stay inside the kernels. A table must also be smaller than the arguments."""
DRAWN = ("rand", "dropout", "bernoulli", "normal", "multinomial", "empty")
"""Words in the names of operations whose results differ from call to call."""


@dataclass(frozen=True)
class Tables:
    """The nodes that are computed once, and those of them that other nodes read."""

    nodes: frozenset[str] = frozenset()
    results: tuple[str, ...] = ()


def constant_tables(graph: Graph) -> Tables:
    """The tables of a graph. Tensors that the caller gets are none, because the caller may change them."""
    constant, returned, limit = _constants(graph), _returned(graph), _limit(graph)
    chosen: set[str] = set()

    def choose(name: str) -> None:
        """Choose this node, or else the nodes that it reads, if they are worth it."""
        if name in chosen or name not in constant or not _is_expensive(graph, constant[name]):
            return
        if _bytes(graph, graph.node(name)) <= limit and not constant[name] & returned:
            chosen.update(constant[name])
        else:
            for ref in graph.node(name).inputs():
                choose(ref.name)

    for node in graph.nodes:
        if node.name not in constant:
            for ref in node.inputs():
                choose(ref.name)
    read = {ref.name for node in graph.nodes if node.name not in chosen for ref in node.inputs()}
    return Tables(frozenset(chosen), tuple(node.name for node in graph.nodes if node.name in chosen & read))


def may_be_kept(graph: Graph) -> frozenset[str]:
    """The nodes that a launcher may compute once for each device and size, if no kernel computes them."""
    returned, limit = _returned(graph), _limit(graph)
    begun = {ref.name for node in graph.nodes if _may_write_into_operand(node) for ref in node.inputs()}
    return frozenset(
        name for name in _constants(graph) if name not in returned | begun and _bytes(graph, graph.node(name)) <= limit
    )


def _may_write_into_operand(node: Node) -> bool:
    """Whether a kernel may write its result into the tensor that it begins with: a loop its states, a scatter its sums."""
    is_loop = node.loop is not None or node.row_loop is not None
    return is_loop or "scatter" in node.op or ".index_add." in node.op or ".index_put." in node.op


def _constants(graph: Graph) -> dict[str, frozenset[str]]:
    """Nodes without inputs from outside, and all nodes that each depends on, itself included."""
    constant: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        sources = [constant.get(ref.name) for ref in node.inputs()]
        if all(source is not None for source in sources) and _is_repeatable(node):
            constant[node.name] = frozenset({node.name}).union(*(source for source in sources if source is not None))
    return constant


def _returned(graph: Graph) -> frozenset[str]:
    """The constant nodes that the caller gets, and those that they depend on."""
    constant = _constants(graph)
    return frozenset().union(*(constant.get(ref.name, frozenset()) for ref in graph.escaping if ref is not None))


def _limit(graph: Graph) -> int:
    return min(LARGEST_BYTES, _argument_bytes(graph))


def _is_repeatable(node: Node) -> bool:
    name = node.op.split(".")[1]
    return (
        node.op.startswith("aten.")
        and not any(word in name for word in DRAWN)
        # A factor that differs from call to call is applied in the kernels.
        and (name in HEAVY or not any(numbers_of_node(node)))
        and len(node.outputs) == 1
    )


def _is_expensive(graph: Graph, names: frozenset[str]) -> bool:
    operations = [graph.node(name).op.split(".")[1] for name in names]
    return len(operations) > MOST_CHEAP_NODES or not HEAVY.isdisjoint(operations)


def _bytes(graph: Graph, node: Node) -> int:
    return node.type.numel.value(graph.sizes) * itemsize(node.type.dtype)


def _argument_bytes(graph: Graph) -> int:
    kinds = [item.type for item in graph.inputs if item.kind is InputKind.ARGUMENT]
    return sum(kind.numel.value(graph.sizes) * itemsize(kind.dtype) for kind in kinds)
