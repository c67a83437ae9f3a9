"""Dataclasses to plain JSON data and back, by their type hints.

A dataclass of a union may set the class variable ``json_tag``: it is written as ``"kind"``, and decides which class is read.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
TAG = "kind"
"""The key of a tagged dataclass's tag."""


def to_json(value: Any) -> Any:
    """``value`` as JSON data: dataclasses become dicts, tuples lists, enums their values.

    A class may define ``to_json`` (and the classmethod ``from_json``) to choose its own form.
    """
    own = getattr(value, "to_json", None)
    if own is not None:
        return own()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = {TAG: value.json_tag} if hasattr(value, "json_tag") else {}
        return tag | {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is not JSON data")


def from_json(kind: type[T], data: Any) -> T:
    """The value of type ``kind`` whose ``to_json`` gave ``data``.

    Raises:
        TypeError: ``data`` does not fit ``kind``; the message names the field.
    """
    return typing.cast(T, _decode(kind, data, kind.__name__))


def _decode(kind: Any, data: Any, path: str) -> Any:
    if kind is Any or kind is object:
        return data
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data, path)
    if origin in (tuple, list):
        arguments = typing.get_args(kind)
        if not isinstance(data, list):
            raise TypeError(f"{path}: expected a list, got {data!r}")
        if (origin is tuple and len(arguments) != 2) or (origin is tuple and arguments[1] is not Ellipsis):
            items: Any = [_decode(k, d, f"{path}[{i}]") for i, (k, d) in enumerate(zip(arguments, data, strict=True))]
        else:
            items = [_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(data)]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping):
        value_kind = typing.get_args(kind)[1]
        return {key: _decode(value_kind, item, f"{path}.{key}") for key, item in data.items()}
    own = getattr(kind, "from_json", None)
    if own is not None:
        return own(data)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if data not in (values := [member.value for member in kind]):
            raise TypeError(f"{path}: {data!r} is none of {', '.join(map(repr, values))}")
        return kind(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and isinstance(data, kind):
        return data
    raise TypeError(f"{path}: expected {kind}, got {data!r}")


def _decode_union(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    tagged = {kind.json_tag: kind for kind in kinds if hasattr(kind, "json_tag")}
    if tagged and isinstance(data, dict) and data.get(TAG) in tagged:
        return _decode(tagged[data[TAG]], data, path)
    for kind in kinds:
        if kind is type(None) or (kind is int and isinstance(data, bool)):
            continue
        try:
            return _decode(kind, data, path)
        except (TypeError, ValueError, KeyError):
            continue
    raise TypeError(f"{path}: {data!r} fits none of {kinds}")


def _decode_dataclass(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise TypeError(f"{path}: expected an object for {kind.__name__}, got {data!r}")
    if hasattr(kind, "json_tag"):
        if data.get(TAG, kind.json_tag) != kind.json_tag:
            raise TypeError(f"{path}: expected {kind.json_tag!r}, got {data[TAG]!r}")
        data = {name: value for name, value in data.items() if name != TAG}
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    unknown = set(data) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise TypeError(f"{path}: unknown field {sorted(unknown)[0]!r} for {kind.__name__}")
    values = {name: _decode(hints[name], data[name], f"{path}.{name}") for name in names if name in data}
    try:
        return kind(**values)
    except ValueError as reason:
        raise TypeError(f"{path}: {reason}") from None
