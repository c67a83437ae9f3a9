"""Runs convolutions of images with one position as linear layers: squeeze-and-excitation blocks of vision networks have them.

With one position and a kernel of one position, a convolution is the product of all images with the weights. The library of
convolutions chooses kernels for large images, and may convert the layout of each operand in further launches. A linear layer is
one launch, and reads both operands as they are. Products are summed in float32 and rounded once, as before.
"""

from __future__ import annotations

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
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

RULE = "linear-for-one-position"
DTYPES = ("float16", "bfloat16")
"""In float32, the settings for TF32 of convolutions and of products may differ."""
PADDING, GROUPS = 4, 6
"""Positions of the padding and the number of groups among a convolution's arguments."""
ONE = Size.of(1)


def is_linear(graph: Graph, node: Node) -> bool:
    """Whether the node is a convolution of dense images with one position each, without a bias."""
    name = base_name(node)
    if name not in CONVOLUTIONS or "transpose" in name or node.kwargs or node.type.dtype not in DTYPES:
        return False
    x, weight, *rest = node.args
    bias = rest[0] if rest else None
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or bias is not None or uses_other_outputs(graph, node):
        return False
    kinds = graph.type_of(x), graph.type_of(weight), node.type
    is_padded = len(node.args) > PADDING and not _is_zero(node.args[PADDING])
    is_grouped = len(node.args) > GROUPS and node.args[GROUPS] != 1
    if is_padded or is_grouped or len(kinds[0].shape) != len(kinds[1].shape):
        return False
    return all(kind.is_contiguous and all(size == ONE for size in kind.shape[2:]) for kind in kinds)


def matches(graph: Graph) -> bool:
    """Whether a convolution is a linear layer."""
    return any(is_linear(graph, node) for node in graph.nodes)


def with_linear_layers(graph: Graph) -> Graph:
    """``graph`` with a linear layer in place of each convolution of images with one position.

    Raises:
        CannotRewrite: there is none.
    """
    if not matches(graph):
        raise CannotRewrite("no convolution has images with one position")

    def replacement(node: Node, node_now: Node) -> tuple[list[Node], Ref]:
        chain = Chain(node, graph, "linear")
        operands: list[Argument] = []
        for ref, value in zip(node.args[:2], node_now.args[:2], strict=True):
            assert isinstance(ref, Ref)
            kind = graph.type_of(ref)
            flat = kind.shape[:2]
            operands.append(chain.add("reshape.default", (value, numbers(flat)), contiguous_type(flat, kind.dtype)))
        shape = node.type.shape
        product = chain.add("linear.default", tuple(operands), contiguous_type(shape[:2], node.type.dtype))
        result = chain.add("reshape.default", (product, numbers(shape)), node.type)
        return chain.nodes_with_variable(), result

    return replace_each(graph, lambda node: is_linear(graph, node), replacement)


def _is_zero(padding: Argument) -> bool:
    """Whether a convolution adds no border to an image with one position."""
    if isinstance(padding, str):
        return True  # "same" for a kernel of one position, or "valid"
    return all(size == 0 for size in (padding if isinstance(padding, tuple) else (padding,)))
