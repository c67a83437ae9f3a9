"""Syntax of containers in a directive: ``(f32[N],f32[N])``, ``[f32[N], 2]``, ``{"x": f32[N]}``, ``Config(scale=0.5)``."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace

from mtmc_lsp.core.workload import Container, ContainerKind

OPENING = {"[": "]", "(": ")", "{": "}"}
CLASS = re.compile(r"(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\((?P<items>.*)\)", re.DOTALL)
TENSOR_START = re.compile(r"\w+\[")
RANGED = re.compile(r"(?P<items>[\[({].*[\])}])(?P<range>@[^\s()[\]{}]+\.\.[^\s()[\]{}]+)", re.DOTALL)
"""A container with a value range, which is that of each tensor in it."""


@dataclass(frozen=True)
class Value:
    """A value of a directive: a container with its items, or the text of a tensor or a constant."""

    path: str
    text: str
    container: Container | None = None
    items: tuple[Value, ...] = ()

    @property
    def is_tensor(self) -> bool:
        """Whether it is the text of a tensor."""
        return self.container is None and TENSOR_START.match(self.text) is not None

    @property
    def leaves(self) -> tuple[Value, ...]:
        """All texts of tensors and constants in it."""
        if self.container is None:
            return (self,)
        return tuple(leaf for item in self.items for leaf in item.leaves)


def split_at(text: str, separator: str) -> list[str]:
    """Split at a character outside brackets and quotes. A directive's brackets and quotes are known to be closed."""
    parts, current, depth, quote = [], "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in OPENING.values():
            depth -= 1
        if character == separator and not depth and not quote:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()]


def parse_value(path: str, text: str) -> Value:
    """The value that a text describes.

    Raises:
        ValueError: the text cannot be read; a sentence.
    """
    text = text.strip()
    ranged = RANGED.fullmatch(text)
    if ranged is not None and _is_enclosed(ranged["items"], text[0]):
        return _with_range(parse_value(path, ranged["items"]), ranged["range"])
    container = None if TENSOR_START.match(text) else _parse_container(path, text)
    if container is not None and _holds_only_lists(container):
        return Value(path, text)
    return container or Value(path, text)


def _with_range(value: Value, text: str) -> Value:
    """The value with a range for each of its tensors that has none."""
    if value.container is not None:
        return replace(value, items=tuple(_with_range(item, text) for item in value.items))
    return replace(value, text=value.text + text) if value.is_tensor and "@" not in value.text else value


def _holds_only_lists(value: Value) -> bool:
    """Whether the value consists of plain values and lists of them, which are a constant."""
    if value.container is None:
        return not value.is_tensor
    return value.container.kind is ContainerKind.LIST and all(map(_holds_only_lists, value.items))


def _parse_container(path: str, text: str) -> Value | None:
    if _is_enclosed(text, "("):
        parts = split_at(text[1:-1], ",")
        if len(parts) == 1 and parts[0]:
            # Parentheses around arithmetic.
            return None
        return _sequence(path, text, ContainerKind.TUPLE, parts)
    if _is_enclosed(text, "["):
        return _sequence(path, text, ContainerKind.LIST, split_at(text[1:-1], ","))
    if _is_enclosed(text, "{"):
        pairs = [_pair(item) for item in _without_end(split_at(text[1:-1], ","))]
        return _with_items(
            path, text, Container(ContainerKind.DICT, tuple(key for key, _ in pairs)), [v for _, v in pairs]
        )
    match = CLASS.fullmatch(text)
    if match is None:
        return None
    fields = [_field(item) for item in _without_end(split_at(match["items"], ","))]
    container = Container(ContainerKind.FIELDS, tuple(name for name, _ in fields), match["name"])
    return _with_items(path, text, container, [value for _, value in fields])


def _is_enclosed(text: str, opening: str) -> bool:
    """Whether the first character is a bracket that the last one closes."""
    if not text.startswith(opening) or not text.endswith(OPENING[opening]):
        return False
    depth, quote = 0, ""
    for character in text[:-1]:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in OPENING) - (character in OPENING.values())
        if depth == 0 and not quote:
            return False
    return True


def _without_end(parts: list[str]) -> list[str]:
    """The items without the empty text after a trailing comma."""
    return parts[:-1] if not parts[-1] else parts


def _sequence(path: str, text: str, kind: ContainerKind, parts: list[str]) -> Value:
    items = _without_end(parts)
    return _with_items(path, text, Container(kind, tuple(range(len(items)))), items)


def _with_items(path: str, text: str, container: Container, items: list[str]) -> Value:
    if not all(items):
        raise ValueError(f"an item of {text} is empty")
    if len(set(container.keys)) < len(container.keys):
        raise ValueError(f"{text} has a key twice")
    values = (parse_value(container.path(path, key), item) for key, item in zip(container.keys, items, strict=True))
    return Value(path, text, container, tuple(values))


def _pair(item: str) -> tuple[int | str, str]:
    key, *rest = split_at(item, ":")
    try:
        literal = ast.literal_eval(key)
    except (ValueError, SyntaxError):
        literal = None
    if not rest or type(literal) not in (int, str):
        raise ValueError(f"{item!r} is not a key with a value")
    return literal, item[len(key) :].lstrip().removeprefix(":").strip()


def _field(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError(f"{item!r} is not a field with a value")
    return name.strip(), value.strip()
