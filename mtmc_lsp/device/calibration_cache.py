"""Cache of calibrations on disk: one per GPU, driver and torch version."""

from __future__ import annotations

import json
import os

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.cache_files import cache_file


def cached_device(environment: Environment) -> DeviceModel | None:
    """The cached model of this GPU, driver and torch version; ``None`` if there is none."""
    file = cache_file(environment)
    try:
        return from_json(DeviceModel, json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        # Missing, or written by another version: calibrate again.
        return None


def remember_device(environment: Environment, device: DeviceModel) -> bool:
    """Cache a calibration; False if the cache is not writable, so that each run calibrates again."""
    file = cache_file(environment)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_text(json.dumps(to_json(device)), encoding="utf-8")
        part.replace(file)
    except OSError:
        return False
    return True
