"""Tensors that a module keeps from one call to the next, as the hidden state of a recurrent net: it sets an attribute anew.

Such a tensor is an argument of the call, and what the attribute holds afterwards a further result: the call is a function
again, whose graph can be captured and whose every call can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.capture.worker.side_effects import access_of
from mtmc_lsp.core.workload import StateTensor

Home = tuple[dict[str, Any], str]
"""The dictionary in which a module holds an attribute, and its name there."""


class StateFound(Exception):
    """A target was found to keep tensors that are not yet arguments of its calls."""

    def __init__(self, kept: Sequence[StateTensor]) -> None:
        super().__init__(", ".join(item.access for item in kept))
        self.tensors = tuple(kept)


def state_tensor(access: str, value: torch.Tensor) -> StateTensor:
    """The attribute with this access, as its value says."""
    name = "_".join(access.removeprefix("self.").replace("[", ".").replace("]", "").split("."))
    return StateTensor(name, access, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def home_of(instance: torch.nn.Module, access: str) -> Home:
    """Where ``self.cell.hidden`` is held: among a module's buffers, or its own attributes."""
    *path, name = access.removeprefix("self.").replace("[", ".").replace("]", "").split(".")
    owner = instance.get_submodule(".".join(path))
    return (owner._buffers if name in owner._buffers else owner.__dict__), name


def calling_with(function: Callable[..., Any], homes: Mapping[str, Home]) -> Callable[..., Any]:
    """``function`` as one of what its module keeps, too.

    Args:
        function: a method of a module.
        homes: where kept tensors are held, by the argument's name.

    Returns:
        What takes these as further arguments, by name, and gives the function's result and a tuple of what is held then. The
        module holds afterwards what it did before.
    """

    def call(*positional: Any, **named: Any) -> tuple[Any, tuple[Any, ...]]:
        before = [held[attribute] for held, attribute in homes.values()]
        for name, (held, attribute) in homes.items():
            held[attribute] = named.pop(name)
        try:
            result = function(*positional, **named)
            return result, tuple(held[attribute] for held, attribute in homes.values())
        finally:
            for (held, attribute), value in zip(homes.values(), before, strict=True):
                held[attribute] = value

    return call


def held_tensors(instance: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """The tensors that a module and its parts hold, but for parameters, by access."""
    found: dict[str, torch.Tensor] = {}
    for name, module in instance.named_modules() if instance is not None else ():
        for attribute, value in {**module.__dict__, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                found[f"{access_of(name)}.{attribute}"] = value
    return found


def refuse_unknown(before: Mapping[str, torch.Tensor], changed: Collection[str], device: str) -> None:
    """End a capture whose calls do not yet have all that the target keeps.

    Args:
        before: the tensors that modules held before a call.
        changed: accesses that the call has set anew.
        device: where the call's tensors are; what is kept elsewhere is none of them.

    Raises:
        StateFound: says what more is kept.
    """
    kept = [state_tensor(access, value) for access, value in before.items() if access in changed]
    on_device = [item for item in kept if before[item.access].device.type == device]
    if on_device:
        raise StateFound(on_device)
