"""Processes of ours import nothing from the folder they run in, nor from relative entries of PYTHONPATH.

An editor starts the server in the folder that the user opened. A file ``types.py`` or ``mtmc_lsp.py`` there would run in our
processes, also where the user has not trusted the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parent.parent / "launch.py"
# With -c, Python puts an empty entry first. `sys` is built in, so this statement imports no file.
LEAVE_WORKING_FOLDER = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"
"""The first lines of a script for ``python -c``."""


def own_command(module: str) -> tuple[str, ...]:
    """The command that runs a module of ours as ``python -m`` does, isolated from the folder it is started in."""
    # -I exists on all versions, -P from 3.11 on.
    return (sys.executable, "-I", str(LAUNCHER), module)


def leave_working_folder() -> None:
    """Import nothing more from the working folder, in a process that was not started by :func:`own_command`."""
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:
        # The folder was deleted.
        here = ""
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry) and os.path.realpath(entry) != here]


def drop_relative_entries() -> None:
    """Remove what depends on the working folder from PYTHONPATH, for all processes that this one starts.

    Only for the server: the folder that an editor starts it in has nothing to do with the user's code.
    """
    given = os.environ.get("PYTHONPATH")
    if given is not None:
        kept = [entry for entry in given.split(os.pathsep) if os.path.isabs(entry)]
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
        if not kept:
            del os.environ["PYTHONPATH"]
