"""What wraps the kernels of a module: autotuners, which may run with one configuration, and direct launches. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

from mtmc_lsp.kernels.actions.launch.helper import NAME

MOST_CONFIGS = 16
"""Configurations of an autotuner that are run, one after the other."""
MOST_WRAPPERS = 4
"""Wrappers of a kernel that are looked into."""
TOO_LARGE = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")
"""Errors of configurations that an autotuner leaves out."""

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
