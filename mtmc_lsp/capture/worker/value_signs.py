"""Signs of tensors that are made without their values, from the operations that make them. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

NEVER_NEGATIVE = frozenset(
    "rand rand_like zeros zeros_like new_zeros ones ones_like new_ones softmax _softmax exp sigmoid abs relu square".split()
)
"""Operations that give nothing negative, whatever they are of."""
COUNTING = frozenset("add mul div pow full full_like scalar_tensor".split())
"""Operations that give nothing negative of tensors and numbers of which none is."""
KEEPING = frozenset(
    "sqrt sum mean amax amin max min mm bmm matmul cat stack clone view _unsafe_view reshape permute transpose t expand "
    "unsqueeze squeeze slice select detach alias contiguous _to_copy lift_fresh".split()
)
"""Operations that give nothing negative of tensors that have nothing negative; their numbers are dimensions and places."""


class DrawnSigns(TorchDispatchMode):  # type: ignore[misc]
    """Follows which tensors have no negative element."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}
        """By identity; they are held, so that none of another tensor is taken for theirs."""

    def is_nonnegative(self, tensor: torch.Tensor) -> bool:
        """Whether no element is negative, as far as is known."""
        return id(tensor) in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        operands = list(_flat((args, kwargs or {})))
        if func._schema.is_mutable:
            changed = {_memory(each) for each in operands if isinstance(each, torch.Tensor)}
            self._known = {number: each for number, each in self._known.items() if _memory(each) not in changed}
            return result
        counted = operands if name in COUNTING else [each for each in operands if isinstance(each, torch.Tensor)]
        if name in NEVER_NEGATIVE or (name in COUNTING | KEEPING and all(map(self._may_stay, counted))):
            self._known.update((id(each), each) for each in _flat(result) if isinstance(each, torch.Tensor))
        return result

    def _may_stay(self, operand: object) -> bool:
        if isinstance(operand, torch.Tensor):
            return self.is_nonnegative(operand)
        return not isinstance(operand, (int, float)) or operand >= 0


def _memory(tensor: torch.Tensor) -> int:
    """What tensors share that show the same elements."""
    return int(tensor.untyped_storage()._cdata)


def _flat(value: object) -> Iterator[object]:
    """What is in nested lists, tuples and mappings."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def made_without_values(make: Callable[[], Any]) -> tuple[list[Any], list[bool]] | None:
    """What ``make`` gives, its tensors without memory, and of which it is known that no element is negative.

    ``None`` where it looks at values, or reads tensors of its own.
    """
    try:
        with FakeTensorMode(), DrawnSigns() as signs:
            made = list(make())
    except Exception:  # user code raises anything where there are no values
        return None
    return made, [isinstance(item, torch.Tensor) and signs.is_nonnegative(item) for item in made]
