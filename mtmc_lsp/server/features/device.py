"""``mtmc/device``: what a run of a folder's code would be measured on, for clients that say so before there is one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pygls.uris import to_fs_path

from mtmc_lsp.app.interpreter import find_python, gpu_of
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.server.server import Server

DEVICE = "mtmc/device"


def register(server: Server) -> None:
    """Register the request."""
    server.feature(DEVICE)(device)


async def device(ls: Server, params: Any) -> dict[str, str] | None:
    """The ``gpu``'s name for the file or folder ``uri``, empty where code would run on the CPU; nothing where that is not known.

    The folder's interpreter is asked, so nothing is said of one that is not trusted.
    """
    path = to_fs_path(str(getattr(params, "uri", "")))
    if path is None or not Path(path).exists():
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
        # A run says what is wrong with the settings.
        return None
