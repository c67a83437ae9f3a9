"""Attention written out: a library's attention in float32, whose products then run on tensor cores each by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, dense, made

NAME = "scaled_dot_product_attention"


def written_out(graph: Graph, node: Node) -> Edit | None:
    """``softmax(q @ k.T * scale) @ v`` in float32, of operands of one shape but for the sequences, without a mask."""
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
    step = graph.type_of(key).stride
    turned = TensorType((*k[:-2], k[-1], k[-2]), "float32", (*step[:-2], step[-1], step[-2]))
    pairs = dense((*q[:-1], k[-2]), "float32")
    keys = made(node, "keys", "aten.transpose.int", (key, -2, -1), turned)
    scores = made(node, "scores", "aten.matmul.default", (query, Ref(keys.name)), pairs)
    scaled = made(node, "scaled", "aten.mul.Tensor", (Ref(scores.name), scale), pairs)
    weights = made(node, "weights", "aten.softmax.int", (Ref(scaled.name), -1), pairs)
    product = made(node, "result", "aten.matmul.default", (Ref(weights.name), value), dense(node.type.shape, "float32"))
    last = _in_order(node, product, order) if order != tuple(range(len(order))) else ()
    return Edit(
        node.name,
        Ref(last[-1].name if last else product.name),
        (keys, scores, scaled, weights, *((product, *last) if last else (replace(product, variable=node.variable),))),
        "attention in float32 has no kernel for tensor cores in the library; written out, each of its two products can run there",
        "write out the attention",
    )


def memory_order(kind: TensorType) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the outermost in memory to the densest; ``None`` where it is not dense."""
    for order in permutations(range(len(kind.shape))):
        inner = tuple(kind.shape[dim] for dim in order)
        steps = zip(order, contiguous_stride(inner), strict=True)
        if all(kind.stride[dim] == step or kind.shape[dim] == Size.of(1) for dim, step in steps):
            return order
    return None


def _in_order(node: Node, product: Node, order: tuple[int, ...]) -> tuple[Node, ...]:
    """Nodes that bring the result into the order in memory that the library's has: heads within places, on a GPU."""
    own = node.type
    inner = tuple(own.shape[dim] for dim in order)
    turned_type = TensorType(inner, "float32", tuple(product.type.stride[dim] for dim in order))
    turned = made(node, "turned", "aten.permute.default", (Ref(product.name), order), turned_type)
    copied = made(node, "copied", "aten.clone.default", (Ref(turned.name),), dense(inner, "float32"))
    copied = replace(copied, kwargs={"memory_format": "torch.contiguous_format"})
    back = tuple(order.index(dim) for dim in range(len(order)))
    return (
        turned,
        copied,
        made(node, "back", "aten.permute.default", (Ref(copied.name), back), own, variable=node.variable),
    )


def _is_plain(node: Node) -> bool:
    """Whether there is no mask, no dropout, no causal limit, and as many heads of each."""
    usual: dict[str, Argument] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)
    return all(given.get(name, default) == default for name, default in usual.items())


def _scale(node: Node, width: Size) -> float | None:
    given = node.kwargs.get("scale")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    return float(width.constant) ** -0.5 if given is None and width.is_constant else None


RULES = (
    AlgebraRule(
        "written-out-attention",
        written_out,
        "It is the definition of attention (PyTorch's documentation of scaled_dot_product_attention): a softmax over the keys of "
        "scaled products, and a product of these weights with the values.",
    ),
)
