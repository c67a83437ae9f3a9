"""How much of a busy machine a process takes: its share of the cores, and who goes first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

NICENESS = 5
"""Of 19; with it a process gets about a third of what another gets that wants the same core. With more, a run would hardly get on
where something else keeps the machine busy."""
SHARE_OF_SESSION = "/proc/self/autogroup"
"""Where Linux shares cores out by session first, only this file says how much of them a session wants."""


OVERLAP = 2
"""How many of several jobs may run on a core: one seldom needs all of its cores at once."""
FEWEST = 4
"""Cores that a job gets at least, where there are so many."""


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_of(job: int, jobs: int, cores: Sequence[int]) -> list[int]:
    """The cores for one of several jobs that run side by side.

    Libraries start as many threads as there are cores, and these wait for each other in loops: jobs that each use all cores
    of a large machine hardly get on.

    Args:
        job: which, from 0.
        jobs: how many there are.
        cores: all of them.
    """
    count = len(cores)
    width = min(count, max(FEWEST, -(-OVERLAP * count // jobs)))
    first = job * count // jobs
    return sorted(cores[(first + i) % count] for i in range(width))


def keep_to(cores: Sequence[int]) -> None:
    """Have this process, and what it starts, run on these cores only, where that can be said."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def lower_priority() -> None:
    """Have this process, its session and what they start take only what others leave of the cores, as far as that can be said."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError), open(SHARE_OF_SESSION, "w") as file:
        file.write(str(NICENESS))


def has_low_priority() -> bool:
    """Whether this process, or the one that started it, was told to."""
    return os.getpriority(os.PRIO_PROCESS, 0) >= NICENESS
