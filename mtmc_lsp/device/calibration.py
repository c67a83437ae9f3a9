"""Measurements of the user's GPU, and the device model that combines them with a data file. Does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from mtmc_lsp.core.device_model import DeviceModel, Origin, Provenance

DRIVER = Provenance(Origin.DATA_SHEET, "reported by the driver of this machine")


@dataclass(frozen=True)
class Calibration:
    """Measured numbers of a GPU, in units of :class:`DeviceModel`; 0 if this version of torch does not report one."""

    name: str
    arch: str
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    peak_bandwidth: float
    warp_size: int
    max_warps_per_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int
    bandwidth: float
    read_bandwidth: float
    l2_bandwidth: float
    launch_gap_us: float
    """Device time per additional small kernel."""
    flops: Mapping[str, float]
    fp64_flops: float
    fp8_flops: float = 0.0
    """0 if the GPU or torch does not support 8-bit products."""


HOW = {
    "bandwidth": "copy of 1 GiB, best of several, cold L2",
    "read_bandwidth": "sum of 1 GiB, best of several, cold L2",
    "l2_bandwidth": "repeated sum of a quarter of the L2",
    "launch_us": "time per small kernel, times 2.1 because each kernel also fills and drains the multiprocessors",
    "flops": "library product of 4096 cubed, best of several",
    "fp64_flops": "library product of 4096 cubed, best of several",
    "fp8_flops": "library product of 4096 cubed, best of several",
}
"""Measured fields and their benchmark; the driver reports all other numbers."""
FILL_AND_DRAIN = 2.1
"""Cost of an additional kernel relative to the gap between small kernels: 4 us fits plans on an H200, whose gap is 1.9 us."""


def calibrated(model: DeviceModel, measured: Calibration) -> DeviceModel:
    """A data file's model, updated with the measured numbers of the user's GPU."""
    values: dict[str, object] = {}
    provenance = dict(model.provenance)
    for item in fields(Calibration):
        value = getattr(measured, item.name)
        if item.name in ("name", "arch"):
            values[item.name] = value
        elif item.name == "flops":
            values["flops"] = {**model.flops, **value}
            provenance |= {f"flops.{mode}": _measured("flops") for mode in value}
        elif item.name == "launch_gap_us":
            values["launch_us"] = FILL_AND_DRAIN * value
            provenance["launch_us"] = _measured("launch_us")
        elif value:
            values[item.name] = value
            provenance[item.name] = _measured(item.name) if item.name in HOW else DRIVER
    # mypy cannot check the fields of a table.
    return replace(model, **values, is_calibrated=True, provenance=provenance)  # type: ignore[arg-type]


def _measured(name: str) -> Provenance:
    return Provenance(Origin.MEASURED, f"on this machine: {HOW[name]}")
