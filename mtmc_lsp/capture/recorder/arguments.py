"""Descriptions of the arguments of a recorded call: shapes, dtypes, value ranges and constants. Runs inside the user's program.

It needs only the standard library, like the recorder, which loads it by its path.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

LARGEST_RANGED = 1 << 27
"""Elements of the largest tensor whose range is recorded."""
LONGEST = 64
"""Elements of the longest list, or characters of the longest string, that is recorded as a constant."""
PLAIN = (bool, int, float, str, type(None))
FIELDS = "fields"
"""Kind of named tuples and dataclasses. The kinds are those of ``mtmc_lsp.core.workload``."""
FURTHER = {"*": "positional", "**": "keywords"}
"""Kinds of further arguments."""


def argument_record(name: str, value: Any, torch: types.ModuleType) -> dict[str, Any]:
    """The record of one argument. ``*`` and ``**`` before a name mark further arguments."""
    stars, name = name[: name.count("*")], name.lstrip("*")
    value = tuple(value) if type(value) is torch.Size else value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided:
            return {"name": name, "other": "tensor that is not strided"}
        tensor: dict[str, Any] = {"shape": list(value.shape), "stride": list(value.stride())}
        tensor["dtype"] = str(value.dtype).replace("torch.", "")
        tensor["requires_grad"] = value.requires_grad and torch.is_grad_enabled()
        return {"name": name, "tensor": tensor}
    if _is_constant(value):
        return {"name": name, "constant": value}
    container = _container(value)
    if container is None:
        return {"name": name, "other": type(value).__name__}
    if stars:
        container["kind"] = FURTHER[stars]
    has_fields = container["kind"] == FIELDS
    paths = (f"{name}.{key}" if has_fields else f"{name}[{key!r}]" for key in container["keys"])
    items = [argument_record(path, item, torch) for path, item in zip(paths, _items(value), strict=True)]
    return {"name": name, "container": container, "items": items}


def _is_constant(value: Any) -> bool:
    if type(value) is list:
        return len(value) <= LONGEST and all(type(item) in PLAIN and _is_constant(item) for item in value)
    if type(value) is float:
        return value - value == 0
    return type(value) in PLAIN and (not isinstance(value, str) or len(value) <= LONGEST)


def _container(value: Any) -> dict[str, Any] | None:
    """Kind, keys and class of a tuple, list, dictionary, named tuple or dataclass; ``None`` for others and for long ones."""
    kind = type(value)
    keys, class_name, name = None, "", FIELDS
    if kind in (list, tuple):
        keys, name = list(range(len(value))), kind.__name__
    elif kind is dict and all(type(key) in (int, str) for key in value):
        keys, name = list(value), "dict"
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        keys, class_name = list(kind._fields), kind.__qualname__
    elif hasattr(kind, "__dataclass_fields__"):
        keys, class_name = list(kind.__dataclass_fields__), kind.__qualname__
    if keys is None or len(keys) > LONGEST or "<locals>" in class_name:
        return None
    return {"kind": name, "keys": keys, "class_name": class_name}


def _items(value: Any) -> list[Any]:
    """The items of a container."""
    if type(value) is dict:
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return [getattr(value, name, None) for name in type(value).__dataclass_fields__]


def tensors_of(value: Any, torch: types.ModuleType) -> Iterator[Any]:
    """The tensors in an argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in PLAIN and _container(value) is not None:
        for item in _items(value):
            yield from tensors_of(item, torch)


def key_of(value: Any, torch: types.ModuleType) -> object:
    """The part of an argument that distinguishes signatures. Numbers are not part of it: step counts and learning rates vary."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (value.shape, value.stride(), value.dtype) if value.layout is torch.strided else kind
    if kind is bool or kind is str or value is None:
        return value
    if kind in PLAIN:
        return kind
    if _is_constant(value):
        return (kind, repr(value))
    container = _container(value)
    if container is None:
        return kind
    return (kind, *container["keys"], *(key_of(item, torch) for item in _items(value)))


def update_range(recorded: dict[str, Any], value: Any, torch: types.ModuleType) -> None:
    """Add the value of another call to the record: extend the range of a tensor, or note that a number varies."""
    for item, part in zip(recorded.get("items", ()), _items(value) if "items" in recorded else (), strict=True):
        update_range(item, part, torch)
    if "constant" in recorded:
        recorded["varies"] = recorded.get("varies", False) or value != recorded["constant"]
    if "tensor" not in recorded or not 0 < value.numel() <= LARGEST_RANGED or value.device.type == "meta":
        return
    if value.dtype is torch.bool or value.is_complex():
        return
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    low, high = (float(item) for item in _extremes(value, torch))
    if low - low == 0 and high - high == 0:
        tensor = recorded["tensor"]
        tensor["low"], tensor["high"] = min(low, tensor.get("low", low)), max(high, tensor.get("high", high))


def _extremes(value: Any, torch: types.ModuleType) -> Iterator[Any]:
    try:
        pair = torch.aminmax(value.detach())
    except (RuntimeError, NotImplementedError):
        # torch has no minimum for float8, and a tensor inside vmap has more than one.
        return iter((float("nan"), float("nan")))
    return iter([item.item() for item in pair])
