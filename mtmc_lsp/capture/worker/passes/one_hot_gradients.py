"""Rewrites the gradient of a gather of one element per row: a comparison of column numbers instead of a scatter into zeros.

The comparison fuses with its neighbours; a scatter needs a tensor of zeros and atomic additions.
"""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.graph import INPUT_DEVICE, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

ZEROS = ("zeros", "new_zeros", "zeros_like")
ONE = Size.of(1)


def compare_instead_of_scattering(graph: Graph) -> Graph:
    """Replace each addition of one element per row to zeros. Only graphs with a backward pass contain it often."""
    if graph.backward is None:
        return graph
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _compared(graph, node) or [node]
    return replace(graph, nodes=tuple(nodes))


def _compared(graph: Graph, node: Node) -> list[Node] | None:
    """The nodes that compute ``zeros.scatter_add(dim, index, source)``; ``None`` for other nodes."""
    if node.op != "aten.scatter_add.default":
        return None
    base, dim, index, source = node.args
    if not (isinstance(base, Ref) and isinstance(index, Ref) and isinstance(source, Ref) and isinstance(dim, int)):
        return None
    zeros, kind = graph.named.get(base.name), node.type
    rank = len(kind.shape)
    dim %= max(rank, 1)
    others = [i for i in range(rank) if i != dim]
    shape = graph.type_of(index).shape
    is_one_per_row = shape == graph.type_of(source).shape and shape[dim] == ONE
    # Fewer rows than the result has would leave rows of zeros.
    if zeros is None or zeros.word not in ZEROS or not is_one_per_row or any(shape[i] != kind.shape[i] for i in others):
        return None
    size, line = kind.shape[dim], node.line
    along = tuple(size if i == dim else ONE for i in range(rank))
    name = node.name
    texts = (f"{name}_columns", f"{name}_column", f"{name}_is_row", f"{name}_zero")
    numbers = TensorType((size,), "int64", (ONE,))
    return [
        Node(texts[0], "aten.arange.default", (size,), {"device": INPUT_DEVICE}, (numbers,), line),
        Node(
            texts[1],
            "aten.view.default",
            (Ref(texts[0]), along),
            {},
            (TensorType(along, "int64", contiguous_stride(along)),),
            line,
        ),
        Node(texts[2], "aten.eq.Tensor", (Ref(texts[1]), index), {}, (replace(kind, dtype="bool"),), line),
        Node(
            texts[3],
            "aten.zeros.default",
            ((),),
            {"dtype": kind.dtype, "device": INPUT_DEVICE},
            (TensorType((), kind.dtype, ()),),
            line,
        ),
        replace(node, op="aten.where.self", args=(Ref(texts[2]), source, Ref(texts[3])), kwargs={}),
    ]
