"""Selects the device model for a plan: by the GPU's name, else by its architecture, else the nearest architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.device.calibration import Calibration, calibrated
from mtmc_lsp.device.data_files import data_files

DEFAULT_ARCH = "sm_90"
"""Planned for where several architectures are requested and this is one of them, and where the device is unknown."""
FIRST_WITH_TMA = 90
"""``sm_90``: Hopper."""
MIN_SHARED_BYTES = 65536
"""Shared memory per block in bytes on architectures older than all data files: Turing has the least."""


def model_of_arch(arch: str) -> DeviceModel:
    """The model that represents an architecture; without a data file, the nearest one of the same vendor, with a note."""
    by_arch = {file.model.arch: file.model for file in data_files() if file.represents_arch}
    plain = _base_arch(arch)
    if plain in by_arch:
        return by_arch[plain]
    same_vendor = [name for name in by_arch if _vendor(name) == _vendor(arch)] or [DEFAULT_ARCH]
    nearest = by_arch[min(same_vendor, key=lambda name: (abs(_number(name) - _number(plain)), name))]
    return _as_arch(nearest, arch)


def default_model() -> DeviceModel:
    """The model for configurations that are chosen without knowing the device."""
    return model_of_arch(DEFAULT_ARCH)


def model_of_gpu(gpu: str, arch: str) -> DeviceModel:
    """The model of a GPU by the driver's name; without a matching file, the model of its architecture with the GPU's name.

    Args:
        gpu: ``NVIDIA H100 80GB HBM3``.
        arch: ``sm_90``.
    """
    files = [file.model for file in data_files() if file.model.arch == _base_arch(arch) and file.matches(gpu)]
    if files:
        return replace(files[0], name=gpu)
    model = model_of_arch(arch)
    note = f"no data file describes {gpu}: numbers not measured on this machine are those of {model.name}"
    return replace(model, name=gpu, note=note)


def calibrated_model(environment: Environment, measured: Calibration) -> DeviceModel:
    """The model of this machine's GPU: measured numbers, completed by those of its data file."""
    return calibrated(model_of_gpu(environment.gpu, environment.capability), measured)


def planning_model(archs: Sequence[str]) -> DeviceModel:
    """The device to plan for without a GPU, with the shared memory that is available on all of ``archs``.

    It is an H200 if ``archs`` contains ``sm_90``, else a GPU of the first architecture.
    """
    models = {_base_arch(arch): model_of_arch(arch) for arch in archs}
    model = models.get(DEFAULT_ARCH) or next(iter(models.values()))
    return replace(model, shared_bytes=min(candidate.shared_bytes for candidate in models.values()))


def _as_arch(nearest: DeviceModel, arch: str) -> DeviceModel:
    """A model for an architecture without a data file: the nearest one, without hardware features that ``arch`` lacks."""
    number = _number(_base_arch(arch))
    has_tma = nearest.has_tma and number >= FIRST_WITH_TMA
    is_older = number < _number(nearest.arch)
    shared_bytes = min(nearest.shared_bytes, MIN_SHARED_BYTES) if is_older else nearest.shared_bytes
    note = f"no data file describes {arch}: planned as {nearest.name} ({nearest.arch}); run `mtmc calibrate` on the GPU"
    return replace(nearest, arch=arch, has_tma=has_tma, shared_bytes=shared_bytes, note=note)


def _base_arch(arch: str) -> str:
    """``sm_90`` for ``sm_90a``; AMD's names are hexadecimal and do not change."""
    return arch.removesuffix("a") if arch.startswith("sm_") else arch


def _vendor(arch: str) -> str:
    return arch[:2]


def _number(arch: str) -> int:
    """The capability as a number: 90 for ``sm_90``, 0x942 for ``gfx942``."""
    return int(re.sub(r"^(sm_|gfx)", "", arch), 16 if arch.startswith("gfx") else 10)
