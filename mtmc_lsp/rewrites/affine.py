"""Folds scale and shift after a convolution into its weights and bias, which saves one pass over the activations."""

from __future__ import annotations

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import (
    CONVOLUTIONS,
    AlgebraRule,
    Chain,
    Edit,
    base_name,
    contiguous_type,
    is_only_reader,
    numbers,
    producer,
    uses_other_outputs,
)


class _Chain(Chain):
    """New nodes, each a small elementwise operation on weights, biases or statistics."""

    def elementwise(self, op: str, *args: Argument, shape_of: Ref) -> Ref:
        """Append an operation whose result has the shape of ``shape_of``."""
        kind = self.type_of(shape_of)
        return self.add(op, args, contiguous_type(kind.shape, kind.dtype))


def _convolution(graph: Graph, node: Node) -> Node | None:
    """The convolution that produces the first operand of ``node`` and has no other reader."""
    inner = producer(graph, node.args[0]) if node.args else None
    if inner is None or base_name(inner) not in CONVOLUTIONS or not is_only_reader(graph, inner.name, node.name):
        return None
    return inner if inner.type.dtype in ("float32", "float64") and inner.type == node.type else None


def _edit(node: Node, inner: Node, chain: _Chain, weight: Ref, bias: Ref | None, why: str, text: str) -> Edit:
    args = (inner.args[0], weight, bias, *inner.args[3:])
    new = Node(f"{node.name}_folded", inner.op, args, inner.kwargs, inner.outputs, node.line, node.variable)
    return Edit(node.name, Ref(new.name), (*chain.nodes, new), why, text)


def scale(graph: Graph, node: Node) -> Edit | None:
    """``conv(x, w, b) * c = conv(x, w * c, b * c)`` for a number c."""
    inner = _convolution(graph, node)
    number = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    if inner is None or base_name(node) not in ("mul", "div") or not isinstance(number, (int, float)):
        return None
    weight, bias = inner.args[1], inner.args[2] if len(inner.args) > 2 else None
    if isinstance(number, bool) or number == 0 or not isinstance(weight, Ref):
        return None
    chain = _Chain(node, graph, "fold")
    op = f"{base_name(node)}.Tensor"
    new_weight = chain.elementwise(op, weight, number, shape_of=weight)
    new_bias = chain.elementwise(op, bias, number, shape_of=bias) if isinstance(bias, Ref) else None
    why = f"the factor {number!r} becomes part of the weights, which saves a pass over the result"
    return _edit(node, inner, chain, new_weight, new_bias, why, f"fold the {base_name(node)} into the convolution")


def normalise(graph: Graph, node: Node) -> Edit | None:
    """Batch norm in evaluation mode: ``(conv(x, w, b) - mean) * g + beta`` with ``g = gamma / sqrt(var + eps)``."""
    inner = _convolution(graph, node)
    statistics = _statistics(node)
    if inner is None or statistics is None or uses_other_outputs(graph, node):
        return None
    gamma, beta, mean, var, eps = statistics
    weight, bias = inner.args[1], inner.args[2] if len(inner.args) > 2 else None
    if not isinstance(mean, Ref) or not isinstance(var, Ref) or not isinstance(weight, Ref):
        return None
    transposed = "transpose" in base_name(inner)
    if transposed and not _is_ungrouped(inner):
        return None
    chain = _Chain(node, graph, "fold")
    factor = chain.elementwise("rsqrt.default", chain.elementwise("add.Tensor", var, eps, shape_of=var), shape_of=var)
    if isinstance(gamma, Ref):
        factor = chain.elementwise("mul.Tensor", factor, gamma, shape_of=var)
    rank = len(graph.type_of(weight).shape)
    channels = graph.type_of(var).shape[0]
    channel_dim = 1 if transposed else 0
    weight_shape = tuple(channels if d == channel_dim else Size.of(1) for d in range(rank))
    weight_type = contiguous_type(weight_shape, node.type.dtype)
    shaped = chain.add("reshape.default", (factor, numbers(weight_shape)), weight_type)
    new_weight = chain.elementwise("mul.Tensor", weight, shaped, shape_of=weight)
    centred = (
        chain.elementwise("sub.Tensor", bias, mean, shape_of=var)
        if isinstance(bias, Ref)
        else chain.elementwise("neg.default", mean, shape_of=var)
    )
    new_bias = chain.elementwise("mul.Tensor", centred, factor, shape_of=var)
    if isinstance(beta, Ref):
        new_bias = chain.elementwise("add.Tensor", new_bias, beta, shape_of=var)
    why = "in evaluation mode, batch norm is a fixed scale and shift per channel, which the weights and the bias can absorb"
    return _edit(node, inner, chain, new_weight, new_bias, why, "fold the batch norm into the convolution")


def _statistics(node: Node) -> tuple[Argument, ...] | None:
    """Weight, bias, running mean, running variance and epsilon of a batch norm in evaluation mode."""
    name, args = base_name(node), node.args
    if name == "_native_batch_norm_legit_no_training" and len(args) == 7:
        return (*args[1:5], args[6])
    if name == "batch_norm" and len(args) > 7 and args[5] is False:
        return (*args[1:5], args[7])
    return None


def _is_ungrouped(convolution: Node) -> bool:
    """Whether a transposed convolution ``conv_transpose(x, w, b, stride, padding, output_padding, groups)`` has one group."""
    return len(convolution.args) < 7 or convolution.args[6] == 1


REWRITES = (
    AlgebraRule("fold-scale-into-convolution", scale, "A convolution is linear in its weights and its bias."),
    AlgebraRule(
        "fold-batch-norm-into-convolution",
        normalise,
        "Running statistics are constants in evaluation mode, and a convolution is linear in the weights of each channel.",
    ),
)
