"""Calibrations kept between runs: one for each GPU, driver and torch version."""

from __future__ import annotations

import json
import os

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.cache_files import cache_file


def cached_device(environment: Environment) -> DeviceModel | None:
    """The model that was measured before on this GPU with this driver and torch."""
    file = cache_file(environment)
    try:
        return from_json(DeviceModel, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        # Missing, or written by another version: it is measured again.
        return None


def remember_device(environment: Environment, device: DeviceModel) -> bool:
    """Keep a calibration for later runs; False where no cache can be written, and each run measures again."""
    file = cache_file(environment)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(to_json(device)), encoding="utf-8")
        part.replace(file)
    except OSError:
        return False
    return True
