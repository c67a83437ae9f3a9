"""Attributes of objects that the body of a loop changes, such as ``self.mem`` of a layer of spiking neurons.

A trace of the body shows which attributes change; the next trace begins with symbols in them, as in variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

MOST_OBJECTS = 2_000
"""More objects are not searched."""
FOREIGN = ("torch", "numpy", "builtins", "mtmc_lsp", "collections")
"""Packages whose objects keep no state of a loop."""


@dataclass(frozen=True)
class Attribute:
    """An attribute of an object."""

    owner: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """Tells it from all others."""
        return id(self.owner), self.name

    def read(self) -> Any:
        """Its value; ``None`` if it was deleted."""
        return getattr(self.owner, self.name, None)

    def set(self, value: Any) -> None:
        """Give it a value, also in a frozen object."""
        if isinstance(self.owner, torch.nn.Module):
            setattr(self.owner, self.name, value)
        else:
            object.__setattr__(self.owner, self.name, value)


class AttributeStates:
    """The attributes that a loop changes."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], str] = {}
        """The changing ones, with the names of their states."""
        self._before: dict[tuple[int, str], tuple[Attribute, list[Any], Any]] = {}
        """All attributes before the loop."""

    def begin(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The values before the loop of the attributes that are known to change, by the names of their states."""
        if not self._before:
            for item in attributes_of(variables):
                self._before[item.key] = item, *tree_flatten(item.read())
        return {name: self._value(key) for key, name in self._names.items()}

    def _value(self, key: tuple[int, str]) -> Any:
        _, leaves, spec = self._before[key]
        return tree_unflatten(leaves, spec)

    def set(self, values: Mapping[str, Any]) -> None:
        """Give the changing attributes these values."""
        for key, name in self._names.items():
            if name in values:
                self._before[key][0].set(values[name])

    def end(self, taken: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The values of the changing attributes after an iteration, and whether more of them change than were known.

        All attributes have the values from before the loop again.

        Args:
            taken: names that are not free.
        """
        values: dict[str, Any] = {}
        has_more = False
        for key, (item, leaves, spec) in self._before.items():
            value = item.read()
            if key in self._names:
                values[self._names[key]] = value
            else:
                now, spec_now = tree_flatten(value)
                if spec == spec_now and all(a is b or _is_equal(a, b) for a, b in zip(leaves, now, strict=True)):
                    continue
                has_more = True
                self._names[key] = self._unused(item, taken)
            item.set(self._value(key))
        return values, has_more

    def _unused(self, item: Attribute, taken: Mapping[str, Any]) -> str:
        name = item.name
        while name in taken or name in self._names.values():
            name = f"{name}_"
        return name


def _is_equal(first: Any, second: Any) -> bool:
    kinds = (bool, int, float, str, type(None))
    return type(first) is type(second) and isinstance(first, kinds) and first == second


def attributes_of(variables: Mapping[str, Any]) -> Iterator[Attribute]:
    """The attributes of the objects that variables hold, also of those inside of modules, lists and other objects."""
    pending = list(variables.values())
    seen: set[int] = set()
    while pending and len(seen) < MOST_OBJECTS:
        value = pending.pop()
        if type(value) is list or isinstance(value, tuple):
            pending += [item for item in value if not isinstance(item, torch.Tensor)]
            continue
        if type(value) is dict:
            pending += value.values()
            continue
        if id(value) in seen or not _has_state(value):
            continue
        seen.add(id(value))
        names = list(vars(value)) if not isinstance(value, torch.nn.Module) else _of_module(value)
        for name in names:
            held = getattr(value, name, None)
            if _is_value(held):
                yield Attribute(value, name)
            pending.append(held)
        if isinstance(value, torch.nn.Module):
            pending += value._modules.values()


def _of_module(module: torch.nn.Module) -> list[str]:
    plain = [name for name in vars(module) if not name.startswith("_") or isinstance(vars(module)[name], torch.Tensor)]
    return [*(name for name in plain if name != "training"), *module._buffers]


def _has_state(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, type, FunctionType, MethodType, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, torch.nn.Module) or type(value).__module__.partition(".")[0] not in FOREIGN


def _is_value(value: Any) -> bool:
    """Whether a loop may carry a value: tensors, numbers, and containers of them."""
    if isinstance(value, torch.nn.Parameter):
        return False
    leaves = tree_flatten(value)[0]
    return all(leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str)) for leaf in leaves)
