"""The scratch folder of a worker. Runs in workers.

Its path comes in an environment variable. A candidate for verification must not see that a program of ours started it, so our
variables are removed from its environment.
"""

from __future__ import annotations

import os

from mtmc_lsp.process.worker_process import SCRATCH

PREFIX = "MTMC_"
_folder: str | None = None


def scratch_folder() -> str | None:
    """The folder, or ``None`` outside of workers."""
    return os.environ.get(SCRATCH, _folder)


def hide_variables() -> None:
    """Remove our variables from the environment of this process."""
    global _folder
    _folder = scratch_folder()
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
