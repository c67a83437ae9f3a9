"""Triton's driver, contexts of devices and profiler ranges for a program on the CPU. Runs in workers.

Kernels from elsewhere choose their grids by what the driver tells, and are launched in a context of the device of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch


class Device:
    """Like ``torch.cuda.device`` and ``torch.cuda.device_of``."""

    def __init__(self, device: Any) -> None:
        """Prepare a context in which the only device is current, whatever the argument."""
        self.idx, self.prev_idx = 0, -1

    def __enter__(self) -> None:
        """Make it current."""

    def __exit__(self, *_: object) -> None:
        """Let it stay current."""


class Driver:
    """Like Triton's driver of an NVIDIA GPU."""

    def __init__(self, backend: str, properties: Mapping[str, Any]) -> None:
        """Describe a GPU.

        Args:
            backend: the name of its backend in the candidate's text.
            properties: named as in ``torch.cuda.get_device_properties``.
        """
        self._backend, self._capability = backend, (properties["major"], properties["minor"])
        known = {
            "max_shared_mem": properties["shared_memory_per_block_optin"],
            "max_num_regs": properties["regs_per_multiprocessor"],
            "multiprocessor_count": properties["multi_processor_count"],
            "warpSize": properties["warp_size"],
            "sm_clock_rate": 1_980_000,
            "mem_clock_rate": 2_619_000,
            "mem_bus_width": 5120,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: dict(known))

    def get_current_device(self) -> int:
        """The number of the only device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Let it stay current."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """As ``torch.cuda.get_device_capability``."""
        return self._capability

    def get_current_stream(self, device: int = 0) -> int:
        """The address of the current stream."""
        return int(torch.cuda.current_stream().cuda_stream)

    def get_current_target(self) -> Any:
        """The target that kernels would be compiled for."""
        from triton.backends.compiler import GPUTarget

        major, minor = self._capability
        return GPUTarget(self._backend, 10 * major + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where new tensors are."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Torch's module of the device."""
        return torch.cuda


def describe_driver(replace: Callable[[Any, str, Any], None], backend: str, properties: Mapping[str, Any]) -> None:
    """Let Triton have a driver, and torch contexts of devices and profiler ranges.

    Args:
        replace: sets an attribute of a module to another function.
        backend: as for :class:`Driver`.
        properties: of the GPU.
    """
    from triton.runtime import driver

    if driver._active is None:
        driver.set_active(Driver(backend, properties))
    for name in ("device", "device_of"):
        replace(torch.cuda, name, type(name, (Device,), {}))
    answers = {"range_push": 0, "range_pop": 0, "range_start": 0, "range_end": None, "mark": None}
    for name, answer in answers.items():
        replace(torch.cuda.nvtx, name, lambda *_, answer=answer: answer)
