"""Local modes in the target's body: ``.data``, gradients, autocast. Those that kernels cannot follow are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.overrides import TorchFunctionMode

from mtmc_lsp.capture.worker.autocast.regions import is_enabled
from mtmc_lsp.capture.worker.dependency_recorder import is_user_file
from mtmc_lsp.capture.worker.tracing.console_output import refusing_output
from mtmc_lsp.capture.worker.tracing.constant_tensors import ConstantTensors
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.workload import Target

GRADIENTS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
GET_DATA, SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__
WATCHED = frozenset({GET_DATA, SET_DATA, torch._C._set_grad_enabled, *GRADIENTS})
"""Each access of a descriptor's method creates a new object, so these are compared by value."""


class AboveAutograd(Exception):
    """The trace is above autograd's dispatch, and the casts of autocast are below."""


@dataclass
class CallCounter:
    """Counts calls of functions of torch."""

    calls: int = 0


class _LocalModes(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Replaces ``x.data`` by ``x.detach()``, which torch can trace, and refuses gradients."""

    def __init__(self, target: Target, *, is_traced: bool, counter: CallCounter | None = None) -> None:
        super().__init__()
        self._counter = counter or CallCounter()
        self._target = target
        self._may_enable = torch.is_grad_enabled() or not is_traced
        """Whether the code may turn gradients on: where they are traced, too, or where nothing is traced yet."""
        self._constants = ConstantTensors() if is_traced else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WATCHED:
            return self._watched(func, args, kwargs or {})
        if self._constants is None:
            self._counter.calls += 1
            # Loops of users call hundreds of thousands of functions, and each further call here is traced, too.
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._constants.call(func, args, kwargs or {})

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs) if self._constants is None else self._constants.call(func, args, kwargs)

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func == GET_DATA:
            return args[0].detach()
        if func == SET_DATA:
            raise self._refused("assigns .data of a tensor", "Write the new value with copy_(...), or return it.")
        if func in GRADIENTS:
            raise self._refused(
                "computes gradients, and Triton versions have no backward pass",
                "Move the code before or after this line into a separate function, and optimise that.",
            )
        if func is torch._C._set_grad_enabled and args[0] and not self._may_enable:
            raise self._refused(
                "turns gradients on, and Triton versions do not record any",
                "Remove enable_grad() or set_grad_enabled(True), or optimise the code around it.",
            )
        return self._call(func, args, kwargs)

    def _refused(self, problem: str, remedy: str) -> TargetUnsupported:
        return TargetUnsupported(f"{self._target.qualname} {problem}", where=running_line(self._target), remedy=remedy)


@contextmanager
def local_modes(target: Target, *, is_traced: bool = True, counter: CallCounter | None = None) -> Iterator[None]:
    """Follow or refuse the local modes of the code that runs inside.

    Args:
        is_traced: whether its tensors have no values, so that those of constants are followed.
        counter: counts calls where nothing is traced.

    Raises:
        AboveAutograd: the code enters a region of autocast in a trace above autograd.
    """
    enter = torch.autocast.__enter__

    def watched_enter(self: Any) -> Any:
        if self._enabled or is_enabled():
            refuse_above_autograd()
        return enter(self)

    def is_compiling() -> bool:
        # Kernels replace what the body does in eager mode. Torch itself must know that it traces.
        return not is_user_file(sys._getframe(1).f_code.co_filename) and compiling()

    compiling = torch.compiler.is_compiling
    torch.autocast.__enter__ = watched_enter
    torch.compiler.is_compiling = is_compiling
    try:
        # Functions that the user compiles are traced as they are written. After a few calls, TorchScript would run fused
        # kernels instead of its operations, also on tensors without data.
        with (
            _LocalModes(target, is_traced=is_traced, counter=counter),
            refusing_output(target),
            torch.compiler.set_stance("force_eager"),
            torch.jit.optimized_execution(False),
        ):
            yield
    finally:
        torch.compiler.is_compiling = compiling
        torch.autocast.__enter__ = enter


def refuse_above_autograd() -> None:
    """Stop a trace that does not see the casts of autocast.

    Raises:
        AboveAutograd: this is a trace above autograd.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    if any(isinstance(mode, PreDispatchTorchFunctionMode) for mode in modes):
        raise AboveAutograd


def running_line(target: Target) -> Location:
    """The line of the target's file that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != target.path:
        frame = frame.f_back
    return Location(target.path, frame.f_lineno if frame is not None else target.start_line)


def under_local_modes(
    function: Callable[..., Any], target: Target, *, is_traced: bool = True, counter: CallCounter | None = None
) -> Callable[..., Any]:
    """The function of tensors under :func:`local_modes`."""

    def run(*tensors: torch.Tensor) -> Any:
        with local_modes(target, is_traced=is_traced, counter=counter):
            return function(*tensors)

    return run
