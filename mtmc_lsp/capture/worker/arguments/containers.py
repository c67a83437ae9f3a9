"""Takes containers among the arguments of a call apart into leaves, and builds them again from other leaves. Runs in workers."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from mtmc_lsp.core.workload import ArgumentSpec, CapturedArgument, Container, ContainerKind

Spec = TypeVar("Spec", ArgumentSpec, CapturedArgument)


class FurtherArguments(tuple[Any, ...]):
    """The value of ``*args``."""


class FurtherKeywords(dict[str, Any]):
    """The value of ``**kwargs``."""


KINDS: Mapping[type, ContainerKind] = {
    tuple: ContainerKind.TUPLE,
    list: ContainerKind.LIST,
    dict: ContainerKind.DICT,
    OrderedDict: ContainerKind.DICT,
    FurtherArguments: ContainerKind.POSITIONAL,
    FurtherKeywords: ContainerKind.KEYWORDS,
}
"""Kinds of the containers that are not classes of the user."""


def container_of(value: Any, class_name: Callable[[type], str] = lambda kind: kind.__qualname__) -> Container | None:
    """The container that a value is; ``None`` for tensors, plain values and other objects.

    Args:
        class_name: Python expression for the class of a named tuple or a dataclass.
    """
    kind = type(value)
    if kind in KINDS:
        if not isinstance(value, dict):
            return Container(KINDS[kind], tuple(range(len(value))))
        has_simple_keys = all(type(key) in (int, str) for key in value)
        name = class_name(kind) if kind is OrderedDict else ""
        return Container(KINDS[kind], tuple(value), name) if has_simple_keys else None
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return Container(ContainerKind.FIELDS, tuple(kind._fields), class_name(kind))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.Tensor, torch.nn.Module)):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        return Container(ContainerKind.FIELDS, names, class_name(kind))
    return None


def items_of(value: Any, container: Container) -> list[Any]:
    """The items of a container, in the order of its keys."""
    if container.kind is ContainerKind.FIELDS:
        return [getattr(value, str(key)) for key in container.keys]
    return [value[key] for key in container.keys]


def is_structured(value: Any) -> bool:
    """Whether a container's leaves are arguments by themselves. Lists and tuples of plain values are one argument."""
    container = container_of(value)
    if container is None:
        return False
    if container.kind in (ContainerKind.TUPLE, ContainerKind.LIST):
        return any(isinstance(item, torch.Tensor) or is_structured(item) for item in value)
    return True


def leaves_with_paths(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of an argument with their paths; the argument itself if it is not structured."""
    container = container_of(value) if is_structured(value) else None
    if container is None:
        yield path, value
        return
    for key, item in zip(container.keys, items_of(value, container), strict=True):
        yield from leaves_with_paths(container.path(path, key), item)


def rebuilt(value: Any, leaves: Iterator[Any]) -> Any:
    """A container like ``value`` with other leaves; the next leaf if ``value`` is not structured."""
    container = container_of(value) if is_structured(value) else None
    if container is None:
        return next(leaves)
    items = [rebuilt(item, leaves) for item in items_of(value, container)]
    if isinstance(value, dict):
        return type(value)(zip(container.keys, items, strict=True))
    if container.kind is not ContainerKind.FIELDS:
        return type(value)(items)
    make = getattr(value, "_make", None)
    if make is not None:
        return make(items)
    # A copy without a call of the constructor, which may check or convert the values of the fields.
    other = copy.copy(value)
    for key, item in zip(container.keys, items, strict=True):
        object.__setattr__(other, str(key), item)
    return other


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container like ``value`` with changed leaves; the changed value if it is not structured."""
    if not is_structured(value):
        return change(value)
    return rebuilt(value, iter([change(leaf) for _, leaf in leaves_with_paths("", value)]))


def same_objects(one: Any, other: Any) -> bool:
    """Whether two arguments have the same structure and the same objects as leaves."""
    if not is_structured(one) or not is_structured(other):
        return one is other
    first, second = container_of(one), container_of(other)
    assert first is not None and second is not None
    if first != second or type(one) is not type(other):
        return False
    return all(map(same_objects, items_of(one, first), items_of(other, second)))


def made(spec: Spec, leaf: Callable[[Spec], Any], resolve_class: Callable[[str], Any]) -> Any:
    """The argument that a workload or a capture describes.

    Args:
        leaf: the value of a tensor or a constant.
        resolve_class: the class with a name in the target's file.
    """
    container = spec.container
    if container is None:
        return leaf(spec)
    items = [made(item, leaf, resolve_class) for item in spec.items]
    if container.kind is ContainerKind.LIST:
        return items
    if container.kind in (ContainerKind.TUPLE, ContainerKind.POSITIONAL):
        return tuple(items)
    by_key = dict(zip(container.keys, items, strict=True))
    if not container.class_name:
        return by_key
    kind = resolve_class(container.class_name)
    is_mapping = container.kind is ContainerKind.DICT
    return kind(by_key) if is_mapping else kind(**{str(key): item for key, item in by_key.items()})
