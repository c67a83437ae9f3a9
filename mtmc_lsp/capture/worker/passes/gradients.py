"""Traces a target together with its gradients, as one functional graph.

The trace runs the target with autograd switched on and then ``torch.autograd.grad``, below autograd's dispatch: the graph holds
what eager training computes, custom ``autograd.Function`` and ``detach`` included. In the graph, the gradient that arrives for
a result is the operator ``mtmc::tangent`` of that result, which :mod:`mtmc_lsp.capture.worker.graph_reader` turns into an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch._decomp import decomposition_table

from mtmc_lsp.capture.neutral_operations import changed_tensors
from mtmc_lsp.capture.worker.passes.decompositions import MEAN, SUM, wide
from mtmc_lsp.capture.worker.passes.group_norms import group_norm, group_norm_backward
from mtmc_lsp.core.graph import RECURRENT_GATES, Graph, InputKind, Mutation, Ref

TANGENT = "mtmc.tangent.default"
IDENTITIES = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})
"""Operators of the trace that are the identity once no autograd records them."""


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    library = torch.library.Library("mtmc", "DEF")
    library.define("tangent(Tensor result) -> Tensor")
    library.impl(
        "tangent",
        lambda result: torch.empty(result.shape, dtype=result.dtype, device=result.device),
        "CompositeExplicitAutograd",
    )
    return library


class GradientTrace:
    """Wraps a function of tensors: its results, followed by the gradients of the inputs that need one."""

    def __init__(self, needed: Sequence[bool]) -> None:
        """Trace gradients of the inputs for which ``needed`` is true."""
        _library()
        self._needed = needed
        self.results: list[int] = []
        """Numbers of the results that have gradients."""
        self.inputs: list[int] = []
        """Numbers of the inputs that get gradients, in the order of the gradients. Others are not used or not differentiable."""

    def leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs as autograd's leaves."""
        return [tensor.detach().requires_grad_(needs) for tensor, needs in zip(tensors, self._needed, strict=True)]

    def gradients(self, results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of all results together, for gradients of the results that the backward pass gets."""
        self.results = [i for i, result in enumerate(results) if result.requires_grad]
        differentiable = [results[i] for i in self.results]
        numbers = [i for i, needs in enumerate(self._needed) if needs]
        if not differentiable:
            self.inputs = []
            return []
        tangents = [torch.ops.mtmc.tangent(result.detach()) for result in differentiable]
        found = torch.autograd.grad(differentiable, [leaves[i] for i in numbers], tangents, allow_unused=True)
        self.inputs = [i for i, gradient in zip(numbers, found, strict=True) if gradient is not None]
        return [gradient for gradient in found if gradient is not None]


class NotTrainable(Exception):
    """The target's backward pass is not supported; the message says why."""


def why_not_trainable(graph: Graph) -> str:
    """Why the backward pass of a captured target is not supported; empty if it is."""
    assert graph.backward is not None
    for mutation in graph.mutations:
        if not _is_apart(graph, mutation):
            return f"the code changes {mutation.input} in place"
    for node in graph.nodes:
        if node.op.split(".")[1] in RECURRENT_GATES:
            return f"the gradients of a recurrent layer of torch (line {node.line}) stay the library's"
    if graph.state_attributes:
        return f"the code sets {graph.state_attributes[0]}"
    if not graph.backward.gradients:
        return "no result depends on these tensors by differentiable operations"
    for ref in graph.forward_outputs:
        if is_input_or_view(graph, ref):
            return "a result is an input or a view of one"
    return ""


def _is_apart(graph: Graph, mutation: Mutation) -> bool:
    """Whether no gradient depends on a changed buffer itself, as autograd requires.

    What the forward pass computes from its old value, such as targets of a loss, is saved.
    """
    kind = next(item.kind for item in graph.inputs if item.name == mutation.input)
    changed = changed_tensors(graph)
    read = {ref for name in graph.backward_nodes for ref in graph.node(name).inputs()}
    returned = {*graph.forward_outputs, *graph.gradients}
    return kind is InputKind.BUFFER and not changed & (read | returned)


def is_input_or_view(graph: Graph, ref: Ref) -> bool:
    """Whether a value is an input of the graph or shares its memory."""
    while ref.name in graph.named:
        node = graph.node(ref.name)
        namespace, name, overload = node.op.split(".")
        if namespace != "aten" or not getattr(getattr(torch.ops.aten, name), overload).is_view:
            return False
        ref = next(node.inputs())
    return True


def backward_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the operators that autograd adds: gradients as products, sums and elementwise operations."""
    table = torch.export.default_decompositions()
    chosen = {op: function for op, function in table.items() if _is_backward(str(op).split(".")[1])}
    more = {op: function for op, function in decomposition_table.items() if str(op).removeprefix("aten.") in FORWARD}
    aten = torch.ops.aten
    ours: dict[Any, Callable[..., Any]] = {
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
        aten.log_sigmoid_forward.default: _log_sigmoid,
        aten.log_sigmoid_backward.default: _log_sigmoid_backward,
        aten.native_group_norm.default: group_norm,
        aten.native_group_norm_backward.default: group_norm_backward,
    }
    norm = aten.native_batch_norm_backward.default
    ours[norm] = partial(_batch_norm_backward, table[norm])
    ours |= {op: _divided_by_count(table[op]) for op in (getattr(aten, name).default for name in MEAN_LOSSES)}
    return {**chosen, **more, **ours}


MEAN_LOSSES = ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
"""Gradients of losses whose mean PyTorch's decompositions compute by a factor of ``1 / numel``."""
FORWARD = frozenset(
    "native_layer_norm.default _native_batch_norm_legit.no_stats nll_loss_forward.default "
    "nll_loss2d_forward.default _softmax.default _log_softmax.default binary_cross_entropy_with_logits.default "
    "_fused_rms_norm.default _fused_rms_norm_backward.default".split()
)
"""Operators of the forward pass with further results for the backward pass, which become simple operations."""


def _is_backward(name: str) -> bool:
    return name.endswith(("_backward", "_backward_data")) and "conv" not in name and "max_pool" not in name


def _divided_by_count(of_sum: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a mean by that of the sum.

    A quotient of a number by sizes would fix the sizes; a tensor may be divided by them.
    """

    def backward(gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, *rest: Any) -> Any:
        if reduction != MEAN:
            return of_sum(gradient, x, target, reduction, *rest)
        # In float16, a mean's gradient would be denormal.
        exact = gradient if gradient.dtype == torch.float64 else gradient.float()
        return of_sum(exact / x.numel(), x, target, SUM, *rest)

    return backward


def _batch_norm_backward(
    of_torch: Callable[..., Any],
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor | None,
    inverse: torch.Tensor | None,
    train: bool,
    eps: float,
    needed: Sequence[bool],
) -> Any:
    """Means over a channel. PyTorch's decomposition multiplies by a quotient of sizes, which fixes them."""
    if not train or mean is None or inverse is None:
        return of_torch(gradient, x, weight, running_mean, running_var, mean, inverse, train, eps, needed)
    along, others = [-1 if i == 1 else 1 for i in range(x.dim())], [i for i in range(x.dim()) if i != 1]
    upstream, centred = wide(gradient), wide(x) - mean.view(along)
    product = upstream * centred
    scale = inverse if weight is None else inverse * wide(weight)
    of_x = of_weight = of_bias = None
    if needed[0]:
        of_product = product.mean(others, keepdim=True) * inverse.square().view(along)
        of_x = (upstream - centred * of_product - upstream.mean(others, keepdim=True)) * scale.view(along)
        of_x = of_x.to(x.dtype)
    dtype = x.dtype if weight is None else weight.dtype
    if needed[1]:
        of_weight = (product.sum(others) * inverse).to(dtype)
    if needed[2]:
        of_bias = upstream.sum(others).to(dtype)
    return of_x, of_weight, of_bias


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and a buffer that no gradient reads."""
    exact = wide(x)
    value = torch.clamp_max(exact, 0) - torch.log1p(torch.exp(-exact.abs()))
    return value.to(x.dtype), torch.empty_like(x)


def _log_sigmoid_backward(gradient: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """From ``x`` alone: what the buffer holds depends on the device."""
    return (wide(gradient) * torch.sigmoid(-wide(x))).to(x.dtype)


def _nll_loss_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """A comparison with the number of the class, which fuses; PyTorch's decomposition scatters into zeros."""
    dim = 1 if x.dim() > 1 else 0
    classes = torch.arange(x.shape[dim], device=x.device).view([-1 if i == dim else 1 for i in range(x.dim())])
    expected = target.unsqueeze(dim)
    factor = gradient / total_weight if reduction == MEAN else gradient
    factor = factor.unsqueeze(dim) if factor.dim() else factor
    if weight is not None:
        factor = factor * weight.view(classes.shape)
    is_class = (classes == expected) & (expected != ignore_index)
    return torch.where(is_class, -factor, torch.zeros((), dtype=x.dtype, device=x.device)).to(x.dtype)
