"""The pages that diagnostics link to. They come with the package, so they open without a network."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def page(kind: str, code: str) -> Path:
    """The page of a diagnostic (``diagnostics``) or of a static check (``checks``)."""
    return FOLDER / kind / f"{code}.md"
