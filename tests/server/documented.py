"""The snippets of docs/language-server.md, and a user's folder to try them in."""

from __future__ import annotations

import re
from pathlib import Path

from editor import FAKE

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "language-server.md"
MODEL = """\
# fake f: better better
import torch


# mtmc: x=f32[8,48]
def f(x):
    return torch.softmax(torch.relu(x) + 1, -1)
"""


def snippet(heading: str, command: str) -> str:
    """The code below a heading that starts like this, with the command of the fake server in the place of ``command``."""
    section = DOCUMENTED.read_text().partition(f"### {heading}")[2]
    match = re.search(r"```\w+\n(.*?)```", section, re.DOTALL)
    assert match is not None and '"mtmc-lsp"' in match[1], heading
    return match[1].replace('"mtmc-lsp"', command)


def quoted_command() -> str:
    """The words of the fake server's command, each in quotes."""
    return " ".join(f'"{word}"' for word in FAKE)


def project(folder: Path) -> Path:
    """A user's folder; returns its file."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    file = folder / "model.py"
    file.write_text(MODEL)
    return file
