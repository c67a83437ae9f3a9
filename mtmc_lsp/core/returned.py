"""How a target's results are put together: tuples, lists and dictionaries of tensors, one inside another.

The form of results is ``tensor``; ``tuple`` or ``list`` of tensors alone; or else Python in which each tensor is its number, such
as ``{'loss': 0, 'states': (1, None)}``. Named tuples and other classes are none of these: what else they do is not known. Nor are
dictionaries whose keys are no plain strings or whole numbers, which Python's text would not give back.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from typing import Any

KEYS = (str, int, bool)


def is_container(value: Any) -> bool:
    """Whether it is a tuple, list or dictionary and nothing more than that."""
    return type(value) in (tuple, list) or (type(value) is dict and all(type(key) in KEYS for key in value))


def leaves(value: Any) -> list[Any]:
    """Everything that tuples, lists and dictionaries hold, in order; a value that is none of these by itself."""
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if not is_container(value):
        yield value
        return
    for item in value.values() if isinstance(value, dict) else value:
        yield from _leaves(item)


def form(value: Any) -> str:
    """The form of what was returned; see this module."""
    if not is_container(value):
        return "tensor"
    if type(value) is not dict and not any(item is None or is_container(item) for item in value):
        return type(value).__name__
    numbers = itertools.count()

    def numbered(item: Any) -> Any:
        if not is_container(item):
            return None if item is None else next(numbers)
        if isinstance(item, dict):
            return {key: numbered(inner) for key, inner in item.items()}
        return type(item)(map(numbered, item))

    return repr(numbered(value))


def is_nested(text: str) -> bool:
    """Whether a form is neither one tensor nor a tuple or list of tensors."""
    return text not in ("", "tensor", "tuple", "list")


def put_together(text: str, result: Callable[[int], str]) -> str:
    """Python that gives a nested form its tensors, each by the expression that ``result`` has for its number."""

    def said(item: object) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key!r}: {said(inner)}" for key, inner in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(said, item)) + "]"
        if isinstance(item, tuple):
            return "(" + ", ".join(map(said, item)) + ("," if len(item) == 1 else "") + ")"
        if item is None:
            return "None"
        assert isinstance(item, int)
        return result(item)

    return said(ast.literal_eval(text))
