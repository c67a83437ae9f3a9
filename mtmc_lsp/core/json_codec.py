"""Convert dataclasses to JSON data and back, based on their type hints."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Convert ``value`` to JSON data: dataclasses become dicts, tuples become lists, enums become their values.

    A class may define ``to_json`` (and the classmethod ``from_json``) for a custom encoding.
    """
    encode = getattr(value, "to_json", None)
    if encode is not None:
        return encode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def from_json(kind: type[T], data: Any) -> T:
    """Decode JSON data into a value of type ``kind``; the inverse of :func:`to_json`.

    Raises:
        TypeError: ``data`` does not match ``kind``; the message names the field.
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
    decode = getattr(kind, "from_json", None)
    if decode is not None:
        return decode(data)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and isinstance(data, kind):
        return data
    raise TypeError(f"{path}: expected {kind}, got {data!r}")


def _decode_union(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in kinds:
        return None
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
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    unknown = set(data) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise TypeError(f"{path}: unknown field {sorted(unknown)[0]!r} for {kind.__name__}")
    return kind(**{name: _decode(hints[name], data[name], f"{path}.{name}") for name in names if name in data})
