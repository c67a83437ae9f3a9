"""Table of a calibration, compared with the data file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtmc_lsp.app.calibrate import CalibratedDevice
from mtmc_lsp.core.device_model import DeviceModel


@dataclass(frozen=True)
class Row:
    """One number of a device, in the unit of the table."""

    name: str
    unit: str
    measured: float
    data: float
    origin: str
    """Origin of the number in the data file."""

    @property
    def ratio(self) -> float | None:
        """Measured value divided by the data file's value; None if the data file has none."""
        return self.measured / self.data if self.data else None


Number = Callable[[DeviceModel], float]
MODES = {"fp32": "fp32", "tf32": "TF32", "fp16": "fp16", "bf16": "bf16", "fp16x3": "fp16x3 (split fp32)"}
NUMBERS: tuple[tuple[str, str, float, str, Number], ...] = (
    ("copy bandwidth", "TB/s", 1e12, "bandwidth", lambda device: device.bandwidth),
    ("read bandwidth", "TB/s", 1e12, "read_bandwidth", lambda device: device.read_bandwidth),
    ("L2 bandwidth", "TB/s", 1e12, "l2_bandwidth", lambda device: device.l2_bandwidth),
    ("L2 size", "MiB", float(1 << 20), "l2_bytes", lambda device: device.l2_bytes),
    ("multiprocessors", "", 1.0, "sm_count", lambda device: device.sm_count),
    ("shared memory per block", "KiB", 1024.0, "shared_bytes", lambda device: device.shared_bytes),
    ("one more kernel", "us", 1.0, "launch_us", lambda device: device.launch_us),
    ("fp64 products", "TFLOP/s", 1e12, "fp64_flops", lambda device: device.fp64_flops),
    ("fp8 products", "TFLOP/s", 1e12, "fp8_flops", lambda device: device.fp8_flops),
)
"""Label, unit, the unit's size, the figure's name in the data file, and the number."""


def rows(data: DeviceModel, measured: DeviceModel) -> list[Row]:
    """The calibrated numbers, each with the data file's number."""
    figures = [
        Row(label, unit, number(measured) / size, number(data) / size, _origin(data, figure))
        for label, unit, size, figure, number in NUMBERS
    ]
    figures += [
        Row(
            f"{label} products",
            "TFLOP/s",
            measured.flops[mode] / 1e12,
            data.flops[mode] / 1e12,
            _origin(data, f"flops.{mode}"),
        )
        for mode, label in MODES.items()
    ]
    return figures


def _origin(data: DeviceModel, figure: str) -> str:
    return data.provenance[figure].origin.value


def show_calibration(out: Console, result: CalibratedDevice) -> None:
    """The table, and whether later plans use the calibration."""
    environment = result.environment
    title = f"{environment.gpu} ({result.measured.arch}), torch {environment.torch}, driver {environment.driver or 'unknown'}"
    out.print(Text(title, style="bold"))
    table = Table("", "measured", "data file", "", "ratio", "data file's number is", box=None, padding=(0, 1))
    for row in rows(result.data, result.measured):
        ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
        table.add_row(row.name, f"{row.measured:.4g}", f"{row.data:.4g}", row.unit, ratio, row.origin)
    out.print(table)
    if result.data.note:
        out.print(Text(f"Note: {result.data.note}.", style="dim"))
    stored = "Stored: plans for this GPU, driver and torch version use these numbers from now on."
    out.print(
        stored if result.is_stored else "Not stored: the cache folder cannot be written, so each run measures again."
    )
