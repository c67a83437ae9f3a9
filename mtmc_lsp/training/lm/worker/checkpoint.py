"""The state of a training on disk, replaced as a whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.core.errors import Location, RequestError

CHECKPOINT = "checkpoint.pt"
REMEDY = "Name another --out, or remove the folder to start again."


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the checkpoint: a killed process leaves the old or the new one."""
    temporary = folder / f"{CHECKPOINT}.tmp"
    torch.save(state, temporary)
    temporary.replace(folder / CHECKPOINT)


def load_checkpoint(folder: Path, parameters: str) -> dict[str, Any] | None:
    """The state of the last checkpoint; None if there is none.

    Args:
        parameters: the training's parameters as text, which must be those of the checkpoint.

    Raises:
        RequestError: the file is damaged, or belongs to a training with other parameters.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        stored = state["parameters"]
    except Exception as error:
        # torch raises errors of pickle, zipfile and its own.
        message = f"the checkpoint is damaged ({type(error).__name__})"
        raise RequestError(message, where=Location(str(path)), remedy=REMEDY) from None
    if stored != parameters:
        message = "this folder holds a training with another model, data or other parameters"
        raise RequestError(message, where=Location(str(folder)), remedy=REMEDY)
    loaded: dict[str, Any] = state
    return loaded


def replace_folder(source: Path, target: Path) -> None:
    """Put a finished folder in the place of an older one."""
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)
