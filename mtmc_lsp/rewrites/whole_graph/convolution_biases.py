"""Separates the biases of all convolutions from the convolutions.

On a GPU, PyTorch calls cuDNN without the bias and then adds it to the result in place: one more launch, which reads and writes
the whole image. As an operation of the graph, the addition becomes part of the kernel behind the convolution. Values are rounded
as before: first the convolution's result, then the sum.
"""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.graph import Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import (
    CONVOLUTIONS,
    CannotRewrite,
    Chain,
    base_name,
    contiguous_type,
    numbers,
    replace_each,
    uses_other_outputs,
)

RULE = "separate-biases"
BIAS = 2
"""Position of the bias among a convolution's arguments."""
ONE = Size.of(1)


def has_bias(graph: Graph, node: Node) -> bool:
    """Whether the node is a convolution of a batch, with a bias."""
    if base_name(node) not in CONVOLUTIONS or node.kwargs or len(node.args) <= BIAS or uses_other_outputs(graph, node):
        return False
    weight = node.args[1]
    is_batch = isinstance(weight, Ref) and len(graph.type_of(weight).shape) == len(node.type.shape)
    return is_batch and isinstance(node.args[BIAS], Ref)


def matches(graph: Graph) -> bool:
    """Whether a convolution has a bias."""
    return any(has_bias(graph, node) for node in graph.nodes)


def without_biases(graph: Graph) -> Graph:
    """``graph`` with an addition behind each convolution that has a bias.

    Raises:
        CannotRewrite: there is none.
    """
    if not matches(graph):
        raise CannotRewrite("no convolution has a bias")

    def replacement(node: Node, node_now: Node) -> tuple[list[Node], Ref]:
        bias, kind = node_now.args[BIAS], node.type
        per_channel = tuple(size if d == 1 else ONE for d, size in enumerate(kind.shape))
        chain = Chain(node, graph, "bias")
        shaped = chain.add("reshape.default", (bias, numbers(per_channel)), contiguous_type(per_channel, kind.dtype))
        total = chain.add("add.Tensor", (Ref(node.name), shaped), kind)
        args = (*node_now.args[:BIAS], None, *node_now.args[BIAS + 1 :])
        convolution = replace(node_now, args=args, variable="")
        return [convolution, *chain.nodes_with_variable()], total

    return replace_each(graph, lambda node: has_bias(graph, node), replacement)
