"""``mtmc/device``: the device on which runs of a folder are measured, for clients that show it before a run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from mtmc_lsp.app.interpreter import find_python, gpu_of
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import path_of

DEVICE = "mtmc/device"


def register(server: Server) -> None:
    """Register the request."""
    server.feature(DEVICE)(device)


async def device(ls: Server, params: Any) -> dict[str, str] | None:
    """The name of the GPU for the file or folder ``uri``; empty for CPU only, None if unknown.

    Runs the folder's interpreter, so the answer is None for folders that are not trusted.
    """
    path = path_of(str(getattr(params, "uri", "")))
    if not path or not os.path.exists(path):
        return None
    file = Path(path) / "any.py" if Path(path).is_dir() else Path(path)
    if not ls.trusts(str(file)):
        return None
    python = (await ls.settings_of(file.as_uri())).python
    gpu = await asyncio.to_thread(_gpu, python, file)
    return {"gpu": gpu} if gpu is not None else None


def _gpu(python: str | None, file: Path) -> str | None:
    try:
        return gpu_of(python or find_python(file, read_settings(file.parent)))
    except MtmcError:
        # A run reports what is wrong with the settings.
        return None
