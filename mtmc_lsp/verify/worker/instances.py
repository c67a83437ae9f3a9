"""Instances of modules, which are constructed once and then copied.

Drawing the initial values of large parameters takes seconds, and each verification case replaces them. Runs in workers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import constructed

_originals: dict[tuple[Any, str, str, str], torch.nn.Module] = {}


class SharedInstance:
    """One instance for all calls of a candidate on a case, as in a user's program, so that state on the instance is detected."""

    def __init__(self, construct: Callable[..., torch.nn.Module]) -> None:
        """Store the constructor; the first call uses it."""
        self._construct = construct
        self._instance: torch.nn.Module | None = None
        self._has_parameters = False

    def __call__(self, *positional: Any, **named: Any) -> torch.nn.Module:
        """The instance, constructed with these arguments unless it was constructed before."""
        if self._instance is None:
            self._instance = self._construct(*positional, **named)
        return self._instance

    @property
    def is_constructed(self) -> bool:
        """Whether the constructor has run."""
        return self._instance is not None

    def needs_parameters(self) -> bool:
        """Whether to assign the case's parameters now: only once, so that the module may cache values derived from them."""
        needs, self._has_parameters = not self._has_parameters, True
        return needs


def instance_of(
    kind: Any,
    positional: Sequence[Any],
    named: Mapping[str, Any],
    device: str,
    dtype: str = "",
    *,
    replaced: Iterable[str],
) -> torch.nn.Module:
    """A new instance, which shares with others only the memory of the tensors in ``replaced``.

    Args:
        device: where its tensors are.
        dtype: of its floating-point tensors; empty as the constructor creates them.
        replaced: dotted names of the parameters and buffers that the caller replaces or only reads.
    """
    original = original_of(kind, positional, named, device, dtype)
    if _has_closures(original):
        return constructed(kind, positional, named, device, dtype)
    try:
        return _copy(original, frozenset(replaced))
    except (
        Exception
    ):  # a module may hold an object that cannot be copied: a lock, a handle, a tensor with autograd history
        return constructed(kind, positional, named, device, dtype)


def original_of(
    kind: Any, positional: Sequence[Any], named: Mapping[str, Any], device: str, dtype: str = ""
) -> torch.nn.Module:
    """The instance from which others are copied. Whoever calls it must leave it as it is."""
    if any(isinstance(value, torch.Tensor) for value in (*positional, *named.values())):
        return constructed(kind, positional, named, device, dtype)
    key = (kind, repr((positional, named)), device, dtype)
    if key not in _originals:
        _originals[key] = constructed(kind, positional, named, device, dtype)
    return _originals[key]


def _has_closures(original: torch.nn.Module) -> bool:
    """Whether it holds functions with closures or defaults: in a copy they would still use the original's objects."""

    def closes(value: Any) -> bool:
        if isinstance(value, FunctionType):
            return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
        if isinstance(value, Mapping):
            return any(map(closes, value.values()))
        return isinstance(value, (list, tuple)) and any(map(closes, value))

    return any(closes(vars(part)) for part in original.modules())


def _copy(original: torch.nn.Module, shared: frozenset[str]) -> torch.nn.Module:
    """A deep copy in which the shared tensors are new tensors on the same memory."""
    memo: dict[int, Any] = {}
    for name, held in (*original.named_parameters(), *original.named_buffers()):
        if name in shared:
            bare = held.detach()
            is_parameter = isinstance(held, torch.nn.Parameter)
            memo[id(held)] = torch.nn.Parameter(bare, requires_grad=held.requires_grad) if is_parameter else bare
    copied: torch.nn.Module = copy.deepcopy(original, memo)
    return copied
