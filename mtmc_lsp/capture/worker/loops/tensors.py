"""Properties of tensors and indices in the trace of a loop's body, and the calls that change tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.capture.worker.loops.iteration import Changing, NeedsPeeling, NotKept, Span, Step, known

FACTORIES = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.full)
"""Functions that create a tensor from a number."""
WITHOUT_VALUES = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
"""Functions that create a tensor without values, and functions that fill it: no kernel leaves values as they are."""
IN_PLACE = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
)


def zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape and dtype, which depend on no value."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return bool(tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def is_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and dtype for all sizes."""
    same_rank = first.dim() == second.dim() and first.dtype == second.dtype
    return same_rank and all(known(a == b) for a, b in zip(first.shape, second.shape, strict=True))


def converted(initial: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The initial state in the shape and dtype that it has after the first iteration."""
    try:
        return initial.to(like.dtype).expand(like.shape).clone()
    except RuntimeError:
        raise NotKept("the shape of its state changes from iteration to iteration") from None


def number_argument(function: Any, args: Any) -> Changing | None:
    """The number of the iteration from which a function creates a tensor."""
    value = args[1] if function is torch.full and len(args) > 1 else args[0] if args else None
    return value if isinstance(value, Changing) else None


def without_tensors(index: Any) -> tuple[Any, Any]:
    """An index without its tensors, and the index of the result by them; ``None`` if there are none."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, torch.Tensor) for item in items):
        return index, None
    plain = tuple(slice(None) if isinstance(item, torch.Tensor) else item for item in items)
    later = tuple(
        item if isinstance(item, torch.Tensor) or item is Ellipsis else slice(None)
        for item in items
        if not isinstance(item, (int, torch.SymInt, Step))
    )
    return plain, later


def has_step(index: Any) -> bool:
    """Whether an index depends on the number of the iteration."""
    if isinstance(index, tuple):
        return any(map(has_step, index))
    if isinstance(index, slice):
        return any(isinstance(item, Changing) for item in (index.start, index.stop, index.step))
    return isinstance(index, Changing)


MOST_OF_WINDOW = 32
"""Steps of a window that an iteration reads."""


def window_of(index: Any) -> tuple[list[Any], int] | None:
    """The indices of the slices of length 1 of a window (``x[:, t - 3 : t + 1]``), and the dimension to join them along.

    Returns ``None`` for an index of one position.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    places = [i for i, item in enumerate(items) if has_step(item)]
    item = items[places[0]] if len(places) == 1 else None
    if not isinstance(item, slice) or item.step not in (None, 1):
        return None
    if not (isinstance(item.start, Step) and isinstance(item.stop, Step)) or isinstance(item.step, torch.SymInt):
        return None
    length = next((k for k in range(2, MOST_OF_WINDOW + 1) if item.stop.same(item.start + k)), 0)
    place = places[0]
    kept = [other is None or isinstance(other, slice) for other in items]
    if not length or any(isinstance(other, torch.Tensor) for other in items):
        return None
    follows_ellipsis = any(other is Ellipsis for other in items[:place])
    dim = -1 - sum(kept[place + 1 :]) if follows_ellipsis else sum(kept[:place])
    starts = [item.start + k for k in range(length)]
    return [(*items[:place], slice(at, at + 1), *items[place + 1 :]) for at in starts], dim


def targets(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a torch call changes in place."""
    name = str(getattr(function, "__name__", ""))
    in_place = name in IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if in_place and args and isinstance(args[0], torch.Tensor):
        yield args[0]
    yield from (item for item in tree_leaves(kwargs.get("out")) if isinstance(item, torch.Tensor))


# Positions at the number of the iteration ------------------------------------------------------------------------------


def iterations_between(read: Step, written: Step) -> int:
    """How many iterations ago the slice was written; negative if it will be written later, 0 if that is unknown."""
    if read.step != written.step:
        return 0
    for distance in (1, 2, 3, 4, -1, -2, -3, -4):
        if known(read.first + distance * read.step == written.first):
            return distance
    return 0


def located(span: Span, tensor: torch.Tensor, index: Any) -> tuple[int, Step, tuple[Any, ...]]:
    """The dimension and position of an index, and the index with which the slice of length 1 is read.

    Raises:
        NotKept: the position does not change by a constant, or it may be outside the tensor.
        NeedsPeeling: only the first iteration counts from the end of the dimension.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if any(isinstance(item, torch.Tensor) for item in items):
        raise NotKept("it reads a tensor at the number of the iteration and at indices")
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    dims = [sum(1 for item in items[:i] if item is not None) for i in range(len(items))]
    places = [i for i, item in enumerate(items) if has_step(item)]
    if len(places) != 1:
        raise NotKept("it reads a tensor at the number of the iteration in several dimensions")
    place = places[0]
    dim, item = dims[place], items[place]
    if isinstance(item, slice):
        start, stop = item.start, item.stop
        is_one = isinstance(start, Step) and item.step in (None, 1) and isinstance(stop, Step)
        if not (is_one and stop.same(start + 1)):
            raise NotKept("it reads a range of steps")
        items[place], step = slice(None), start
    else:
        items[place], step = 0, item
    if not isinstance(step, Step) or step.step == 0:
        raise NotKept("it reads a tensor at a position that changes irregularly")
    return dim, _positioned(span, step, tensor.shape[dim]), tuple(items)


def _positioned(span: Span, step: Step, size: Any) -> Step:
    """The position counted from the beginning of the dimension, inside it for all iterations."""
    if isinstance(step.first, int) and step.first < 0:
        if not (step.step < 0 or known(step.last < 0)):
            raise NeedsPeeling("first")
        step = Step(span, step.first + size, step.step)
    low, high = (step.first, step.last) if step.step > 0 else (step.last, step.first)
    # Where the last iteration is at the end of the dimension, that is the relation of the sizes.
    is_at_end = known(high + 1 == size) or bool(high + 1 == size)
    if not (known(low >= 0) or bool(low >= 0)) or not (is_at_end or known(high < size) or bool(high < size)):
        raise NotKept("it reads outside a tensor")
    return step
