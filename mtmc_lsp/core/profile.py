"""Result types of ``mtmc profile``: where a target spends its time."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.results import Work


@dataclass(frozen=True)
class KernelTime:
    """A kernel that ran on the GPU."""

    name: str
    calls: float
    """Launches per call of the target."""
    us: float
    """Total time of these launches in microseconds per call of the target."""
    bytes: float | None = None
    """Device memory traffic measured by Nsight Compute; ``None`` without Nsight Compute."""
    of_memory: float | None = None
    """Achieved fraction of the peak memory bandwidth, 0 to 1, by Nsight Compute."""
    of_compute: float | None = None
    """Achieved fraction of the peak SM throughput, 0 to 1, by Nsight Compute."""


@dataclass(frozen=True)
class OperatorTime:
    """All calls of one torch operator in the target."""

    name: str
    """``aten::linear``, or the name of a kernel that no operator launched."""
    lines: tuple[int, ...]
    """Lines of the target that call it, if the graph has them."""
    calls: float
    """Calls per call of the target."""
    cpu_us: float
    """Host time in microseconds per call of the target, including nested calls."""
    gpu_us: float
    """Time of its kernels in microseconds per call of the target."""
    work: Work | None = None
    """Minimum memory traffic and FLOPs by the cost model; ``None`` if the graph does not contain the operator."""
    roofline: float | None = None
    """Roofline time divided by the time of its kernels; ``None`` without a GPU."""


@dataclass(frozen=True)
class Profile:
    """Profile of one target."""

    device: str
    """``cuda`` or ``cpu``: the device that it ran on."""
    calls: int
    """Number of profiled calls."""
    wall_us: float
    """Median host time of one call without the profiler, including device synchronisation."""
    gpu_us: float
    """Total kernel time per call; 0 without a GPU."""
    gap_us: float
    """GPU idle time per call between the first and the last kernel."""
    launches: float
    """Kernel launches per call."""
    operators: tuple[OperatorTime, ...]
    """Most expensive first."""
    kernels: tuple[KernelTime, ...]
    work: Work
    """Minimum work of one call: inputs and outputs transferred once, and torch's FLOP count."""
    bound_us: float | None
    """Roofline time of one call; ``None`` without a GPU."""
    sizes: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def roofline(self) -> float | None:
        """Achieved fraction of the roofline for one call; ``None`` without a GPU."""
        return min(1.0, self.bound_us / self.gpu_us) if self.bound_us is not None and self.gpu_us else None
