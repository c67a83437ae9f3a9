"""Keep our processes from importing files of the working folder or of relative PYTHONPATH entries.

An editor starts the server in the folder that the user opened. A file ``types.py`` or ``mtmc_lsp.py`` there would be imported
by our processes, even if the user has not trusted the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parent.parent / "launch.py"
# With -c, sys.path starts with an empty entry. `sys` is built in, so this statement imports no file.
LEAVE_WORKING_FOLDER = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"
"""The first lines of a script for ``python -c``."""


def isolated_command(module: str) -> tuple[str, ...]:
    """The command that runs a module like ``python -m``, isolated from the working folder."""
    # -I exists on all versions, -P from 3.11 on.
    return (sys.executable, "-I", str(LAUNCHER), module)


def leave_working_folder() -> None:
    """Remove the working folder from ``sys.path`` in a process that was not started with :func:`isolated_command`."""
    try:
        working_folder = os.path.realpath(os.getcwd())
    except FileNotFoundError:
        # The working folder was deleted.
        working_folder = ""
    sys.path[:] = [entry for entry in sys.path if os.path.isabs(entry) and os.path.realpath(entry) != working_folder]


def drop_relative_entries() -> None:
    """Remove relative entries from PYTHONPATH for all child processes.

    Only for the server: its working folder is chosen by the editor and unrelated to the user's code.
    """
    python_path = os.environ.get("PYTHONPATH")
    if python_path is not None:
        absolute_entries = [entry for entry in python_path.split(os.pathsep) if os.path.isabs(entry)]
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute_entries)
        if not absolute_entries:
            del os.environ["PYTHONPATH"]
