"""Decomposes float32 attention of the library into two products and a softmax; each product can then use tensor cores."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, contiguous_type, new_node

NAME = "scaled_dot_product_attention"


def decompose(graph: Graph, node: Node) -> Edit | None:
    """Float32 attention without a mask as ``softmax(q @ k.T * scale) @ v``; only the sequence lengths may differ."""
    if base_name(node) != NAME or node.type.dtype != "float32" or not _is_plain(node):
        return None
    query, key, value = node.args[:3]
    if not (isinstance(query, Ref) and isinstance(key, Ref) and isinstance(value, Ref)):
        return None
    q, k, v = (graph.type_of(ref).shape for ref in (query, key, value))
    scale = _scale(node, q[-1])
    order = memory_order(node.type)
    if scale is None or not len(q) == len(k) == len(v) > 2 or not q[:-2] == k[:-2] == v[:-2] or order is None:
        return None
    strides = graph.type_of(key).stride
    transposed_type = TensorType((*k[:-2], k[-1], k[-2]), "float32", (*strides[:-2], strides[-1], strides[-2]))
    pairs = contiguous_type((*q[:-1], k[-2]), "float32")
    keys = new_node(node, "keys", "aten.transpose.int", (key, -2, -1), transposed_type)
    scores = new_node(node, "scores", "aten.matmul.default", (query, Ref(keys.name)), pairs)
    scaled = new_node(node, "scaled", "aten.mul.Tensor", (Ref(scores.name), scale), pairs)
    weights = new_node(node, "weights", "aten.softmax.int", (Ref(scaled.name), -1), pairs)
    product = new_node(
        node, "result", "aten.matmul.default", (Ref(weights.name), value), contiguous_type(node.type.shape, "float32")
    )
    layout_nodes = _in_memory_order(node, product, order) if order != tuple(range(len(order))) else ()
    return Edit(
        node.name,
        Ref(layout_nodes[-1].name if layout_nodes else product.name),
        (
            keys,
            scores,
            scaled,
            weights,
            *((product, *layout_nodes) if layout_nodes else (replace(product, variable=node.variable),)),
        ),
        "the library has no tensor-core kernel for float32 attention; decomposed, each of its two products can use tensor cores",
        "decompose the attention",
    )


def memory_order(kind: TensorType) -> tuple[int, ...] | None:
    """The dimensions of a tensor ordered from the largest to the smallest stride; ``None`` if it is not dense."""
    for order in permutations(range(len(kind.shape))):
        inner = tuple(kind.shape[dim] for dim in order)
        steps = zip(order, contiguous_stride(inner), strict=True)
        if all(kind.stride[dim] == step or kind.shape[dim] == Size.of(1) for dim, step in steps):
            return order
    return None


def _in_memory_order(node: Node, product: Node, order: tuple[int, ...]) -> tuple[Node, ...]:
    """Nodes that give the result the library's memory layout, which on a GPU has heads inside positions."""
    output_type = node.type
    inner_shape = tuple(output_type.shape[dim] for dim in order)
    permuted_type = TensorType(inner_shape, "float32", tuple(product.type.stride[dim] for dim in order))
    permuted = new_node(node, "permuted", "aten.permute.default", (Ref(product.name), order), permuted_type)
    copied = new_node(
        node, "copied", "aten.clone.default", (Ref(permuted.name),), contiguous_type(inner_shape, "float32")
    )
    copied = replace(copied, kwargs={"memory_format": "torch.contiguous_format"})
    inverse = tuple(order.index(dim) for dim in range(len(order)))
    return (
        permuted,
        copied,
        new_node(
            node, "restored", "aten.permute.default", (Ref(copied.name), inverse), output_type, variable=node.variable
        ),
    )


def _is_plain(node: Node) -> bool:
    """Whether the call has no mask, no dropout, no causality and no grouped heads."""
    defaults: dict[str, Argument] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    values = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)
    return all(values.get(name, default) == default for name, default in defaults.items())


def _scale(node: Node, width: Size) -> float | None:
    scale = node.kwargs.get("scale")
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return float(scale)
    return float(width.constant) ** -0.5 if scale is None and width.is_constant else None


REWRITES = (
    AlgebraRule(
        "unfused-attention",
        decompose,
        "It is the definition of attention (PyTorch's documentation of scaled_dot_product_attention): a softmax over the keys of "
        "scaled products, and a product of these weights with the values.",
    ),
)
