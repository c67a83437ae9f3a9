"""Monitors a GPU through NVML during a timing: clocks, temperature, power, throttling and other processes."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtmc_lsp.core.results import Conditions

SAMPLING_PERIOD_SECONDS = 0.02
BUSY_PERCENT = 3
"""Utilisation of the multiprocessors in percent from which another process counts as computing."""
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""NVML's throttle reasons of a busy GPU, by bit. Idle, application clocks and sync boost are not included."""
REPEAT_REASONS = frozenset(REASONS.values()) - {"power cap"}
"""Throttle reasons for which a timing is repeated. Large matrix products normally reach the power cap."""


@dataclass(frozen=True)
class GpuSample:
    """State of a GPU at one moment, from NVML."""

    at: float
    """Time on the monotonic clock, in seconds."""
    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    reasons: tuple[str, ...]


class Gpu:
    """A GPU read with ``nvidia-ml-py``."""

    def __init__(self, uuid: str) -> None:
        """Find the GPU.

        Raises:
            LookupError: NVML is not available, or does not know the GPU (a MIG slice, for example).
        """
        try:
            import pynvml
        except ImportError:
            raise LookupError("nvidia-ml-py is not installed") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            raise LookupError(f"NVML does not report this GPU: {error}") from None

    def read(self) -> GpuSample:
        """Read the current state."""
        nvml, handle = self._nvml, self._handle
        mask = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return GpuSample(
            at=time.monotonic(),
            sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_w=float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
            reasons=tuple(name for bit, name in REASONS.items() if mask & bit),
        )

    def holders(self) -> list[int]:
        """Ids of the processes with a context on the GPU, in NVML's PID namespace."""
        return [int(process.pid) for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]

    def busy(self, since_us: int) -> dict[int, int]:
        """Maximum utilisation of the multiprocessors in percent per process since a time; empty if NVML does not report it."""
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except self._nvml.NVMLError:
            return {}
        max_utilisation: dict[int, int] = {}
        for sample in samples:
            max_utilisation[int(sample.pid)] = max(max_utilisation.get(int(sample.pid), 0), int(sample.smUtil))
        return max_utilisation


@dataclass
class GpuMonitor:
    """The samples of one monitored period."""

    gpu: Gpu | None
    samples: list[GpuSample] = field(default_factory=list)
    failure: str = ""
    """Why there are no samples."""

    def conditions(self, window: Sequence[float]) -> Conditions:
        """Summarise the GPU's state in a time window of the monotonic clock."""
        samples = [reading for reading in self.samples if window[0] <= reading.at <= window[1]]
        if not samples or self.gpu is None:
            return Conditions(
                notes=(f"clocks and throttling are unknown: {self.failure or 'NVML returned no samples'}",)
            )
        notes: list[str] = []
        # NVML uses the wall clock.
        since_us = time.time_ns() // 1000 - int(1e6 * (time.monotonic() - window[0]))
        others, busy = _others(self.gpu, since_us, notes)
        reasons = dict.fromkeys(reason for reading in samples for reason in reading.reasons)
        return Conditions(
            sm_mhz=int(statistics.median(reading.sm_mhz for reading in samples)),
            least_sm_mhz=min(reading.sm_mhz for reading in samples),
            memory_mhz=int(statistics.median(reading.memory_mhz for reading in samples)),
            temperature_c=max(reading.temperature_c for reading in samples),
            power_w=round(statistics.fmean(reading.power_w for reading in samples), 1),
            throttled=tuple(reasons),
            others=tuple(others),
            busy=tuple(busy),
            notes=tuple(notes),
        )


@contextlib.contextmanager
def monitor_gpu(gpu: Gpu | None, failure: str = "", period: float = SAMPLING_PERIOD_SECONDS) -> Iterator[GpuMonitor]:
    """Sample the GPU's state every ``period`` seconds in a thread while the context is active."""
    monitor = GpuMonitor(gpu, failure=failure)
    stop = threading.Event()

    def sample() -> None:
        assert gpu is not None
        while not stop.is_set():
            try:
                monitor.samples.append(gpu.read())
            except Exception as error:  # NVML has one class per failure, and a failure must not stop the timing
                monitor.failure = f"{type(error).__name__}: {error}"
                return
            stop.wait(period)

    thread = threading.Thread(target=sample, daemon=True)
    if gpu is not None:
        thread.start()
    try:
        yield monitor
    finally:
        stop.set()
        if gpu is not None:
            thread.join()


def open_gpu(uuid: str) -> tuple[Gpu | None, str]:
    """The GPU and an empty string, or None and the reason."""
    try:
        return Gpu(uuid), ""
    except LookupError as reason:
        return None, str(reason)


def _others(gpu: Gpu, since_us: int, notes: list[str]) -> tuple[list[str], list[str]]:
    """Other programs' processes that have a context on the GPU, and those that computed during the timing."""
    try:
        holders, busy = gpu.holders(), gpu.busy(since_us)
    except Exception as error:  # see `sample`
        notes.append(f"other processes are unknown: {type(error).__name__}: {error}")
        return [], []
    foreign = [pid for pid in dict.fromkeys([*holders, *busy]) if not _is_ours(pid)]
    visible = [pid for pid in foreign if _command(pid)]
    # In a container, NVML reports PIDs of the host, so our processes cannot be identified.
    if len(visible) < len(foreign):
        notes.append(
            "the GPU's processes cannot be identified: NVML reports PIDs of another namespace, as in a container"
        )
        if not any(map(_is_ours, holders)):
            # The process that was timed has a context on the GPU, so a number that exists here is a coincidence.
            return [], []
    labels = {pid: f"{Path(_command(pid)[0]).name} ({pid})" for pid in visible}
    return list(labels.values()), [labels[pid] for pid in visible if busy.get(pid, 0) >= BUSY_PERCENT]


def _is_ours(pid: int) -> bool:
    """Whether the process is this one or one of our workers, which wait while another one has the GPU."""
    return pid == os.getpid() or any("/mtmc_lsp/" in p and p.endswith("/process/worker/main.py") for p in _command(pid))


def _command(pid: int) -> list[str]:
    """A process's command line; empty if the process does not exist or is not visible."""
    try:
        return [
            part for part in Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0") if part
        ]
    except OSError:
        return []
