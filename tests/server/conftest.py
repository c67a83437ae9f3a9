"""Fixtures: editors with their own server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from editor import Editor, editor


@pytest_asyncio.fixture
async def ide(tmp_path: Path) -> AsyncIterator[Editor]:
    """An editor with all capabilities that trusts the workspace; searches are fake."""
    (tmp_path / "user").mkdir()
    async with editor(tmp_path / "user") as made:
        yield made
