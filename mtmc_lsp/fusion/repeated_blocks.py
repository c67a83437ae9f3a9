"""Places of one form: what a network repeats block after block is decided once, and done at all of them in one step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from mtmc_lsp.core.graph import Argument, Graph, Ref, TensorType

MANY = 3
"""From that many places on they are one step: two are as soon reviewed one by one."""

VARIADIC = frozenset({"cat", "stack"})
"""Operations that do one thing to any number of tensors: in a network each has one more than that before it."""

Item = TypeVar("Item")


def form(graph: Graph, nodes: Iterable[str]) -> Hashable:
    """What a set of nodes does, whatever its sizes: equal for two sets that would be the same kernel up to numbers."""
    order = sorted((name for name in nodes if name in graph.named), key=graph.positions.__getitem__)
    inside = {name: i for i, name in enumerate(order)}
    outside: dict[Ref, int] = {}

    def seen(value: Argument) -> Hashable:
        if isinstance(value, Ref) and value.name in inside:
            return ("inner", inside[value.name], value.index)
        if isinstance(value, Ref):
            return ("outer", outside.setdefault(value, len(outside)), _kind(graph.type_of(value)))
        if isinstance(value, tuple):
            return tuple(seen(item) for item in value if isinstance(item, (Ref, tuple)))
        return value if isinstance(value, str) else None

    def of(name: str) -> Hashable:
        node = graph.named[name]
        if node.op.split(".")[1] in VARIADIC:
            read = frozenset(seen(ref) if ref.name in inside else _kind(graph.type_of(ref)) for ref in node.inputs())
            return (node.op, read, _kind(node.type))
        options = tuple((key, seen(value)) for key, value in sorted(node.kwargs.items()))
        left = any(reader.name not in inside for reader in graph.readers(name))
        return (node.op, tuple(seen(item) for item in node.args), options, _kind(node.type), left)

    return tuple(of(name) for name in order)


def _kind(kind: TensorType) -> Hashable:
    return (kind.dtype, len(kind.shape), kind.is_channels_last)


def alike(items: Sequence[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """The items of each form that there are enough of to be one step, together; all others alone. The order is kept."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    groups: list[list[Item]] = []
    for group in found.values():
        groups += [group] if len(group) >= MANY else [[item] for item in group]
    return groups
