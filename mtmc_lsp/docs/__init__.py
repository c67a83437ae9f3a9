"""Pages that diagnostics link to. They are part of the package, so they open without a network."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def page(kind: str, code: str) -> Path:
    """Path of the page for a diagnostic (``diagnostics``) or a static check (``checks``)."""
    return FOLDER / kind / f"{code}.md"
