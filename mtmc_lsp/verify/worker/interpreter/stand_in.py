"""Functions that take the place of others and look like them, so that candidates do not see the verification. Runs in workers."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def stand_in(function: Any, original: Any) -> Any:
    """A function that code which looks at it takes for the original one: its module, name and file are the original's."""
    if isinstance(function, FunctionType) and isinstance(original, FunctionType):
        old = original.__code__
        function.__code__ = function.__code__.replace(
            co_filename=old.co_filename, co_firstlineno=old.co_firstlineno, co_name=old.co_name
        )
        function.__doc__ = original.__doc__
    for name in ("__module__", "__name__", "__qualname__"):
        if hasattr(original, name):
            setattr(function, name, getattr(original, name))
    return function


def replace(holder: Any, name: str, function: Any) -> None:
    """Put a function in the place of another one."""
    setattr(holder, name, stand_in(function, getattr(holder, name)))
