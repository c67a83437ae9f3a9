"""The device that a plan is made for: every number that tiles, configurations and cost functions need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Origin(Enum):
    """How a number of a device was obtained."""

    MEASURED = "measured"
    DATA_SHEET = "data sheet"
    INTERPOLATED = "interpolated"
    """Derived from other numbers, for example a peak times the ratio that another GPU sustains."""


@dataclass(frozen=True)
class Provenance:
    """Where one number of a device comes from."""

    origin: Origin
    how: str
    """The source, the benchmark or the formula, in a few words."""


class TensorCores(Enum):
    """The instructions that multiply matrices."""

    MMA = "mma"
    """``mma.sync`` of NVIDIA Ampere, Ada and consumer Blackwell."""
    WGMMA = "wgmma"
    """Warp-group instructions of NVIDIA Hopper, with operands in shared memory."""
    TCGEN05 = "tcgen05"
    """NVIDIA data centre Blackwell, with accumulators in tensor memory."""
    MFMA = "mfma"
    """AMD CDNA."""


@dataclass(frozen=True)
class DeviceModel:
    """One GPU as the planner sees it. Rates are those that large kernels sustain, unless a field says otherwise."""

    name: str
    """As the driver reports it: ``NVIDIA H200``."""
    arch: str
    """``sm_90``, ``gfx942``."""
    vendor: str
    """``nvidia`` or ``amd``."""
    tensor_cores: TensorCores
    has_tma: bool
    """Whether hardware copies tiles by descriptors (Tensor Memory Accelerator)."""
    warp_size: int
    """Threads of a warp (AMD: of a wavefront)."""
    sm_count: int
    """Streaming multiprocessors (AMD: compute units)."""
    max_warps_per_sm: int
    registers_per_sm: int
    """32-bit registers."""
    registers_per_thread: int
    """32-bit registers that one thread can use."""
    shared_bytes_per_sm: int
    shared_bytes: int
    """Shared memory that one block can use."""
    l2_bytes: int
    """Last-level cache: L2, or AMD's Infinity Cache."""
    sector_bytes: int
    """Smallest transfer from memory."""
    l1_bytes_per_clock: int
    """Bytes per clock that a multiprocessor reads from its L1 cache."""
    clock_hz: float
    """Clock of the multiprocessors under load."""
    bandwidth: float
    """Device memory, bytes per second, of a large copy: read plus written."""
    read_bandwidth: float
    """Device memory, bytes per second, of a kernel that only reads."""
    peak_bandwidth: float
    """Device memory, bytes per second, that its clock and width allow; 0 where that is not known."""
    l2_bandwidth: float
    """Last-level cache, bytes per second."""
    launch_us: float
    """Device-side cost of one more kernel, microseconds."""
    flops: Mapping[str, float]
    """Operations per second of large matrix products: ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp16x3`` (float32 operands, each
    split into two fp16 values: three products)."""
    fp64_flops: float
    fp8_flops: float = 0.0
    """0 where the device has no 8-bit products."""
    is_calibrated: bool = False
    """Whether rates were measured on the GPU of this machine."""
    note: str = ""
    """What the user should know about the choice of this model; empty where it is the device asked for."""
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    """Of each number by its field: ``sm_count``, ``flops.tf32``."""

    @property
    def title(self) -> str:
        """The name for people; says where nothing was measured on this machine."""
        return self.name if self.is_calibrated else f"{self.name} (data sheet)"

    @property
    def l2_speedup(self) -> float:
        """How many times the memory's bandwidth the last-level cache has, 1 at least."""
        return max(1.0, self.l2_bandwidth / self.bandwidth)

    def per_sm(self, each_clock: float) -> float:
        """The rate per second of a device-wide resource that each multiprocessor has ``each_clock`` units of per clock."""
        return each_clock * self.clock_hz * self.sm_count
