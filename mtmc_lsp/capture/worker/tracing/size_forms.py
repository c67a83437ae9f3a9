"""Writes operations so that their sizes stay free in traces with gradients. Runs in workers.

Below autograd's dispatch, torch takes these operations apart in C++, where a size becomes a plain number: a factor of
``smoothing / classes``, the number of chunks, the number of classes of a one-hot vector. The forms here compute the same from
tensors and symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from mtmc_lsp.capture.worker.passes.decompositions import wide
from mtmc_lsp.capture.worker.tracing.resampling import interpolate
from mtmc_lsp.capture.worker.tracing.selections import Selection, selected
from mtmc_lsp.capture.worker.tracing.variances import variance

Form = Callable[..., Any]


class GradientForms(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """While entered, operations that would fix sizes in a trace with gradients have another form."""

    def __init__(self, *, follows_selections: bool = True) -> None:
        """Create the mode.

        Args:
            follows_selections: whether ``x[mask]`` is a selection.
        """
        super().__init__()
        self._follows_selections = follows_selections

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(issubclass(kind, Selection) for kind in types):
            with self:
                # Of the parts of a selection.
                return Selection.__torch_function__(function, types, args, kwargs)
        form = FORMS.get(function)
        if form is selected and not self._follows_selections:
            form = None
        result = variance(function, args, kwargs) if form is None else form(*args, **kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Label smoothing: a share of the loss is the mean loss of all classes. Probabilities as target: a sum over the classes."""
    if size_average is not None or reduce is not None or not x.dim():
        return NotImplemented
    dim = min(1, x.dim() - 1)
    if target.is_floating_point():
        return _loss_of_probabilities(x, target, dim, weight, reduction, label_smoothing)
    if label_smoothing == 0:
        return NotImplemented
    log_probabilities = F.log_softmax(x, dim)
    loss = F.nll_loss(log_probabilities, target, weight, ignore_index=ignore_index, reduction=reduction)
    is_ignored = target == ignore_index
    weighted = log_probabilities
    if weight is not None:
        weighted = weighted * weight.view([-1 if i == dim else 1 for i in range(x.dim())])
    of_all = (-weighted.sum(dim)).masked_fill(is_ignored, 0.0)
    if reduction != "none":
        of_all = of_all.sum()
    if reduction == "mean":
        of_all = of_all / _counted(target, is_ignored, weight)
    return (1 - label_smoothing) * loss + of_all * label_smoothing / x.shape[dim]


def _loss_of_probabilities(
    x: torch.Tensor, target: torch.Tensor, dim: int, weight: torch.Tensor | None, reduction: str, label_smoothing: float
) -> Any:
    """The cross entropy with a distribution. That of PyTorch 2.11 fixes all sizes."""
    if label_smoothing:
        target = target * (1 - label_smoothing) + torch.full_like(target, label_smoothing) / x.shape[dim]
    terms = F.log_softmax(x, dim) * target
    if weight is not None:
        terms = terms * weight.view([-1 if i == dim else 1 for i in range(x.dim())])
    if reduction == "none":
        return -terms.sum(dim)
    count = math.prod(size for i, size in enumerate(x.shape) if i != dim) if reduction == "mean" else 1
    return -terms.sum() / count


def _counted(target: torch.Tensor, is_ignored: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The number, or the total weight, of the labels that are not ignored."""
    if weight is None:
        return (~is_ignored).sum()
    return weight[target.masked_fill(is_ignored, 0)].masked_fill(is_ignored, 0.0).sum()


def _one_hot(x: torch.Tensor, num_classes: Any = -1) -> Any:
    """A comparison with the numbers of the classes."""
    if not isinstance(num_classes, torch.SymInt):
        return NotImplemented
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


def _instance_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Moments of each channel of each sample; torch reshapes to a batch norm of one sample."""
    if not use_input_stats or running_mean is not None or running_var is not None or x.dim() < 3:
        return NotImplemented
    if not any(length > 1 for length in x.shape[2:]):
        # Torch refuses a single element.
        return NotImplemented
    spatial, exact = list(range(2, x.dim())), wide(x)
    centred = exact - exact.mean(spatial, keepdim=True)
    value = centred * torch.rsqrt(centred.square().mean(spatial, keepdim=True) + eps)
    along = [-1 if i == 1 else 1 for i in range(x.dim())]
    if weight is not None:
        value = value * wide(weight).reshape(along)
    if bias is not None:
        value = value + wide(bias).reshape(along)
    return value.to(x.dtype)


def _batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The operation without torch's question whether a channel has several values, which is a condition of the graph."""
    if not training or not any(length > 1 for i, length in enumerate(x.shape) if i != 1):
        return NotImplemented
    return torch.batch_norm(
        x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
    )


def _chunk(x: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """Equal parts, if the size in the workload is a multiple of their number: the size then varies in this unit."""
    size = x.shape[dim]
    if not isinstance(size, torch.SymInt) or not isinstance(chunks, int) or chunks < 1 or _value(size) % chunks:
        return NotImplemented
    return torch.split_with_sizes(x, [size // chunks] * chunks, dim)


def _split(x: torch.Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    """Parts of a symbolic size that are a fixed number at all sizes."""
    size, part = x.shape[dim], split_size_or_sections
    if not isinstance(size, torch.SymInt) or not isinstance(part, torch.SymInt):
        return NotImplemented
    ratio = size.node.expr / part.node.expr
    return torch.split_with_sizes(x, [part] * int(ratio), dim) if ratio.is_Integer else NotImplemented


def _value(size: torch.SymInt) -> int:
    """The size in the workload; 1 if it is unknown."""
    return int(size.node.hint) if size.node.has_hint() else 1


FORMS: dict[Any, Form] = {
    F.cross_entropy: _cross_entropy,
    F.one_hot: _one_hot,
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.interpolate: interpolate,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.masked_select: selected,
    torch.Tensor.masked_select: selected,
    torch.Tensor.__getitem__: selected,
    torch.split: _split,
    torch.Tensor.split: _split,
}
"""The replacement of each function. If a replacement returns ``NotImplemented``, the call is not changed."""
