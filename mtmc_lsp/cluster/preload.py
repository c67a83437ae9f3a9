"""What a worker of a cluster on this machine runs at its start, by Dask's ``preload``."""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Leave Ctrl-C in the terminal to the command, which ends its workers in order."""
    # Not SIG_IGN, which the processes of jobs would inherit: they close their own workers on SIGINT.
    signal.signal(signal.SIGINT, lambda number, frame: None)
