"""``mtmc/device``: what a folder's code would be measured on, before any run."""

from pathlib import Path
from typing import Any

import pytest
from editor import Editor, editor

pytestmark = pytest.mark.asyncio


def interpreter(folder: Path, says: str) -> str:
    """A program that answers every question so, and leaves a mark."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ntouch {folder}/was-run\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


async def ask(ide: Editor, uri: str) -> Any:
    return await ide.client.protocol.send_request_async("mtmc/device", {"uri": uri})


@pytest.mark.parametrize("gpu", ["Pretended GPU", ""])
async def test_the_folders_interpreter_is_asked_for_a_file_and_for_the_folder(tmp_path: Path, gpu: str) -> None:
    settings = {"python": interpreter(tmp_path, f'"{gpu}"')}
    async with editor(tmp_path, settings=settings) as ide:
        for uri in (ide.open("x = 1\n"), ide.uri("")):
            assert (await ask(ide, uri)).gpu == gpu


async def test_what_cannot_be_told_is_not_said(tmp_path: Path) -> None:
    async with editor(tmp_path, settings={"python": interpreter(tmp_path, "null")}) as ide:
        assert await ask(ide, ide.open("x = 1\n")) is None
        assert await ask(ide, ide.uri("gone.py")) is None
        assert await ask(ide, "untitled:Untitled-1") is None


async def test_settings_that_cannot_be_read_are_left_to_a_run_to_complain_of(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        assert (await ask(ide, ide.uri(""))) is not None
        (tmp_path / "pyproject.toml").write_text("[tool.mtmc]\nnonsense = 1\n")
        assert await ask(ide, ide.uri("")) is None


async def test_no_interpreter_runs_for_a_folder_that_is_not_trusted(tmp_path: Path) -> None:
    async with editor(tmp_path, options={}, settings={"python": interpreter(tmp_path, '"Pretended GPU"')}) as ide:
        assert await ask(ide, ide.open("x = 1\n")) is None
        assert not (tmp_path / "was-run").exists()
