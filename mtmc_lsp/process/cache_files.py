"""Files in the user's cache folder that are valid for one GPU, driver and torch version."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from mtmc_lsp.core.workload import Environment


def cache_folder() -> Path:
    """The folder for measurements of this machine that are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtmc"


def cache_file(environment: Environment, kind: str = "device") -> Path:
    """The file for one kind of measurement with this GPU, driver and torch."""
    parts = [environment.gpu, environment.driver, environment.torch]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"{kind}-{key}.json"
