"""Structure of a target's return value: tensors and plain values in tuples, lists, dictionaries, named tuples and dataclasses.

A structure is a string: ``tensor``; ``tuple`` or ``list`` if all items are tensors; otherwise a Python expression. In the
expression ``results[0]`` is the first tensor, and ``sizes['B*T']`` is a number that depends on the input sizes. Example:
``{'loss': results[0], 'count': sizes['B*T']}``. A view of an input that the target changed is a view of that input, which is
the tensor: ``results[0].as_strided((sizes['B'], 2), (4, 1), results[0].storage_offset() + 1)``.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

CONTAINERS = (tuple, list, dict)
PLAIN = (bool, int, float, str, type(None))
"""Values that a structure contains literally; for other types it contains only the type name."""
RESULTS, SIZES = "results", "sizes"
"""Names in a structure: ``results`` indexes the tensors, ``sizes`` the numbers that depend on the input sizes."""


def parts(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key, index or field; ``None`` if the value is not a container."""
    kind = type(value)
    if is_tensor(value):
        return None
    if kind in (dict, OrderedDict):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if kind in CONTAINERS or _is_named_tuple(kind) or _is_of_torch(kind):
        return dict(enumerate(value))
    return None


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_of_torch(kind: type) -> bool:
    """Whether the type is ``torch.Size`` or a named tuple of torch, such as the result of ``torch.max`` along a dimension."""
    return issubclass(kind, tuple) and (kind.__module__, kind.__name__) in (
        ("torch", "Size"),
        ("torch.return_types", kind.__name__),
    )


def leaves(value: Any) -> list[Any]:
    """All values inside nested containers, in order; the value itself if it is not a container."""
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    items = parts(value)
    if items is None:
        yield value
        return
    for item in items.values():
        yield from _leaves(item)


def tensors_of(value: Any) -> list[Any]:
    """The leaves that are tensors."""
    return [item for item in leaves(value) if is_tensor(item)]


def is_tensor(value: Any) -> bool:
    """Whether a leaf is a tensor. Does not import torch."""
    return hasattr(value, "dtype") and hasattr(value, "stride")


def classes(value: Any) -> list[type]:
    """The classes of all named tuples, dataclasses and ordered dictionaries in the value."""
    items = parts(value)
    if items is None:
        return []
    kind = type(value)
    classes_here = [] if kind in CONTAINERS or _is_of_torch(kind) else [kind]
    return classes_here + [inner for item in items.values() for inner in classes(item)]


def can_be_rebuilt(value: Any) -> bool:
    """Whether each nested container equals a new one that its class constructs from the items alone."""
    items = parts(value)
    if items is None:
        return True
    rebuilt = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        try:
            rebuilt = type(value)(**items)
        except TypeError:
            return False
        if set(getattr(rebuilt, "__dict__", ())) != set(getattr(value, "__dict__", ())):
            return False
    elif _is_named_tuple(type(value)) and not _is_of_torch(type(value)):
        rebuilt = type(value)(*value)
    rebuilt_items = parts(rebuilt)
    same = (
        rebuilt_items is not None
        and rebuilt_items.keys() == items.keys()
        and all(rebuilt_items[key] is items[key] for key in items)
    )
    return same and all(can_be_rebuilt(item) for item in items.values())


def structure_of(
    value: Any,
    class_name: Callable[[type], str] = lambda item_type: item_type.__qualname__,
    leaf_text: Callable[[Any], str] = lambda leaf: repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__,
    views: Mapping[int, str] | None = None,
) -> str:
    """The structure of a return value, as described in this module's docstring.

    Args:
        class_name: Python expression for a class.
        leaf_text: Python expression for a leaf that is not a tensor.
        views: Python expressions for some of the tensors, by number.
    """
    if is_tensor(value) and not views:
        return "tensor"
    if type(value) in (tuple, list) and value and all(map(is_tensor, value)) and not views:
        return type(value).__name__
    numbers = count()

    def tensor_text(number: int) -> str:
        return (views or {}).get(number, f"{RESULTS}[{number}]")

    def describe(item: Any) -> str:
        items = parts(item)
        if items is None:
            return tensor_text(next(numbers)) if is_tensor(item) else leaf_text(item)
        item_type, texts = type(item), [describe(part) for part in items.values()]
        if isinstance(item, dict) and item_type in (dict, OrderedDict):
            text = "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(items, texts, strict=True)) + "}"
            return text if item_type is dict else f"{class_name(item_type)}({text})"
        if item_type is list:
            return f"[{', '.join(texts)}]"
        if item_type is tuple or _is_of_torch(item_type):
            text = f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            return text if item_type is tuple else f"{item_type.__module__}.{item_type.__name__}({text})"
        if _is_named_tuple(item_type):
            return f"{class_name(item_type)}({', '.join(texts)})"
        return f"{class_name(item_type)}({', '.join(f'{key}={part}' for key, part in zip(items, texts, strict=True))})"

    return describe(value)


def is_nested(text: str) -> bool:
    """Whether a structure is neither one tensor nor a flat tuple or list of tensors."""
    return text not in ("", "tensor", "tuple", "list")


def fill_structure(text: str, result: Callable[[int], str], size: Callable[[Any], str]) -> str:
    """Python expression that builds a nested structure. ``result(i)`` is the expression of tensor ``i``.

    ``size(text)`` is the expression of a number that depends on the input sizes.
    """

    class Filled(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            item: Any = ast.literal_eval(node.slice)
            expression = result(item) if ast.unparse(node.value) == RESULTS else size(item)
            return ast.parse(expression, mode="eval").body

    return ast.unparse(Filled().visit(ast.parse(text, mode="eval").body))


def sizes_in(text: str) -> list[str]:
    """The symbolic sizes in a structure."""
    nodes = ast.walk(ast.parse(text, mode="eval")) if is_nested(text) else iter(())
    items = [node for node in nodes if isinstance(node, ast.Subscript) and ast.unparse(node.value) == SIZES]
    return [str(ast.literal_eval(node.slice)) for node in items]
