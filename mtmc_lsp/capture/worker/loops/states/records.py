"""Dataclasses with tensors as states of a loop: flattened like tuples."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

KIND = "\0dataclass"
"""The key of the class in a dictionary that stands for a dataclass."""


def flattened(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value and its structure, of dataclasses as well."""
    leaves, spec = tree_flatten(_packed(value))
    return leaves, spec


def unflattened(leaves: list[Any], spec: TreeSpec) -> Any:
    """The inverse of :func:`flattened`."""
    return _unpacked(tree_unflatten(leaves, spec))


def _packed(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return {KIND: type(value), **{name: _packed(getattr(value, name)) for name in names if hasattr(value, name)}}
    if type(value) in (list, tuple):
        return type(value)(_packed(item) for item in value)
    return {key: _packed(item) for key, item in value.items()} if type(value) is dict else value


def _unpacked(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_unpacked(item) for item in value)
    if type(value) is not dict:
        return value
    if KIND not in value:
        return {key: _unpacked(item) for key, item in value.items()}
    # The constructor may compute fields or check them.
    record = object.__new__(value[KIND])
    for name, item in value.items():
        if name != KIND:
            object.__setattr__(record, name, _unpacked(item))
    return record
