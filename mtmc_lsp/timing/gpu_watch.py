"""Watches a GPU through NVML while something is timed on it: clocks, temperature, power, throttling, other processes."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mtmc_lsp.core.results import Conditions

PERIOD_SECONDS = 0.02
BUSY_PERCENT = 3
"""A part of the multiprocessors above which another process is taken to compute, not only to hold memory."""
REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""NVML's reasons that slow a busy GPU down, by their bit. Idleness, set clocks and synchronised boards are none."""
GRAVE = frozenset(REASONS.values()) - {"power cap"}
"""Reasons for which a timing is made again. Large products reach the power cap as a matter of course."""


@dataclass(frozen=True)
class Reading:
    """What NVML said at one moment."""

    at: float
    """Seconds of the monotonic clock."""
    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    reasons: tuple[str, ...]


class Gpu(Protocol):
    """A GPU as NVML shows it."""

    def read(self) -> Reading:
        """Its state now."""

    def holders(self) -> list[int]:
        """Process ids that have a context on it, as NVML numbers them."""

    def busy(self, since_us: int) -> dict[int, int]:
        """Percent of the multiprocessors that each process used, of samples since a time; empty where that is not told."""


class NvmlGpu:
    """By ``nvidia-ml-py``."""

    def __init__(self, uuid: str) -> None:
        """Find the GPU.

        Raises:
            LookupError: NVML is not there, or does not know it (a part of a GPU, for example).
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
            raise LookupError(f"NVML does not show this GPU: {error}") from None

    def read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        mask = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return Reading(
            at=time.monotonic(),
            sm_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_w=float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
            reasons=tuple(name for bit, name in REASONS.items() if mask & bit),
        )

    def holders(self) -> list[int]:
        return [int(process.pid) for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)]

    def busy(self, since_us: int) -> dict[int, int]:
        try:
            found = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except self._nvml.NVMLError:
            return {}
        most: dict[int, int] = {}
        for sample in found:
            most[int(sample.pid)] = max(most.get(int(sample.pid), 0), int(sample.smUtil))
        return most


@dataclass
class Watch:
    """What was seen from its start to its end."""

    gpu: Gpu | None
    readings: list[Reading] = field(default_factory=list)
    failure: str = ""
    """Why nothing was seen."""
    began_us: int = 0
    """Wall-clock start, in which NVML counts."""

    def conditions(self, window: Sequence[float]) -> Conditions:
        """How the GPU was between two moments of the monotonic clock."""
        seen = [reading for reading in self.readings if window[0] <= reading.at <= window[1]]
        if not seen or self.gpu is None:
            return Conditions(notes=(f"clocks and throttling are not known: {self.failure or 'nothing was read'}",))
        notes: list[str] = []
        others, busy = _others(self.gpu, self.began_us, notes)
        reasons = dict.fromkeys(reason for reading in seen for reason in reading.reasons)
        return Conditions(
            sm_mhz=int(statistics.median(reading.sm_mhz for reading in seen)),
            least_sm_mhz=min(reading.sm_mhz for reading in seen),
            memory_mhz=int(statistics.median(reading.memory_mhz for reading in seen)),
            temperature_c=max(reading.temperature_c for reading in seen),
            power_w=round(statistics.fmean(reading.power_w for reading in seen), 1),
            throttled=tuple(reasons),
            others=tuple(others),
            busy=tuple(busy),
            notes=tuple(notes),
        )


@contextlib.contextmanager
def watching(gpu: Gpu | None, failure: str = "", period: float = PERIOD_SECONDS) -> Iterator[Watch]:
    """Read the GPU's state again and again, beside what is done inside."""
    watch = Watch(gpu, failure=failure, began_us=time.time_ns() // 1000)
    ended = threading.Event()

    def look() -> None:
        assert gpu is not None
        while not ended.is_set():
            try:
                watch.readings.append(gpu.read())
            except Exception as error:  # NVML has a class for each failure; a timing is none the worse for it
                watch.failure = f"{type(error).__name__}: {error}"
                return
            ended.wait(period)

    thread = threading.Thread(target=look, daemon=True)
    if gpu is not None:
        thread.start()
    try:
        yield watch
    finally:
        ended.set()
        if gpu is not None:
            thread.join()


def open_gpu(uuid: str) -> tuple[Gpu | None, str]:
    """The GPU, or None and why not."""
    try:
        return NvmlGpu(uuid), ""
    except LookupError as reason:
        return None, str(reason)


def _others(gpu: Gpu, since_us: int, notes: list[str]) -> tuple[list[str], list[str]]:
    """Processes of other programs that hold the GPU, and those of them that computed meanwhile."""
    try:
        holders, busy = gpu.holders(), gpu.busy(since_us)
    except Exception as error:  # as above
        notes.append(f"other processes are not known: {type(error).__name__}: {error}")
        return [], []
    strange = [pid for pid in dict.fromkeys([*holders, *busy]) if not _is_ours(pid)]
    known = [pid for pid in strange if _command(pid)]
    # In a container NVML counts by the host's numbers, under which our own processes cannot be found.
    if len(known) < len(strange):
        notes.append("the GPU's processes cannot be told apart here: NVML numbers them otherwise")
    shown = {pid: f"{Path(_command(pid)[0]).name} ({pid})" for pid in known}
    return list(shown.values()), [shown[pid] for pid in known if busy.get(pid, 0) >= BUSY_PERCENT]


def _is_ours(pid: int) -> bool:
    """Whether it is a worker of this tool, which waits while another one has the GPU."""
    return pid == os.getpid() or any("/mtmc_lsp/" in p and p.endswith("/process/worker/main.py") for p in _command(pid))


def _command(pid: int) -> list[str]:
    """A process's command line; empty where there is no such process to be seen."""
    try:
        return [
            part for part in Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0") if part
        ]
    except OSError:
        return []
