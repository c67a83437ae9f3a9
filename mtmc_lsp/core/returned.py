"""How a target's results are put together: tuples, lists and dictionaries of tensors, one inside another.

The form of results is ``tensor``; ``tuple`` or ``list`` of tensors alone; or else Python in which each result is its number, such
as ``{'loss': 0, 'states': (1, 2)}``. Named tuples and other classes are none of these: what else they do is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

CONTAINERS = (tuple, list, dict)


def leaves(value: Any) -> list[Any]:
    """Everything that tuples, lists and dictionaries hold, in order; a value that is none of these by itself."""
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) not in CONTAINERS:
        yield value
        return
    for item in value.values() if isinstance(value, dict) else value:
        yield from _leaves(item)


def form(value: Any) -> str:
    """The form of what was returned; see this module."""
    if type(value) not in CONTAINERS:
        return "tensor"
    if type(value) is not dict and not any(type(item) in CONTAINERS for item in value):
        return type(value).__name__
    numbers = iter(range(len(leaves(value))))

    def numbered(item: Any) -> Any:
        if type(item) is dict:
            return {key: numbered(inner) for key, inner in item.items()}
        return type(item)(map(numbered, item)) if type(item) in CONTAINERS else next(numbers)

    return repr(numbered(value))


def is_nested(text: str) -> bool:
    """Whether a form is neither one tensor nor a tuple or list of tensors."""
    return text not in ("", "tensor", "tuple", "list")


def put_together(text: str, result: Callable[[int], str]) -> str:
    """Python that gives a nested form its results, each by the expression that ``result`` has for its number."""

    def said(item: object) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key!r}: {said(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(said, item)) + "]"
        if isinstance(item, tuple):
            return "(" + ", ".join(map(said, item)) + ("," if len(item) == 1 else "") + ")"
        assert isinstance(item, int)
        return result(item)

    return said(ast.literal_eval(text))
