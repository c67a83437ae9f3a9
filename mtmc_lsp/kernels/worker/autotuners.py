"""What wraps the kernels of a module: autotuners, which may run with one configuration, and direct launches. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from mtmc_lsp.kernels.actions.launch.helper import NAME


def autotuners(module: ModuleType) -> dict[str, Any]:
    """The kernels of a module that have an autotuner, by name."""
    from triton.runtime.autotuner import Autotuner

    return {name: value for name, value in vars(module).items() if isinstance(value, Autotuner)}


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
