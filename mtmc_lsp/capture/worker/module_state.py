"""State tensors of a module: attributes that each call replaces, such as the hidden state of a recurrent network.

A state tensor becomes an argument of the call, and the value after the call becomes an additional result. The call is then a
pure function, so its graph can be captured and every call can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mtmc_lsp.capture.accesses import is_attribute_name, steps, words
from mtmc_lsp.capture.worker.modules.members import access_of, member_of
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.workload import StateTensor, Target, Workload

AttributeSlot = tuple[dict[str, Any], str]
"""The dictionary of a module that holds an attribute, and the name of the attribute."""


class StateFound(Exception):
    """The target has state tensors that are not yet arguments of its calls."""

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        super().__init__(", ".join(item.access for item in tensors))
        self.tensors = tuple(tensors)


def state_tensor(access: str, value: torch.Tensor) -> StateTensor:
    """The state tensor for an attribute with this value."""
    name = words(access)
    name = name if is_attribute_name(name) else f"state_{name}"
    return StateTensor(name, access, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def with_other_names(workload: Workload, tensors: Sequence[StateTensor]) -> tuple[StateTensor, ...]:
    """The workload's state tensors and further ones, which get names that no argument and no other state tensor has."""
    result = list(workload.state)
    for item in tensors:
        name, used = item.name, {*(argument.name for argument in workload.arguments), *(other.name for other in result)}
        while name in used:
            name += "_"
        result.append(replace(item, name=name))
    return tuple(result)


def attribute_slot(instance: torch.nn.Module, access: str) -> AttributeSlot:
    """The slot of ``self.cell.hidden``: in the module's buffers or its ``__dict__``."""
    *path, name = (str(step.key) for step in steps(access))
    owner = instance.get_submodule(".".join(path))
    return (owner._buffers if name in owner._buffers else owner.__dict__), name


def with_explicit_state(function: Callable[..., Any], slots: Mapping[str, AttributeSlot]) -> Callable[..., Any]:
    """Turn a method into a function of the module's state.

    Args:
        slots: slots of the state tensors, by argument name.

    Returns:
        A function that takes the state tensors as additional keyword arguments, and returns the result and a tuple of the new
        state. It restores the module's attributes.
    """

    def call(*positional: Any, **named: Any) -> tuple[Any, tuple[Any, ...]]:
        before = values_in(slots)
        for name, (attributes, attribute) in slots.items():
            attributes[attribute] = named.pop(name)
        try:
            result = function(*positional, **named)
            return result, tuple(attributes[attribute] for attributes, attribute in slots.values())
        finally:
            restore_values(slots, before)

    return call


def refuse_unset_state(
    slots: Mapping[str, AttributeSlot], state: Collection[StateTensor], overwritten: Collection[str], target: Target
) -> None:
    """Refuse state tensors that the first call reads although no call has assigned them.

    Raises:
        TargetUnsupported: names the attribute.
    """
    set_before = values_in(slots)
    for item in state:
        if item.name not in set_before and item.access not in overwritten:
            raise TargetUnsupported(
                f"{target.qualname} reads {item.access}, which its module does not have before the first call",
                where=Location(target.path, target.start_line),
                remedy=f"Set {item.access} in __init__, to None or to its initial value.",
            )


def values_in(slots: Mapping[str, AttributeSlot]) -> dict[str, Any]:
    """The values of attributes, without those that no call has assigned."""
    return {name: attributes[attribute] for name, (attributes, attribute) in slots.items() if attribute in attributes}


def restore_values(slots: Mapping[str, AttributeSlot], values: Mapping[str, Any]) -> None:
    """Give attributes the values that :func:`values_in` returned."""
    for name, (attributes, attribute) in slots.items():
        if name in values:
            attributes[attribute] = values[name]
        else:
            attributes.pop(attribute, None)


def non_parameter_tensors(instance: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """The tensors in the attributes and buffers of a module and its submodules, by access, without parameters."""
    tensors: dict[str, torch.Tensor] = {}
    for name, module in instance.named_modules() if instance is not None else ():
        access = access_of(instance, name)
        for attribute, value in {**module.__dict__, **module._buffers}.items():
            if isinstance(value, torch.Tensor):
                tensors[member_of(access, module, attribute)] = value
    return tensors


def refuse_new_state(before: Mapping[str, torch.Tensor], changed: Collection[str], device: str) -> None:
    """Stop a capture whose calls do not yet have all state tensors as arguments.

    Args:
        before: the tensors in the modules before a call.
        changed: accesses that the call assigned.
        device: device of the call's tensors; tensors on other devices are ignored.

    Raises:
        StateFound: names the state tensors.
    """
    tensors = [state_tensor(access, value) for access, value in before.items() if access in changed]
    on_device = [item for item in tensors if before[item.access].device.type == device]
    if on_device:
        raise StateFound(on_device)
