"""The functions whose loops may be kept: those of the user's file, and those of installed packages that run."""

from __future__ import annotations

import dis
import gc
import inspect
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

NO_LOOPS = frozenset({"torch", "triton", "numpy"})
"""Packages whose loops do not run over tensors of the target, or are not traced."""


def functions_of(module: ModuleType, path: str, target: Any) -> list[FunctionType]:
    """The functions of the user's file that a run of the target may call."""
    functions: dict[CodeType, FunctionType] = {}

    def add(value: Any) -> None:
        while value is not None:
            # Reading an attribute of an unknown object could import a lazy module.
            if type(value) in (staticmethod, classmethod, MethodType):
                value = value.__func__
            elif type(value) is property:
                value = value.fget
            if type(value) is FunctionType and value.__code__.co_filename == path:
                functions.setdefault(value.__code__, value)
            value = inspect.getattr_static(value, "__wrapped__", None)

    add(target)
    for value in list(vars(module).values()):
        if issubclass(type(value), type) and value.__module__ == module.__name__:
            for item in list(vars(value).values()):
                add(item)
        else:
            add(value)
    return list(functions.values())


def library_functions(codes: Iterable[CodeType]) -> list[FunctionType]:
    """The functions among ``codes`` that are in installed packages and have a loop over a ``range``."""
    counting = [code for code in codes if "range" in code.co_names and _may_loop_over_tensors(code)]
    found = (item for item in _referrers(counting) if type(item) is FunctionType) if counting else ()
    return [function for function in found if function.__code__ in counting]


def _referrers(codes: list[CodeType]) -> list[Any]:
    """The objects that refer to ``codes``, also those that were imported before this process was forked.

    A fork server excludes its objects from garbage collection, and ``gc.get_referrers`` does not see them then.
    """
    if not gc.get_freeze_count():
        return gc.get_referrers(*codes)
    # What is garbage now would be excluded below, too.
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    gc.unfreeze()
    try:
        return gc.get_referrers(*codes)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _may_loop_over_tensors(code: CodeType) -> bool:
    """Whether a function of an installed package has a ``for`` statement."""
    parts = Path(code.co_filename).parts
    packages = [parts[i + 1] for i, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")]
    is_package = bool(packages) and packages[-1] not in NO_LOOPS
    return is_package and any(step.opname == "FOR_ITER" for step in dis.get_instructions(code))
