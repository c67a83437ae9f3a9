"""Data-sheet ceilings for when there is no GPU to measure, and the roofline bound."""

from __future__ import annotations

from mtmc_lsp.core.results import Device
from mtmc_lsp.core.workload import Capture

TERA = 1e12
DATA_SHEETS: dict[str, Device] = {
    "sm_80": Device("NVIDIA A100 80GB (data sheet)", "sm_80", 108, 166912, 40 << 20, 1.9 * TERA,
                    {"fp32": 19 * TERA, "tf32": 140 * TERA, "fp16": 270 * TERA, "bf16": 270 * TERA, "fp16x3": 85 * TERA}),
    "sm_86": Device("NVIDIA A10 (data sheet)", "sm_86", 72, 101376, 6 << 20, 0.55 * TERA,
                    {"fp32": 25 * TERA, "tf32": 50 * TERA, "fp16": 100 * TERA, "bf16": 100 * TERA, "fp16x3": 33 * TERA}),
    "sm_89": Device("NVIDIA L40S (data sheet)", "sm_89", 142, 101376, 96 << 20, 0.8 * TERA,
                    {"fp32": 70 * TERA, "tf32": 150 * TERA, "fp16": 300 * TERA, "bf16": 300 * TERA, "fp16x3": 100 * TERA}),
    "sm_90": Device("NVIDIA H200 (data sheet)", "sm_90", 132, 232448, 60 << 20, 4.28 * TERA,
                    {"fp32": 51 * TERA, "tf32": 400 * TERA, "fp16": 780 * TERA, "bf16": 780 * TERA, "fp16x3": 220 * TERA}),
    "gfx942": Device("AMD MI300X (data sheet)", "gfx942", 304, 65536, 256 << 20, 4.3 * TERA,
                     {"fp32": 100 * TERA, "tf32": 250 * TERA, "fp16": 600 * TERA, "bf16": 600 * TERA, "fp16x3": 180 * TERA}),
}  # fmt: skip
"""Rates that large library calls reach in practice; where no GPU is there, plans are made for the first of these asked for."""


def data_sheet(archs: tuple[str, ...]) -> Device:
    """The device to plan for without a GPU: an H200 where it is among ``archs``."""
    known = [arch for arch in archs if arch in DATA_SHEETS]
    return DATA_SHEETS["sm_90" if "sm_90" in known or not known else known[0]]


def bound_us(capture: Capture, device: Device) -> float:
    """The roofline's least time for a call: every input read once, every output written once."""
    return capture.bytes / device.bandwidth * 1e6
