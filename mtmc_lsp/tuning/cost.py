"""The unit of all estimates: bytes, operations and time of a piece of work. Estimates, not measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.primitives import KernelIR, PrimOp, ProductSizes
from mtmc_lsp.schedule.configs import (
    SPLIT_PRECISION_MODES,
    PrecisionMode,
)

TRITON_EFFICIENCY, TORCH_EFFICIENCY = 0.9, 0.85
"""Shares of the copy bandwidth that a fused kernel reaches, and a kernel of PyTorch."""


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one unit of work."""

    bytes: float
    flops: float
    us: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.us + other.us)


ZERO = Cost(0.0, 0.0, 0.0)


def tensor_bytes(kind: TensorType, sizes: Mapping[str, int]) -> float:
    """Bytes of a tensor; broadcast dimensions (stride 0) count once."""
    total = itemsize(kind.dtype)
    for size, stride in zip(kind.shape, kind.stride, strict=True):
        if stride.terms:
            total *= size.value(sizes)
    return float(total)


def matmul_flops(ir: KernelIR, node: str) -> float:
    """Operations of the matrix products (and attentions) of an ATen node."""
    sizes = ir.graph.sizes
    total = 0.0
    for prim in ir.of_node(node):
        if prim.op is PrimOp.MATMUL:
            total += 2.0 * (product(prim.shape) * ProductSizes.of(ir.prims, prim).k).value(sizes)
    return total


def peak(device: DeviceModel, dtype: str, mode: PrecisionMode | None) -> float:
    """Operations per second of products of ``dtype`` in a precision mode; None stands for float32 units."""
    if mode in SPLIT_PRECISION_MODES:
        return device.flops[PrecisionMode.FP16X3.value]
    if mode is PrecisionMode.FP16_SCALED:
        return device.flops["fp16"]
    if dtype in ("float16", "bfloat16"):
        return device.flops["bf16" if dtype == "bfloat16" else "fp16"]
    if dtype == "float32":
        # Other modes emulate float32 by several products: about as fast as float32 units.
        rate = "fp32" if mode is None or mode is PrecisionMode.IEEE else mode.value
        return device.flops.get(rate, device.flops["fp32"])
    return device.fp64_flops


def roofline_us(bytes_moved: float, flops: float, device: DeviceModel, rate: float, efficiency: float) -> float:
    """Microseconds of memory traffic at a share of the bandwidth, or of operations at a rate per second, if those take longer."""
    memory = bytes_moved / (device.bandwidth * efficiency)
    return (max(memory, flops / rate if flops else 0.0)) * 1e6
