"""Measure the host's time of launches on a CPU, by Triton and by the helper of ``direct-launch``.

    python scripts/launch_time.py [--triton FOLDER]

Triton compiles the kernels for sm_90, and a driver takes its place that does nothing: a launch ends where Triton's launcher would
begin. So the numbers are what Python and Triton do in each launch. The launcher itself, which checks each pointer that is no
number by the driver, comes on top on a GPU. Each number is the least mean of nine batches of 4,000 launches, in CPU time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LAUNCHES, BATCHES = 4000, 9
KERNELS = """\
import torch
import triton
import triton.language as tl


{helper}

def scale(x_ptr, y_ptr, out_ptr, n, stride, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * stride, mask=at < n)
    tl.store(out_ptr + at, x * factor + tl.load(y_ptr + at, mask=at < n), mask=at < n)


def product(a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, cm, cn, BLOCK: tl.constexpr, OTHER: tl.constexpr, G: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at * am + ak, mask=at < M)
    tl.store(c_ptr + at * cm + cn, a + tl.load(b_ptr + at * bk + bn, mask=at < N), mask=at < K)


def forms(x, y, out, wrapped):
    tuned = triton.autotune([triton.Config({{"BLOCK": 64}})], key=["n"])
    derived = triton.heuristics({{"BLOCK": lambda args: 64 if args["n"] > 64 else 32}})
    first, second = wrapped(triton.jit(scale)), wrapped(triton.jit(product))
    third, fourth = wrapped(tuned(triton.jit(scale))), wrapped(tuned(derived(triton.jit(scale))))
    sizes = (1000, 1000, 1000, 1, 1000, 1, 1000, 1, 1000)
    grid = lambda meta: (-(-1000 // meta["BLOCK"]),)
    return {{
        "7 arguments, fixed grid": lambda: first[(16,)](x, y, out, 1000, 1, 2.0, BLOCK=64, num_warps=4),
        "7 arguments, grid by a function": lambda: first[grid](x, y, out, 1000, 1, 2.0, BLOCK=64, num_warps=4),
        "15 arguments, grid by a function": lambda: second[grid](x, y, out, *sizes, BLOCK=64, OTHER=32, G=8, num_warps=4),
        "autotuner": lambda: third[grid](x, y, out, 1000, 1, 2.0),
        "autotuner and heuristics": lambda: fourth[grid](x, y, out, 1000, 1, 2.0),
    }}
"""


def install_driver() -> None:
    """Replace the GPU's driver by one whose launches do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )
    gpu: Any = SimpleNamespace(
        launcher_cls=lambda source, metadata: lambda *given: None,
        utils=utils,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_benchmarker=lambda: lambda call, quantiles: [1.0, 1.0, 1.0],
    )
    driver._active = gpu


def microseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    for _ in range(3):
        call()
    means = []
    for _ in range(BATCHES):
        began = time.process_time()
        for _ in range(LAUNCHES):
            call()
        means.append((time.process_time() - began) / LAUNCHES * 1e6)
    return min(means)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", help="folder with another version of Triton")
    options = parser.parse_args()
    if options.triton:
        sys.path.insert(0, options.triton)
    warnings.filterwarnings("ignore", module="triton")
    import torch
    import triton

    from mtmc_lsp.kernels.actions.launch.helper import HELPER, NAME

    install_driver()

    class OnGpu(torch.Tensor):  # type: ignore[misc]
        """A tensor that claims to be on a GPU."""

        __torch_function__ = torch._C._disabled_torch_function_impl

        def get_device(self) -> int:
            return 0

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.py")
        path.write_text(KERNELS.format(helper=HELPER))
        module: Any = ModuleType("kernels")
        sys.modules["kernels"] = module
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        tensors = [torch.zeros(1024).as_subclass(OnGpu) for _ in range(3)]
        searched = module.forms(*tensors, lambda kernel: kernel)
        direct = module.forms(*tensors, getattr(module, NAME))
        print(f"| Triton {triton.__version__} | Triton (us) | direct (us) |\n|---|---|---|")
        for name, call in searched.items():
            print(f"| {name} | {microseconds(call):.1f} | {microseconds(direct[name]):.1f} |")


if __name__ == "__main__":
    main()
