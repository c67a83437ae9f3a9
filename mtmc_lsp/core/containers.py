"""Containers among the arguments of a target: tuples, lists, dictionaries, named tuples and dataclasses.

The items of a container are its *leaves* (tensors and plain values) and further containers. A *path* is the Python expression of
an item in terms of the target's parameters: ``position_embeddings[0]``, ``batch['mask']``, ``config.weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class ContainerKind(Enum):
    """Kind of a container."""

    TUPLE = "tuple"
    LIST = "list"
    DICT = "dict"
    FIELDS = "fields"
    """A named tuple or a dataclass: its class takes the fields as keyword arguments."""
    POSITIONAL = "positional"
    """The further arguments of ``*args``."""
    KEYWORDS = "keywords"
    """The further arguments of ``**kwargs``."""


@dataclass(frozen=True)
class Container:
    """The kind of one container, and the keys of its items."""

    kind: ContainerKind
    keys: tuple[int | str, ...]
    """Indices, keys or names of fields."""
    class_name: str = ""
    """Python expression for the class of ``FIELDS``, or of a ``DICT`` that is not a plain dictionary, in the target's file."""

    def path(self, whole: str, key: int | str) -> str:
        """The path of an item, from the path of the container."""
        return f"{whole}.{key}" if self.kind is ContainerKind.FIELDS else f"{whole}[{key!r}]"

    def expression(self, items: Sequence[str]) -> str:
        """Python expression for a new container with these items."""
        if self.kind in (ContainerKind.TUPLE, ContainerKind.POSITIONAL):
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if self.kind is ContainerKind.LIST:
            return f"[{', '.join(items)}]"
        pairs = list(zip(self.keys, items, strict=True))
        if self.kind is ContainerKind.FIELDS:
            return f"{self.class_name}({', '.join(f'{key}={item}' for key, item in pairs)})"
        text = "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
        return f"{self.class_name}({text})" if self.class_name else text
