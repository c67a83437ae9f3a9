"""Repeated blocks: one decision for all copies of a block in a network, applied in one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from mtmc_lsp.core.graph import Argument, Graph, Ref, TensorType

MANY = 3
"""Copies from which on they become one step; two are reviewed one by one."""

VARIADIC = frozenset({"cat", "stack"})
"""Operations on any number of tensors: in a network, each copy may have one more than the previous one."""

Item = TypeVar("Item")


def form(graph: Graph, nodes: Iterable[str]) -> Hashable:
    """A key of what nodes compute, without sizes: equal for two sets whose kernels differ only in numbers."""
    order = sorted((name for name in nodes if name in graph.named), key=graph.positions.__getitem__)
    inside = {name: i for i, name in enumerate(order)}
    outside: dict[Ref, int] = {}

    def argument_key(value: Argument) -> Hashable:
        if isinstance(value, Ref) and value.name in inside:
            return ("inner", inside[value.name], value.index)
        if isinstance(value, Ref):
            return ("outer", outside.setdefault(value, len(outside)), _kind(graph.type_of(value)))
        if isinstance(value, tuple):
            return tuple(argument_key(item) for item in value if isinstance(item, (Ref, tuple)))
        return value if isinstance(value, str) else None

    def node_key(name: str) -> Hashable:
        node = graph.named[name]
        if node.op.split(".")[1] in VARIADIC:
            read = frozenset(
                argument_key(ref) if ref.name in inside else _kind(graph.type_of(ref)) for ref in node.inputs()
            )
            return (node.op, read, _kind(node.type))
        options = tuple((key, argument_key(value)) for key, value in sorted(node.kwargs.items()))
        is_read_outside = any(reader.name not in inside for reader in graph.readers(name))
        return (node.op, tuple(argument_key(item) for item in node.args), options, _kind(node.type), is_read_outside)

    return tuple(node_key(name) for name in order)


def _kind(kind: TensorType) -> Hashable:
    return (kind.dtype, len(kind.shape), kind.is_channels_last)


def groups_of_equal(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Groups of items with equal keys; groups of fewer than :data:`MANY` become single items. Order is preserved."""
    by_key: dict[Hashable, list[Item]] = {}
    for item in items:
        by_key.setdefault(key(item), []).append(item)
    groups: list[list[Item]] = []
    for group in by_key.values():
        groups += [group] if len(group) >= MANY else [[item] for item in group]
    return groups
