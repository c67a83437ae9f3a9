"""What the trace of a loop's body asks about tensors, their indices, and the calls that change them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.capture.worker.loops.iteration import Changing, NotKept, Step, known

FACTORIES = (torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.full)
"""Functions that create a tensor from a number."""
IN_PLACE = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
)


def zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape and dtype, which depend on no value."""
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


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


def targets(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a torch call changes in place."""
    name = str(getattr(function, "__name__", ""))
    in_place = name in IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if in_place and args and isinstance(args[0], torch.Tensor):
        yield args[0]
    yield from (item for item in tree_leaves(kwargs.get("out")) if isinstance(item, torch.Tensor))
