"""Types and constants of a launch, for compilation ahead of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.graph import Graph, TensorType
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.schedule.column_tiles import next_power_of_two


def launch_signatures(kernel: Kernel, graph: Graph, buffers: Mapping[str, TensorType]) -> list[KernelLaunch]:
    """The launches of a kernel at the workload's sizes: several if it makes passes. See :func:`launch_signature`."""
    launch = launch_signature(kernel, graph, buffers)
    if kernel.passes is None:
        return [launch]
    parameter, values = kernel.passes
    return [replace(launch, constexprs={**launch.constexprs, parameter: value}) for value in values]


def launch_signature(kernel: Kernel, graph: Graph, buffers: Mapping[str, TensorType]) -> KernelLaunch:
    """The types and constants of a launch at the workload's sizes, for which the kernel can be compiled ahead.

    Args:
        buffers: the type of each primitive that is in memory.
    """
    sizes = graph.sizes
    signature: dict[str, str] = {}
    divisible: list[str] = []
    for param, prim in kernel.tensors:
        dtype = "int64" if prim == "seed" else buffers[prim].dtype
        signature[param] = POINTER_TYPES[dtype]
        divisible.append(param)
    for param, ref in kernel.outputs:
        signature[param] = POINTER_TYPES[graph.type_of(ref).dtype]
        divisible.append(param)
    constexprs: dict[str, object] = dict(kernel.constexprs)
    for param, scratch in (*kernel.scratch_read, *kernel.scratch_written):
        signature[param] = POINTER_TYPES[scratch.dtype]
        divisible.append(param)
    for param, size in kernel.sizes:
        number = size.value(sizes)
        if kernel.passed_as_constant(param, size) or number == 1:
            # Triton specialises sizes that equal 1.
            constexprs[param] = number
        else:
            signature[param] = "i32" if number < 2**31 else "i64"
            if number % 16 == 0:
                divisible.append(param)
    types = {"float32": "fp32", "float64": "fp64", "int64": "i64"}
    signature |= {parameter: types[dtype] for parameter, _, dtype in kernel.run_time_numbers}
    signature |= dict.fromkeys(kernel.numbers, "i32")
    if kernel.repeat is not None:
        signature[kernel.repeat[0]] = "i32"
    for param, text in kernel.dynamic.items():
        constexprs[param] = _evaluate_dynamic(text, kernel, sizes)
    return KernelLaunch(
        kernel.name,
        signature,
        constexprs,
        kernel.num_warps,
        kernel.num_stages,
        tuple(divisible),
    )


def _evaluate_dynamic(text: str, kernel: Kernel, sizes: Mapping[str, int]) -> int | bool:
    """The value of a launcher-computed constexpr at the workload's sizes."""
    divisibility = re.fullmatch(r"(\w+) % (\d+) == 0", text)
    if divisibility is not None:
        return kernel.grid_sizes[divisibility[1]].value(sizes) % int(divisibility[2]) == 0
    upper_bound = re.fullmatch(r"(\w+) <= (\d+)", text)
    if upper_bound is not None:
        return kernel.grid_sizes[upper_bound[1]].value(sizes) <= int(upper_bound[2])
    selection = re.fullmatch(r"(\d+) if (\w+) >= (\d+) else (\d+)", text)
    if selection is not None:
        return int(selection[1] if kernel.grid_sizes[selection[2]].value(sizes) >= int(selection[3]) else selection[4])
    power = re.fullmatch(r"1 << \((\w+) - 1\)\.bit_length\(\)", text)
    assert power is not None, text
    return next_power_of_two(kernel.grid_sizes[power[1]].value(sizes))
