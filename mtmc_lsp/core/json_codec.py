"""Dataclasses to plain JSON data and back, by their type hints.

A dataclass of a union may set the class variable ``json_tag``: it is written as ``"kind"``, and decides which class is read.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
TAG = "kind"
"""The key of a tagged dataclass's tag."""

_REPEATED = "repeated"
Repeated = Annotated[T, _REPEATED]
"""Type of a dataclass field that is large and the same in many messages, for example ``capture: Repeated[Capture]``.

Encoding the same object as the last time, or decoding a value that is equal to the last one of its type, gives the same object
again.
"""
_last_encoded: dict[tuple[type, str], tuple[Any, Any]] = {}
"""The last value of each :data:`Repeated` field, with its JSON data."""
_last_decoded: dict[Any, tuple[str, Any]] = {}
"""The last value of each type of a :data:`Repeated` field, with its JSON text."""


def to_json(value: Any) -> Any:
    """``value`` as JSON data: dataclasses become dicts, tuples lists, enums their values, bytes Base64 text.

    Keys of mappings may be text, integers or enums. A class may define ``to_json`` and the classmethod ``from_json`` to choose
    another form.
    """
    encode = getattr(value, "to_json", None)
    if encode is not None:
        return encode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tag = {TAG: value.json_tag} if hasattr(value, "json_tag") else {}
        return tag | {field.name: _field_to_json(value, field) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {_key(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def _field_to_json(value: Any, field: dataclasses.Field[Any]) -> Any:
    item = getattr(value, field.name)
    # Annotations are text, because modules postpone their evaluation.
    if not str(field.type).startswith("Repeated["):
        return to_json(item)
    key = (type(value), field.name)
    last = _last_encoded.get(key)
    if last is None or last[0] is not item:
        last = _last_encoded[key] = item, to_json(item)
    return last[1]


def _key(key: object) -> str:
    return str(key.value if isinstance(key, enum.Enum) else key)


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
    if origin is Annotated:
        inner, *marks = typing.get_args(kind)
        return (_decode_repeated if _REPEATED in marks else _decode)(inner, data, path)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data, path)
    if origin in (tuple, list, Sequence):
        arguments = typing.get_args(kind)
        if not isinstance(data, list):
            raise TypeError(f"{path}: expected a list, got {data!r}")
        if (origin is tuple and len(arguments) != 2) or (origin is tuple and arguments[1] is not Ellipsis):
            items: Any = [_decode(k, d, f"{path}[{i}]") for i, (k, d) in enumerate(zip(arguments, data, strict=True))]
        else:
            items = [_decode(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(data)]
        return items if origin is list else tuple(items)
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise TypeError(f"{path}: expected an object, got {data!r}")
        key_kind, value_kind = typing.get_args(kind)
        return {
            _decode_key(key_kind, key, path): _decode(value_kind, item, f"{path}.{key}") for key, item in data.items()
        }
    custom = getattr(kind, "from_json", None)
    if custom is not None:
        return custom(data)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _decode_enum(kind, data, path)
    if kind is bytes and isinstance(data, str):
        try:
            return base64.b64decode(data, validate=True)
        except ValueError:
            raise TypeError(f"{path}: expected Base64 text, got {data!r}") from None
    if kind is int and isinstance(data, bool):
        raise TypeError(f"{path}: expected an integer, got {data!r}")
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and isinstance(data, kind):
        return data
    raise TypeError(f"{path}: expected {kind}, got {data!r}")


def _decode_key(kind: Any, key: str, path: str) -> Any:
    if kind is int:
        try:
            return int(key)
        except ValueError:
            raise TypeError(f"{path}: expected an integer as key, got {key!r}") from None
    return _decode(kind, key, path)


def _decode_enum(kind: type[enum.Enum], data: Any, path: str) -> enum.Enum:
    try:
        return kind(data)
    except ValueError:
        values = ", ".join(repr(member.value) for member in kind)
        raise TypeError(f"{path}: {data!r} is none of {values}") from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


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
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in data:
        if name not in fields:
            raise TypeError(f"{path}: unknown field {name!r} for {kind.__name__}")
    values = {}
    for name, field in fields.items():
        if name in data and field.init:
            values[name] = _decode(hints[name], data[name], f"{path}.{name}")
        elif field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise TypeError(f"{path}: missing field {name!r} for {kind.__name__}")
    try:
        return kind(**values)
    except ValueError as reason:
        raise TypeError(f"{path}: {reason}") from None


def _decode_repeated(kind: Any, data: Any, path: str) -> Any:
    text = json.dumps(data)
    last = _last_decoded.get(kind)
    if last is None or last[0] != text:
        last = _last_decoded[kind] = (text, _decode(kind, data, path))
    return last[1]
