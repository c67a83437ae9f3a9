"""What wraps the kernels of a module: autotuners, which may run with one configuration, and direct launches. Runs in workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from mtmc_lsp.kernels.actions.launch.helper import NAME

MOST_CONFIGS = 16
"""Configurations of an autotuner that are run, one after the other."""
MOST_WRAPPERS = 4
"""Wrappers of a kernel that are looked into."""
TOO_LARGE = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")
"""Errors of configurations that an autotuner leaves out."""
WARMUP_MS, REPEAT_MS = 4, 16
"""Milliseconds for each configuration of an autotuner; by default Triton takes 25 and 100."""
LONG_MS = 20.0
"""A configuration whose call takes this long is measured by one call after the first: the host's clock errs by less than 1 %."""

Result = TypeVar("Result")


def autotuners(module: ModuleType) -> dict[str, Any]:
    """The kernels of a module that have an autotuner, by name."""
    from triton.runtime.autotuner import Autotuner

    found = {}
    for name, kernel in vars(module).items():
        # A helper or heuristics may be around it.
        for _ in range(MOST_WRAPPERS):
            if isinstance(kernel, Autotuner):
                break
            kernel = getattr(kernel, "fn", None)
        if isinstance(kernel, Autotuner):
            found[name] = kernel
    return found


def direct_launches(module: ModuleType) -> set[type[Any]]:
    """The helper with which kernels of a module are launched directly; empty if it has none."""
    kinds = {type(value) for value in vars(module).values()}
    return {kind for kind in kinds if kind.__name__ == NAME and kind.__module__ == module.__name__}


@contextlib.contextmanager
def only_config(modules: Sequence[ModuleType], number: int) -> Iterator[None]:
    """Let each autotuner use one configuration without measuring."""
    tuners = [tuner for module in modules for tuner in autotuners(module).values()]
    before = [tuner.configs for tuner in tuners]
    for tuner in tuners:
        tuner.configs = [tuner.configs[min(number, len(tuner.configs) - 1)]]
    try:
        yield
    finally:
        for tuner, configs in zip(tuners, before, strict=True):
            tuner.configs = configs
        if any(len(configs) > 1 for configs in before):
            # A version that is launched directly was chosen from the one configuration.
            for module in modules:
                for kind in direct_launches(module):
                    for value in vars(module).values():
                        if isinstance(value, kind):
                            # Files that an earlier version edited have the other attribute.
                            for kept in ("forms", "versions"):
                                getattr(value, kept, {}).clear()


def most_configs(modules: Sequence[ModuleType]) -> int:
    """The configurations of the autotuner with most of them, at most a limit; 1 without any."""
    numbers = (len(tuner.configs) for module in modules for tuner in autotuners(module).values())
    return min(MOST_CONFIGS, max(numbers, default=1))


def with_first_config(modules: Sequence[ModuleType], run: Callable[[], Result]) -> tuple[int, Result]:
    """The first configuration that an autotuner would not leave out, and the result of a call with it."""
    most = most_configs(modules)
    for number in range(most):
        try:
            with only_config(modules, number):
                return number, run()
        except Exception as error:  # the user's code raises anything
            if type(error).__name__ not in TOO_LARGE or number == most - 1:
                raise
    raise AssertionError


@contextlib.contextmanager
def first_configs() -> Iterator[None]:
    """Let all autotuners use their first configuration that is not too large, without measuring."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = self.configs
        try:
            for config in configs[:-1]:
                self.configs = [config]
                try:
                    return original(self, *args, **kwargs)
                except Exception as error:
                    if type(error).__name__ not in TOO_LARGE:
                        raise
            self.configs = configs[-1:]
            return original(self, *args, **kwargs)
        finally:
            self.configs = configs

    setattr(Autotuner, "run", run)  # noqa: B010 - mypy refuses to assign methods
    try:
        yield
    finally:
        setattr(Autotuner, "run", original)  # noqa: B010


@contextlib.contextmanager
def short_benchmarks() -> Iterator[None]:
    """Let autotuners measure each configuration for a shorter time."""
    from triton import testing

    original = testing.do_bench

    def do_bench(call: Callable[[], object], **options: Any) -> Any:
        # Triton's function calls it at least eight times.
        if (took := _milliseconds(call)) > LONG_MS and (took := _milliseconds(call)) > LONG_MS:
            quantiles = options.get("quantiles")
            return [took] * len(quantiles) if quantiles else took
        return original(call, **{"warmup": WARMUP_MS, "rep": REPEAT_MS, **options})

    testing.do_bench = do_bench
    try:
        yield
    finally:
        testing.do_bench = original


def _milliseconds(call: Callable[[], object]) -> float:
    """The time of a call by the host's clock."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if has_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)
