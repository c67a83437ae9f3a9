"""Follows ``x[mask]`` through elementwise operations to a sum or a mean. Runs in workers.

The size of ``x[mask]`` depends on values, so no graph with fixed shapes can contain it. But training code mostly reduces it at
once, as ``loss[mask].mean()`` does. Until then, a :class:`Selection` computes with all elements, and the reduction leaves out
those that are not selected. Before the first operation these become a number at which functions such as ``log`` and ``sqrt``
have finite gradients, so that they reach no gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from mtmc_lsp.capture.worker.passes.decompositions import wide

NEUTRAL = 0.5
"""The value of elements that are not selected. Logarithms, roots, reciprocals and ``log(1 - x)`` are finite there."""
ELEMENTWISE_NAMES = (
    "abs absolute add clamp clamp_max clamp_min cos detach div divide double eq erf exp expm1 float ge gt half le lerp log log1p "
    "logical_and logical_not logical_or lt maximum minimum mul multiply ne neg pow reciprocal relu rsqrt sigmoid sign sin sqrt "
    "square sub subtract tanh to true_divide type_as where xlogy bfloat16"
).split()
OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs eq ne lt le gt ge".split()
FUNCTIONS = "elu gelu leaky_relu logsigmoid mish relu relu6 selu sigmoid silu softplus softsign tanh".split()
ELEMENTWISE = frozenset(
    [
        *(
            getattr(owner, name)
            for owner in (torch, torch.Tensor)
            for name in ELEMENTWISE_NAMES
            if hasattr(owner, name)
        ),
        *(getattr(torch.Tensor, f"__{name}__") for name in OPERATORS),
        *(getattr(F, name) for name in FUNCTIONS),
    ]
)
"""Functions of one element at a time."""
IN_PLACE = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name)
    for name in "abs add clamp div exp log mul neg pow sqrt sub".split()
} | {getattr(torch.Tensor, f"__i{name}__"): getattr(torch.Tensor, name) for name in ("add", "sub", "mul")}
"""A selection is a copy, so a change of it is another selection."""
SUMS, MEANS = (torch.sum, torch.Tensor.sum), (torch.mean, torch.Tensor.mean)
ROW_FUNCTIONS: dict[Any, tuple[int, int | None]] = {
    **{
        getattr(owner, name): (1, None)
        for owner in (torch, torch.Tensor)
        for name in ("sum", "mean", "softmax", "log_softmax", "logsumexp")
    },
    **dict.fromkeys((F.softmax, F.log_softmax), (1, None)),
    F.normalize: (2, 1),
    F.cosine_similarity: (2, 1),
}
"""Functions along a dimension, with the position of that argument and its default."""
LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip
"""Losses of one element at a time, with a reduction."""
CLASS_LOSSES = (F.cross_entropy, F.nll_loss)
"""Losses of rows of scores, which ignore labels."""
PROPERTIES = tuple(getattr(torch.Tensor, name).__get__ for name in ("dtype", "device", "is_cuda"))


class UnknownSize(Exception):
    """The trace needs the selected elements alone. It is repeated without selections."""


class Selection(torch.Tensor):  # type: ignore[misc]  # torch is not typed here
    """The elements of a tensor, or its rows, where a mask is true."""

    values: torch.Tensor
    """All elements."""
    mask: torch.Tensor
    """Has the leading dimensions of ``values``."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        chosen = [item for item in (*args, *kwargs.values()) if isinstance(item, Selection)]
        result = _result(function, chosen, args, kwargs) if chosen else NotImplemented
        if result is NotImplemented:
            raise UnknownSize(f"{function} of x[mask]")
        return result

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Calls that pass by ``__torch_function__``.
        raise UnknownSize(f"{function} of x[mask]")


def selected(x: torch.Tensor, index: Any) -> Any:
    """``x[mask]`` or ``torch.masked_select(x, mask)`` as a selection; ``NotImplemented`` for other indices."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() > 0
    if not is_mask or isinstance(x, Selection) or isinstance(index, Selection) or x.dtype.is_complex:
        return NotImplemented
    if index.dim() > x.dim() or any(a != b for a, b in zip(index.shape, x.shape, strict=False)):
        return NotImplemented
    neutral = NEUTRAL if x.is_floating_point() else 0
    return _selection(torch.where(_beside(index, x), x, neutral), index)


def require_no_selection(results: Iterable[Any]) -> None:
    """Refuse results whose size depends on values.

    Raises:
        UnknownSize: there is one.
    """
    if any(isinstance(item, Selection) for item in results):
        raise UnknownSize("a result is x[mask]")


def _selection(values: torch.Tensor, mask: torch.Tensor) -> Selection:
    result: Selection = torch.Tensor._make_wrapper_subclass(Selection, (0,))
    result.values, result.mask = values, mask
    return result


def _beside(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mask with the dimensions of ``x``."""
    return mask.reshape([*mask.shape, *[1] * (x.dim() - mask.dim())])


def _result(function: Any, chosen: list[Selection], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function of selections; ``NotImplemented`` if it is unknown, or if their masks differ."""
    first = chosen[0]
    if any(item.mask is not first.mask for item in chosen):
        return NotImplemented
    if function in PROPERTIES:
        return function(first.values)
    if function in CLASS_LOSSES:
        return _class_loss(function, args, kwargs)
    if any(item.values.dim() != first.values.dim() for item in chosen):
        return NotImplemented
    if function in IN_PLACE and args[0] is first:
        changed = _elementwise(IN_PLACE[function], first, args, kwargs)
        if changed is NotImplemented or changed.values.dtype != first.values.dtype:
            return NotImplemented
        first.values = changed.values
        return first
    if function in ELEMENTWISE:
        return _elementwise(function, first, args, kwargs)
    if function in LOSSES:
        call = inspect.signature(function).bind(*args, **kwargs)
        reduction = call.arguments.pop("reduction", "mean")
        each = _elementwise(function, first, call.args, {**call.kwargs, "reduction": "none"})
        return each if each is NotImplemented or reduction == "none" else _reduced(each, reduction == "mean")
    if function in (*SUMS, *MEANS) and len(args) == 1 and not kwargs:
        return _reduced(first, function in MEANS)
    if function in ROW_FUNCTIONS:
        return _along_rows(function, first, args, kwargs)
    if function is torch.Tensor.__setitem__ and args[1] is first.mask and not isinstance(args[0], Selection):
        x, mask = args[0], _beside(first.mask, args[0])
        return None if x.copy_(torch.where(mask, first.values.to(x.dtype), x)) is x else NotImplemented
    return NotImplemented


def _elementwise(function: Callable[..., Any], first: Selection, args: Any, kwargs: dict[str, Any]) -> Any:
    """The function of all elements."""
    plain = [
        item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor) and not isinstance(item, Selection)
    ]
    # Others are broadcast along the selected rows.
    if any(item.dim() > first.values.dim() - first.mask.dim() and item.shape != (1,) for item in plain):
        return NotImplemented
    return _selection(
        function(*map(_values, args), **{name: _values(item) for name, item in kwargs.items()}), first.mask
    )


def _along_rows(function: Callable[..., Any], first: Selection, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function along a dimension of the selected rows, such as a softmax."""
    position, default = ROW_FUNCTIONS[function]
    given = args[position] if len(args) > position else kwargs.get("dim", default)
    inner = first.values.dim() - first.mask.dim()
    if not isinstance(given, int) or isinstance(given, bool):
        return NotImplemented
    dim = given if given < 0 else given - inner - 1
    if not -inner <= dim < 0:
        return NotImplemented
    if len(args) > position:
        args = (*args[:position], dim, *args[position + 1 :])
    else:
        kwargs["dim"] = dim
    return _elementwise(function, first, args, kwargs)


def _values(item: Any) -> Any:
    return item.values if isinstance(item, Selection) else item


def _reduced(selection: Selection, is_mean: bool) -> torch.Tensor:
    """The sum or the mean of all selected elements."""
    values, mask = selection.values, _beside(selection.mask, selection.values)
    if not is_mean:
        return torch.where(mask, values, 0).sum()
    total, count = torch.where(mask, wide(values), 0.0).sum(), mask.sum()
    for size in values.shape[selection.mask.dim() :]:
        count = count * size
    return (total / count).to(values.dtype)


def _class_loss(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The loss of all rows, where labels that are not selected are ignored."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    named = dict(call.arguments)
    scores, labels = named.pop("input"), named.pop("target")
    if not (isinstance(scores, Selection) and isinstance(labels, Selection)) or labels.values.is_floating_point():
        return NotImplemented
    mask = labels.mask
    is_of_rows = scores.values.dim() == mask.dim() + 1 and labels.values.dim() == mask.dim()
    if not is_of_rows or named["reduction"] == "none":
        return NotImplemented
    counted = torch.where(mask, labels.values, named["ignore_index"])
    return function(scores.values.flatten(0, -2), counted.flatten(), **named)
