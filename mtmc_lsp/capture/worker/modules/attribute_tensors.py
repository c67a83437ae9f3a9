"""Tensors in plain attributes of modules, also inside lists, tuples, dictionaries and plain objects. Runs in workers.

``Module.to`` does not move them, and a module has no name for them. A capture treats them like buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.accesses import STORES, prefixes, steps
from mtmc_lsp.capture.worker.modules.members import access_of, member_of
from mtmc_lsp.core.graph import TensorContainer

DEPTH = 3
"""Levels of containers and objects that are searched below an attribute."""
OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""


@dataclass(frozen=True)
class TensorSlot:
    """One item of a dictionary or a list that holds a tensor."""

    access: str
    """Python expression for the tensor: ``self.scale``, ``self.anchors[0]``, ``self.table['cos']``."""
    holder: Any
    key: Any

    @property
    def value(self) -> torch.Tensor:
        """The tensor."""
        tensor: torch.Tensor = self.holder[self.key]
        return tensor

    @property
    def root(self) -> tuple[Any, Any]:
        """The dictionary or list, and the key, that hold the tensor or the tuple with it."""
        return self.holder.root if isinstance(self.holder, _TupleItems) else (self.holder, self.key)


class _TupleItems:
    """The items of a tuple as if they could be assigned: an assignment replaces the tuple in its holder."""

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    @property
    def root(self) -> tuple[Any, Any]:
        return self._holder.root if isinstance(self._holder, _TupleItems) else (self._holder, self._key)

    def __getitem__(self, index: int) -> Any:
        return self._holder[self._key][index]

    def __setitem__(self, index: int, value: Any) -> None:
        before = self._holder[self._key]
        items = [*before[:index], value, *before[index + 1 :]]
        make = getattr(before, "_make", type(before))
        self._holder[self._key] = make(items)


def attribute_tensors(instance: torch.nn.Module | None) -> list[TensorSlot]:
    """The tensors in plain attributes of a module and its submodules, without its parameters and buffers."""
    if instance is None:
        return []
    registered = {id(tensor) for tensor in (*instance.parameters(), *instance.buffers())}
    slots: list[TensorSlot] = []
    for name, module in instance.named_modules():
        for attribute in [key for key in vars(module) if key not in OF_TORCH]:
            slots += _slots(member_of(access_of(instance, name), module, attribute), vars(module), attribute, DEPTH)
    return [slot for slot in slots if id(slot.value) not in registered]


def _slots(access: str, holder: Any, key: Any, depth: int) -> Iterator[TensorSlot]:
    value = holder[key]
    if isinstance(value, torch.Tensor):
        yield TensorSlot(access, holder, key)
    elif isinstance(value, (list, tuple, dict)) and depth:
        items = _TupleItems(holder, key) if isinstance(value, tuple) else value
        for item in value if isinstance(value, dict) else range(len(value)):
            if type(item) in (int, str):
                yield from _slots(f"{access}[{item!r}]", items, item, depth - 1)
    elif _is_plain_object(value) and depth:
        for name in list(vars(value)):
            yield from _slots(member_of(access, value, name), vars(value), name, depth - 1)


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object that only holds values, such as a configuration."""
    is_other = isinstance(value, (torch.nn.Module, ModuleType, type)) or callable(value)
    return hasattr(value, "__dict__") and not is_other and not type(value).__module__.startswith("torch.")


def containers_of(instance: torch.nn.Module | None, accesses: Iterable[str]) -> tuple[TensorContainer, ...]:
    """The lists, tuples and dictionaries on the paths to these tensors, outer ones first."""
    paths = {
        path: None
        for access in accesses
        for path, step in zip(prefixes(access), steps(access), strict=False)
        if step.is_item
    }
    result = []
    for path in paths:
        value = slot_at(instance, path).value
        if isinstance(value, dict):
            result.append(TensorContainer(path, len(value), tuple(map(repr, value))))
        elif isinstance(value, (list, tuple)):
            result.append(TensorContainer(path, len(value)))
    return tuple(result)


def slot_at(instance: Any, access: str) -> TensorSlot:
    """The slot of a parameter, a buffer or an attribute tensor.

    Raises:
        LookupError, AttributeError: there is nothing of this access.
    """
    holder: Any = {"self": instance}
    key: Any = "self"
    for step in steps(access):
        owner = holder[key]
        if isinstance(owner, torch.nn.Module):
            # Containers of modules and parameters name their items by number.
            key = str(step.key)
            holder = next((store for name in STORES if key in (store := getattr(owner, name))), vars(owner))
        elif step.is_item:
            holder, key = _TupleItems(holder, key) if isinstance(owner, tuple) else owner, step.key
        else:
            holder, key = vars(owner), step.key
    return TensorSlot(access, holder, key)


@contextlib.contextmanager
def assigned(slots: Sequence[TensorSlot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hold other tensors in the slots. What the code inside assigns to a slot stays there."""
    roots = [slot.root for slot in slots]
    before = [holder[key] for holder, key in roots]
    for slot, tensor in zip(slots, tensors, strict=True):
        slot.holder[slot.key] = tensor
    try:
        yield
    finally:
        is_kept = [slot.value is tensor for slot, tensor in zip(slots, tensors, strict=True)]
        for (holder, key), original, is_same in zip(roots, before, is_kept, strict=True):
            if is_same:
                holder[key] = original
