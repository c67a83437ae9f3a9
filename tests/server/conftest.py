"""Editors with a server of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from editor import Editor, editor


@pytest_asyncio.fixture
async def ide(tmp_path: Path) -> AsyncIterator[Editor]:
    """An editor that knows everything and trusts the workspace; searches are fakes."""
    (tmp_path / "user").mkdir()
    async with editor(tmp_path / "user") as made:
        yield made
