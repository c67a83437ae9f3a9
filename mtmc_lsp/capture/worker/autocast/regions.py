"""``torch.autocast`` for a GPU in a process whose tensors are on a CPU, and the autocast state of a workload's calls."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.amp.autocast_mode as torch_autocast

from mtmc_lsp.capture.worker.autocast import gpu_rules

# On import: a verification that compares torch's operations before and after a call must not see this as a change.
gpu_rules.install()
STANDS_IN = ("cuda", "cpu")
"""Devices whose state a region changes where a CPU stands in for a GPU."""


def is_enabled() -> bool:
    """Whether autocast is on for the GPU, or for the CPU that stands in for it."""
    return bool(torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def current_dtype() -> str:
    """Autocast's dtype on the GPU, or on the CPU that stands in for it; empty if autocast is off."""
    device = next((name for name in STANDS_IN if torch.is_autocast_enabled(name)), "")
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if device else ""


def caller_mode(dtype: str, device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Creates the context in which a workload's call runs.

    Args:
        dtype: of the caller's autocast; empty for none.
        device: type of the device that holds the tensors.
    """
    return lambda: _caller_mode(dtype, device)


def under_autocast(function: Callable[..., Any], dtype: str, device: str) -> Callable[..., Any]:
    """A function that runs in the caller's autocast, which belongs to the thread of the call; itself without autocast."""
    if not dtype:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _caller_mode(dtype, device):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _caller_mode(dtype: str, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(gpu_autocast_on_cpu())
        if dtype:
            stack.enter_context(torch.autocast("cuda", getattr(torch, dtype)))
        yield


def gpu_autocast() -> contextlib.AbstractContextManager[None]:
    """A context in which user code creates regions for a GPU, whether there is one or not."""
    return contextlib.nullcontext() if torch.cuda.is_available() else gpu_autocast_on_cpu()


_is_replaced = False


@contextlib.contextmanager
def gpu_autocast_on_cpu() -> Iterator[None]:
    """Let regions for a GPU cast CPU tensors as they cast a GPU's; regions for the CPU do nothing.

    ``x.device.type`` is ``cpu`` here, so a region counts as one for the CPU if its line has the word in quotes.
    """
    global _is_replaced
    if _is_replaced:
        yield
        return
    names = ("__init__", "__enter__", "__exit__")
    before = [getattr(torch.autocast, name) for name in names]
    cast_before = torch_autocast._cast
    _is_replaced = True
    for name, function in zip(names, (_create, _enter, _exit), strict=True):
        setattr(torch.autocast, name, function)
    torch_autocast._cast = lambda value, device, dtype: cast_before(value, "cpu", dtype)
    try:
        yield
    finally:
        _is_replaced = False
        for name, function in zip(names, before, strict=True):
            setattr(torch.autocast, name, function)
        torch_autocast._cast = cast_before


def _create(
    self: Any,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    self.device = device_type
    self.fast_dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
    self._enabled = enabled
    self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
    self._is_for_cpu = device_type == "cpu" and _names_cpu(self, sys._getframe(1))


def _names_cpu(region: Any, frame: Any) -> bool:
    if isinstance(region, torch.cpu.amp.autocast):
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return '"cpu"' in line or "'cpu'" in line


def _enter(self: Any) -> Any:
    states = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in STANDS_IN]
    vars(self).setdefault("_entered", []).append((states, torch.is_autocast_cache_enabled()))
    torch.autocast_increment_nesting()
    if getattr(self, "_is_for_cpu", False):
        return self
    for device in STANDS_IN:
        torch.set_autocast_enabled(device, self._enabled)
        torch.set_autocast_dtype(device, self.fast_dtype)
    torch.set_autocast_cache_enabled(self._cache_enabled)
    return self


def _exit(self: Any, *_: object) -> bool:
    states, is_cache_enabled = self._entered.pop()
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    for device, (is_on, dtype) in zip(STANDS_IN, states, strict=True):
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(is_cache_enabled)
    return False
