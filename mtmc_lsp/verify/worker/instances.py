"""Instances of the user's modules, constructed once: each call gets a copy that others' parameters are put into.

Drawing the initial values of large parameters takes seconds, and each verification case would throw them away. Runs in workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import constructed

_made: dict[tuple[Any, str, str], torch.nn.Module] = {}


def instance_of(
    kind: Any, positional: Sequence[Any], named: Mapping[str, Any], device: str, *, replaced: Iterable[str]
) -> torch.nn.Module:
    """An instance that nothing else uses, but for the values of what will be replaced in it.

    Args:
        kind: the class.
        positional: constructor arguments.
        named: constructor arguments by name.
        device: where its tensors are.
        replaced: dotted names of the parameters and buffers that the caller puts others in place of, or reads only.
    """
    if any(isinstance(value, torch.Tensor) for value in (*positional, *named.values())):
        return constructed(kind, positional, named, device)
    key = (kind, repr((positional, named)), device)
    if key not in _made:
        _made[key] = constructed(kind, positional, named, device)
    if _has_closures(_made[key]):
        return constructed(kind, positional, named, device)
    try:
        return _copy(_made[key], frozenset(replaced))
    except Exception:  # what a module holds need not be able to be copied: a lock, a handle, a tensor with a history
        return constructed(kind, positional, named, device)


def _has_closures(original: torch.nn.Module) -> bool:
    """Whether it holds functions that hold something themselves: a copy's would still use what the original has."""

    def closes(value: Any) -> bool:
        if isinstance(value, FunctionType):
            return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
        if isinstance(value, Mapping):
            return any(map(closes, value.values()))
        return isinstance(value, (list, tuple)) and any(map(closes, value))

    return any(closes(vars(part)) for part in original.modules())


def _copy(original: torch.nn.Module, shared: frozenset[str]) -> torch.nn.Module:
    """A deep copy, but of the shared tensors in new ones on the same memory."""
    memo: dict[int, Any] = {}
    for name, held in (*original.named_parameters(), *original.named_buffers()):
        if name in shared:
            bare = held.detach()
            is_parameter = isinstance(held, torch.nn.Parameter)
            memo[id(held)] = torch.nn.Parameter(bare, requires_grad=held.requires_grad) if is_parameter else bare
    copied: torch.nn.Module = copy.deepcopy(original, memo)
    return copied
