"""Builds the call of a launcher, or of a kernel that is launched as it was recorded. Runs in workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.values import Blank, argument_values, resolve, seed_torch, without_memory
from mtmc_lsp.capture.worker.calls import Call, build_call
from mtmc_lsp.core.workload import RecordedGrid, Workload
from mtmc_lsp.kernels.messages import TraceCase
from mtmc_lsp.kernels.worker.results import distribute

INDICES = ("int32", "int64")
LARGEST_RANGE = 1 << 22
"""Values of the largest range from which distinct ones are drawn."""


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


def case_call(module: ModuleType, workload: Workload, device: str, case: TraceCase) -> Call:
    """The call for a case, with values of its distribution."""
    call = kernel_call(module, workload, device, case.sizes, case.seed)
    with torch.no_grad():
        for value in call.values:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                distribute(value, case.distribution)
        if case.has_distinct_integers:
            for tensor, low, count in _repeating(call, workload, case):
                order = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed))[: tensor.numel()]
                tensor.copy_((order + low).view(tensor.shape))
    return call


def can_be_distinct(call: Call, workload: Workload, case: TraceCase) -> bool:
    """Whether an integer tensor has equal elements, and its range allows others."""
    return any(tensor.unique().numel() < tensor.numel() for tensor, _, _ in _repeating(call, workload, case))


def _repeating(call: Call, workload: Workload, case: TraceCase) -> Iterator[tuple[torch.Tensor, int, int]]:
    """The integer tensors that may be indices, with the least value and the number of values in their range."""
    sizes = {**workload.sizes, **case.sizes}
    values = dict(zip(call.names, call.values, strict=True))
    for path, spec in workload.tensors.items():
        value = values.get(path)
        if not isinstance(value, torch.Tensor) or spec.dtype not in INDICES or spec.low is None or spec.high is None:
            continue
        high = spec.high if spec.high_size is None else spec.high_size.value(sizes)
        count = int(high) - int(spec.low) + 1
        if 1 < value.numel() <= count <= LARGEST_RANGE:
            yield value, int(spec.low), count


def _launcher(kernel: Any, launch: RecordedGrid) -> Any:
    """A function that launches a kernel with named arguments."""
    # The recorded arguments contain those that the autotuner chose.
    while launch.is_tuned and type(kernel).__name__ == "Autotuner":
        kernel = kernel.fn

    def run(**arguments: Any) -> None:
        kernel[launch.grid](**arguments, **launch.options)

    return run
