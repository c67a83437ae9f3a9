"""Pages that the editor links to. They are part of the package, so they open without a network.

``diagnostics`` and ``checks`` are written by hand. ``python scripts/golden.py --write`` generates ``actions`` and ``kernels``
from the action catalogue and the examples of ``tests/golden``; only ``actions/edit.md`` is written by hand.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def page(kind: str, code: str) -> Path:
    """Path of a page.

    Args:
        kind: ``diagnostics``, ``checks`` (static checks), ``actions`` or ``kernels``.
        code: name of the diagnostic, check, action or kernel.
    """
    return FOLDER / kind / f"{code}.md"
