"""Measures the GPU: bandwidths, rates of matrix products and launch cost. Runs in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mtmc_lsp.capture.worker.commands import environment
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.device.calibration import Calibration
from mtmc_lsp.timing.messages import CalibrationRequest, EnvironmentRequest
from mtmc_lsp.timing.worker.timing_commands import clock_of
from mtmc_lsp.verify.worker.run_target import release_gpu_memory

MEMORY_BYTES = 1 << 30
"""Bytes of the tensors in the bandwidth measurements."""
LATER, LATER_SECONDS = 3, 0.3
"""Repetitions of the copy and the pause before each: all estimates depend on its rate, and others may use the GPU."""
PRODUCT, FP64_PRODUCT = 4096, 2048
"""Sizes M = N = K of the products; consumer GPUs are slow in float64."""
SAMPLES = 5
LAUNCHES, LAUNCHES_AHEAD_US = 20, 500.0
"""Number of timed kernels, and how long the GPU is kept busy before them so that the host runs ahead."""
L2_PART, L2_REPEATS = 4, 200
"""The fraction 1/4 of the L2 that is read, and the number of repetitions."""


def read_environment(request: EnvironmentRequest) -> Environment:
    """Read the versions and the GPU."""
    return environment()


def measure_device(request: CalibrationRequest) -> Calibration:
    """Measure the GPU without recording gradients."""
    with torch.no_grad():
        result = calibration()
    release_gpu_memory()
    return result


def calibration() -> Calibration:
    """Measure the current GPU; takes a few seconds."""
    properties = torch.cuda.get_device_properties(0)
    warp_size = int(getattr(properties, "warp_size", 0))
    half = {name: _product_rate(dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))}
    return Calibration(
        name=torch.cuda.get_device_name(),
        arch=f"sm_{properties.major}{properties.minor}",
        sm_count=properties.multi_processor_count,
        shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", 0)),
        l2_bytes=int(properties.L2_cache_size),
        # Two transfers per clock; the clock is in kHz, the width in bits.
        peak_bandwidth=2e3
        * getattr(properties, "memory_clock_rate", 0)
        * getattr(properties, "memory_bus_width", 0)
        / 8,
        warp_size=warp_size,
        max_warps_per_sm=int(properties.max_threads_per_multi_processor) // warp_size if warp_size else 0,
        registers_per_sm=int(getattr(properties, "regs_per_multiprocessor", 0)),
        shared_bytes_per_sm=int(getattr(properties, "shared_memory_per_multiprocessor", 0)),
        bandwidth=_copy_rate(),
        read_bandwidth=_read_rate(),
        l2_bandwidth=_l2_rate(int(properties.L2_cache_size), properties.multi_processor_count),
        launch_gap_us=_launch_gap_us(),
        flops={**half, "fp32": _fp32_rate("ieee"), "tf32": _fp32_rate("tf32"), "fp16x3": half["fp16"] / 3},
        fp64_flops=_product_rate(torch.float64, FP64_PRODUCT),
        fp8_flops=_fp8_rate(),
    )


def _copy_rate() -> float:
    source = torch.empty(MEMORY_BYTES, dtype=torch.int8, device="cuda")
    destination = torch.empty_like(source)
    best_us = _best_us(lambda: destination.copy_(source))
    for _ in range(LATER):
        time.sleep(LATER_SECONDS)
        best_us = min(best_us, _best_us(lambda: destination.copy_(source)))
    return 2 * MEMORY_BYTES / (best_us * 1e-6)


def _read_rate() -> float:
    source = torch.zeros(MEMORY_BYTES // 4, device="cuda")
    return MEMORY_BYTES / (_best_us(lambda: source.sum()) * 1e-6)


def _l2_rate(l2_bytes: int, sm_count: int) -> float:
    """Bytes per second that all multiprocessors together read from the L2; 0 if Triton cannot compile."""
    elements = l2_bytes // L2_PART // 4
    source = torch.zeros(elements, device="cuda")
    try:
        from mtmc_lsp.timing.worker.l2_kernel import launch_reads

        read_bytes, run = launch_reads(source, sm_count, L2_REPEATS)
        return read_bytes / (_best_us(run) * 1e-6)
    except Exception:  # no C compiler, or no Triton for this GPU: the data file's number is used
        return 0.0


def _launch_gap_us() -> float:
    """Device time per additional small kernel, while the host runs ahead of the GPU."""
    value = torch.zeros(1, device="cuda")

    def several(count: int) -> None:
        for _ in range(count):
            value.add_(1.0)

    several(1)
    one, many = (
        min(clock_of().cold(partial(several, count), LAUNCHES_AHEAD_US)[0] for _ in range(SAMPLES))
        for count in (1, 1 + LAUNCHES)
    )
    return max(0.0, many - one) / LAUNCHES


def _fp32_rate(precision: str) -> float:
    """Rate of float32 products by the library, in full precision (``ieee``) or TF32 (``tf32``)."""
    # Torch refuses to read its older setting where the user's file uses this one.
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        return _product_rate(torch.float32)
    finally:
        settings.fp32_precision = before


def _product_rate(dtype: torch.dtype, size: int = PRODUCT) -> float:
    """Operations per second of the library's product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return 2.0 * float(size) ** 3 / (_best_us(lambda: a @ b) * 1e-6)


def _fp8_rate() -> float:
    """Operations per second of the library's 8-bit product; 0 if the GPU or this torch version has none."""
    try:
        a, b = (torch.randn(PRODUCT, PRODUCT, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device="cuda")
        run = lambda: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)  # noqa: E731
        return 2.0 * float(PRODUCT) ** 3 / (_best_us(run) * 1e-6)
    except Exception:  # no public function reports whether the product is supported
        return 0.0


def _best_us(run: Callable[[], Any]) -> float:
    """The minimum of a few cold-L2 samples, in microseconds."""
    run()
    return min(clock_of().cold(run)[0] for _ in range(SAMPLES))
