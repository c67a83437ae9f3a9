"""Builds the call of a launcher, or of a kernel that is launched as it was recorded. Runs in workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from mtmc_lsp.capture.worker.arguments.values import Blank, argument_values, resolve, seed_torch, without_memory
from mtmc_lsp.capture.worker.calls import Call, build_call
from mtmc_lsp.core.workload import RecordedGrid, Workload


def kernel_call(
    module: ModuleType,
    workload: Workload,
    device: str,
    sizes: Mapping[str, int],
    seed: int = 0,
    *,
    values: bool = True,
    read: Collection[str] = (),
    blank: Blank = without_memory,
) -> Call:
    """Build the call of the workload's target; the arguments are those of :func:`build_call`."""
    if workload.launch is None:
        return build_call(module, workload, device, sizes, seed, values=values, read=read, blank=blank)
    seed_torch(seed)
    named = argument_values(module, workload.arguments, sizes, device, seed, None if values else read, blank)
    named |= {name: named[other] for name, other in workload.launch.shared.items()}
    function = _launcher(resolve(module, workload.target.qualname), workload.launch)
    names = tuple(named)
    return Call(function, None, names, tuple(named.values()), frozenset(names), parameters=names)


def _launcher(kernel: Any, launch: RecordedGrid) -> Any:
    """A function that launches a kernel with named arguments."""
    # The recorded arguments contain those that the autotuner chose.
    while launch.is_tuned and type(kernel).__name__ == "Autotuner":
        kernel = kernel.fn

    def run(**arguments: Any) -> None:
        kernel[launch.grid](**arguments, **launch.options)

    return run
