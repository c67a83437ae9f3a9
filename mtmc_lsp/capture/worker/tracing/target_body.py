"""The function below a target's decorators. The dispatch is in its body, so the kernels replace this function.

``@functools.wraps`` keeps the function in ``__wrapped__``; other decorators keep it in a closure, ``functools.partial`` or cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.containers import leaves_with_paths
from mtmc_lsp.capture.worker.autocast.regions import current_dtype
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.workload import Target

DEPTH = 8
"""Decorators above each other that are followed."""


def body_of(function: Any, target: Target) -> Any:
    """The function or bound method whose body is in the file; ``function`` itself if it has no decorator.

    Raises:
        TargetUnsupported: the decorator replaces the body by compiled code.
    """
    receiver = function.__self__ if isinstance(function, MethodType) else None
    outer = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(outer, torch.jit.ScriptFunction):
        raise TargetUnsupported(
            f"{target.qualname} is compiled by torch.jit.script, which does not run its Python body",
            where=Location(target.path, target.start_line),
            remedy="Remove torch.jit.script from this function.",
        )
    name = "forward" if target.class_name == target.qualname else target.qualname.rpartition(".")[2]
    body = next((item for item in _wrapped(outer, DEPTH) if item.__code__.co_name == name), None)
    if body is None or body is outer:
        return function
    return MethodType(body, receiver) if receiver is not None else body


def owner_of(function: Any) -> type | None:
    """The class of a bound class method; ``None`` for other functions."""
    receiver = function.__self__ if isinstance(function, MethodType) else None
    return receiver if isinstance(receiver, type) else None


def receiver_of(method: MethodType) -> str:
    """The name of the first parameter of a bound method: ``cls``."""
    return method.__func__.__code__.co_varnames[0]


def _wrapped(function: Any, depth: int) -> Iterator[FunctionType]:
    """The function and those that it wraps, outer ones first."""
    if not depth:
        return
    if isinstance(function, functools.partial):
        yield from _wrapped(function.func, depth - 1)
    elif isinstance(function, MethodType):
        yield from _wrapped(function.__func__, depth - 1)
    elif not isinstance(function, type):
        if isinstance(function, FunctionType):
            yield function
        inner = getattr(function, "__wrapped__", None)
        if inner is not None:
            yield from _wrapped(inner, depth - 1)
            return
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is not function and callable(cell.cell_contents):
                yield from _wrapped(cell.cell_contents, depth - 1)


@dataclass
class BodyCall:
    """The first call of the body in a call of the decorated function."""

    leaves: dict[str, Any]
    """The arguments when it begins, items of containers by path. The body may change a container."""
    autocast: str
    """The dtype of autocast; empty if it is off."""


def observed_call(decorated: Any, body: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> BodyCall | None:
    """Call a decorated function, and return how it calls the body; ``None`` if it does not."""
    code = getattr(body, "__func__", body).__code__
    calls: list[BodyCall] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is code and not calls:
            items = (leaf for name, value in frame.f_locals.items() for leaf in leaves_with_paths(name, value))
            calls.append(BodyCall(dict(items), current_dtype()))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        with torch.no_grad():
            decorated(*positional, **named)
    finally:
        sys.setprofile(before)
    return calls[0] if calls else None


def check_decorators(call: BodyCall | None, passed: dict[str, Any], target: Target) -> tuple[dict[str, str], str]:
    """Compare the arguments that the body gets with those of the workload.

    Args:
        call: the call of the body.
        passed: the arguments of the workload; items of containers by path, such as ``rope[0]``.
        target: the decorated target, for errors.

    Returns:
        The dtype of each tensor that the decorator converts, by parameter, and the dtype of autocast in the body.

    Raises:
        TargetUnsupported: the kernels for the body would not run, or not on the workload's arguments.
    """

    def refused(problem: str, remedy: str) -> TargetUnsupported:
        return TargetUnsupported(
            f"the decorator of {target.qualname} {problem}",
            where=Location(target.path, target.start_line),
            remedy=remedy,
        )

    if call is None:
        raise refused("does not call its body", "Optimise the function that the decorator calls.")
    dtypes = {}
    for name, value in passed.items():
        actual = call.leaves.get(name)
        if isinstance(value, torch.Tensor) and isinstance(actual, torch.Tensor):
            converts_item = actual.dtype != value.dtype and not name.isidentifier()
            if converts_item or (actual.shape, actual.stride()) != (value.shape, value.stride()):
                text = f"{str(actual.dtype).removeprefix('torch.')}{list(actual.shape)}"
                raise refused(
                    f"passes {name} to the body as {text} with strides {list(actual.stride())}",
                    f"Describe this tensor in the directive: the kernels replace the body of {target.qualname}.",
                )
            if actual.dtype != value.dtype:
                dtypes[name] = str(actual.dtype).removeprefix("torch.")
        elif type(actual) is not type(value) or (isinstance(value, (bool, int, float, str)) and actual != value):
            raise refused(
                f"passes {name} to the body as {actual!r:.40}",
                f"Use this value in the directive: the kernels replace the body of {target.qualname}.",
            )
    return dtypes, call.autocast
