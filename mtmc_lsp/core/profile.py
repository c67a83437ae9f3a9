"""Where the time of a target goes: what ``mtmc profile`` tells."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.results import Work


@dataclass(frozen=True)
class KernelTime:
    """A kernel that ran on the GPU."""

    name: str
    calls: float
    """Launches in one call of the target."""
    us: float
    """Of all of them, microseconds in one call of the target."""
    bytes: float | None = None
    """Device memory that it really moved, by Nsight Compute; ``None`` where that was not asked."""
    of_memory: float | None = None
    """Part of the memory's rate that it reached, 0 to 1, by Nsight Compute."""
    of_compute: float | None = None
    """Part of the multiprocessors' rate, likewise."""


@dataclass(frozen=True)
class OperatorTime:
    """An operator of torch's that the target calls, all its calls together."""

    name: str
    """``aten::linear``, or a kernel that no operator launched."""
    lines: tuple[int, ...]
    """Lines of the target that call it, where the graph says so."""
    calls: float
    """In one call of the target."""
    cpu_us: float
    """Of the host in one call of the target, with all that it calls."""
    gpu_us: float
    """Of the kernels that it launched."""
    work: Work | None = None
    """What it must move and compute, by the cost model; ``None`` where the graph does not have it."""
    roofline: float | None = None
    """The least time for that work as a part of its kernels' time; ``None`` without a GPU."""


@dataclass(frozen=True)
class Profile:
    """One target's profile."""

    device: str
    """``cuda`` or ``cpu``: what ran it."""
    calls: int
    """How often it was called while it was watched."""
    wall_us: float
    """Median of one call on the host's clock, unwatched, until the device was done."""
    gpu_us: float
    """Of all kernels in one call; 0 without a GPU."""
    gap_us: float
    """In one call, while the GPU waited between its first and its last kernel."""
    launches: float
    """Kernels in one call."""
    operators: tuple[OperatorTime, ...]
    """The most expensive first."""
    kernels: tuple[KernelTime, ...]
    work: Work
    """What one call must move and compute at least: inputs and outputs once, and torch's own count of operations."""
    bound_us: float | None
    """The roofline's least time of one call; ``None`` without a GPU."""
    sizes: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def roofline(self) -> float | None:
        """The part of the roofline that one call reaches; ``None`` without a GPU."""
        return min(1.0, self.bound_us / self.gpu_us) if self.bound_us is not None and self.gpu_us else None
