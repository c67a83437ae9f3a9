"""Derives the signs of tensors without values from the operations that create them. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

NEVER_NEGATIVE = frozenset(
    "rand rand_like zeros zeros_like new_zeros ones ones_like new_ones softmax _softmax exp sigmoid abs relu square".split()
)
"""Operations whose results are never negative."""
KEEP_SIGN_OF_ALL = frozenset("add mul div pow full full_like scalar_tensor".split())
"""Operations whose results are not negative if no tensor and no number among their operands is."""
KEEP_SIGN_OF_TENSORS = frozenset(
    "sqrt sum mean amax amin max min mm bmm matmul cat stack clone view _unsafe_view reshape permute transpose t expand "
    "unsqueeze squeeze slice select detach alias contiguous _to_copy lift_fresh".split()
)
"""Operations whose results are not negative if no tensor operand is. Number operands are dimensions and indices."""


class SignTracker(TorchDispatchMode):  # type: ignore[misc]
    """Tracks which tensors have no negative elements."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}
        """Non-negative tensors by ``id``. The references prevent that another tensor gets the same ``id``."""

    def is_nonnegative(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is known to have no negative elements."""
        return id(tensor) in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        operands = list(_flat((args, kwargs or {})))
        if func._schema.is_mutable:
            changed = {_memory(each) for each in operands if isinstance(each, torch.Tensor)}
            self._known = {number: each for number, each in self._known.items() if _memory(each) not in changed}
            return result
        checked = (
            operands if name in KEEP_SIGN_OF_ALL else [each for each in operands if isinstance(each, torch.Tensor)]
        )
        if name in NEVER_NEGATIVE or (
            name in KEEP_SIGN_OF_ALL | KEEP_SIGN_OF_TENSORS and all(map(self._is_nonnegative, checked))
        ):
            self._known.update((id(each), each) for each in _flat(result) if isinstance(each, torch.Tensor))
        return result

    def _is_nonnegative(self, operand: object) -> bool:
        if isinstance(operand, torch.Tensor):
            return self.is_nonnegative(operand)
        return not isinstance(operand, (int, float)) or operand >= 0


def _memory(tensor: torch.Tensor) -> int:
    """An identifier of the tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def _flat(value: object) -> Iterator[object]:
    """The leaves of nested lists, tuples and mappings."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


@dataclass(frozen=True)
class TracedInputs:
    """Inputs of fake tensors."""

    results: list[Any]
    signs: SignTracker

    def is_nonnegative(self, tensor: torch.Tensor) -> bool:
        """Whether one of the tensors is known to have no negative elements."""
        return self.signs.is_nonnegative(tensor)


def run_without_values(make: Callable[[], Any]) -> TracedInputs | None:
    """The result of ``make`` with fake tensors; ``None`` if ``make`` reads values of tensors."""
    try:
        with FakeTensorMode(), SignTracker() as signs:
            return TracedInputs(list(make()), signs)
    except Exception:  # user code raises anything where there are no values
        return None
