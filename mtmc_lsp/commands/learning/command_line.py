"""The command line as reports and models store it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def command_line() -> str:
    """The command of this process: paths without their folders, which would tell about the user's machine."""
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return f"mtmc {shlex.join(words)}"
