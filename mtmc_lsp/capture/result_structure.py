"""How a target's results are put together: tensors and plain values in tuples, lists, dictionaries, named tuples and dataclasses.

The form of results is ``tensor``; ``tuple`` or ``list`` of tensors alone; or else Python in which ``results[0]`` is the first
tensor and ``sizes['B*T']`` a number that follows from the sizes, such as ``{'loss': results[0], 'count': sizes['B*T']}``.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

CONTAINERS = (tuple, list, dict)
PLAIN = (bool, int, float, str, type(None))
"""Values that are written down as they are; of other types only the name is."""
RESULTS, SIZES = "results", "sizes"
"""What a form's tensors and its numbers that follow from the sizes are items of."""


def parts(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, index or field; ``None`` for all else."""
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
    """Whether it is what ``torch.max`` of a dimension and the like give, or the shape of a tensor."""
    return issubclass(kind, tuple) and (kind.__module__, kind.__name__) in (
        ("torch", "Size"),
        ("torch.return_types", kind.__name__),
    )


def leaves(value: Any) -> list[Any]:
    """Everything that containers hold, in order; a value that is none of these by itself."""
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    held = parts(value)
    if held is None:
        yield value
        return
    for item in held.values():
        yield from _leaves(item)


def tensors_of(value: Any) -> list[Any]:
    """Those leaves that are tensors."""
    return [item for item in leaves(value) if is_tensor(item)]


def is_tensor(value: Any) -> bool:
    """Whether a leaf is a result of its own: no plain value. Torch need not be imported to say so."""
    return hasattr(value, "dtype") and hasattr(value, "stride")


def classes(value: Any) -> list[type]:
    """The classes of all named tuples, dataclasses and ordered dictionaries among the containers."""
    held = parts(value)
    if held is None:
        return []
    kind = type(value)
    own = [] if kind in CONTAINERS or _is_of_torch(kind) else [kind]
    return own + [found for item in held.values() for found in classes(item)]


def is_made_of_its_parts(value: Any) -> bool:
    """Whether a container, and each in it, is what its class makes of its parts, and no more."""
    held = parts(value)
    if held is None:
        return True
    made = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        try:
            made = type(value)(**held)
        except TypeError:
            return False
        if set(getattr(made, "__dict__", ())) != set(getattr(value, "__dict__", ())):
            return False
    elif _is_named_tuple(type(value)) and not _is_of_torch(type(value)):
        made = type(value)(*value)
    again = parts(made)
    same = again is not None and again.keys() == held.keys() and all(again[key] is held[key] for key in held)
    return same and all(is_made_of_its_parts(item) for item in held.values())


def form(
    value: Any,
    named: Callable[[type], str] = lambda kind: kind.__qualname__,
    written: Callable[[Any], str] = lambda leaf: repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__,
) -> str:
    """The form of what was returned; see this module.

    Args:
        value: what was returned.
        named: Python for a class.
        written: Python for a leaf that is no tensor.
    """
    if is_tensor(value):
        return "tensor"
    if type(value) in (tuple, list) and value and all(map(is_tensor, value)):
        return type(value).__name__
    numbers = count()

    def said(item: Any) -> str:
        held = parts(item)
        if held is None:
            return f"{RESULTS}[{next(numbers)}]" if is_tensor(item) else written(item)
        kind, inner = type(item), [said(part) for part in held.values()]
        if isinstance(item, dict) and kind in (dict, OrderedDict):
            text = "{" + ", ".join(f"{key!r}: {part}" for key, part in zip(held, inner, strict=True)) + "}"
            return text if kind is dict else f"{named(kind)}({text})"
        if kind is list:
            return f"[{', '.join(inner)}]"
        if kind is tuple or _is_of_torch(kind):
            text = f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
            return text if kind is tuple else f"{kind.__module__}.{kind.__name__}({text})"
        if _is_named_tuple(kind):
            return f"{named(kind)}({', '.join(inner)})"
        return f"{named(kind)}({', '.join(f'{key}={part}' for key, part in zip(held, inner, strict=True))})"

    return said(value)


def is_nested(text: str) -> bool:
    """Whether a form is neither one tensor nor a tuple or list of tensors."""
    return text not in ("", "tensor", "tuple", "list")


def put_together(text: str, result: Callable[[int], str], size: Callable[[Any], str]) -> str:
    """Python that gives a nested form its results, each by the expression that ``result`` has for its number.

    ``size`` has the expression of a number that follows from the sizes.
    """

    class Filled(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            item: Any = ast.literal_eval(node.slice)
            own = result(item) if ast.unparse(node.value) == RESULTS else size(item)
            return ast.parse(own, mode="eval").body

    return ast.unparse(Filled().visit(ast.parse(text, mode="eval").body))


def sizes_in(text: str) -> list[str]:
    """The numbers in a form that follow from the sizes."""
    nodes = ast.walk(ast.parse(text, mode="eval")) if is_nested(text) else iter(())
    items = [node for node in nodes if isinstance(node, ast.Subscript) and ast.unparse(node.value) == SIZES]
    return [str(ast.literal_eval(node.slice)) for node in items]
