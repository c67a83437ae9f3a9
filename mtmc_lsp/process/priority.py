"""CPU priority and core affinity of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

NICENESS = 5
"""Of 19. With 5, a process gets about a third of the CPU time of a normal process on the same core. With more, a run would hardly
progress on a busy machine."""
SESSION_PRIORITY = "/proc/self/autogroup"
"""Where Linux first divides CPU time among sessions, this file sets the session's niceness."""
JOBS_PER_CORE = 2
"""How many parallel jobs may share a core: a job seldom uses all of its cores at once."""
MIN_CORES = 4
"""Fewest cores of a job, if the machine has as many."""


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for_job(job: int, jobs: int, cores: Sequence[int]) -> list[int]:
    """The cores for one of several parallel jobs.

    Libraries start one thread per core, and these threads wait for each other in busy loops: parallel jobs that each use all
    cores of a large machine hardly progress.

    Args:
        job: index of the job, from 0.
        cores: all usable cores.
    """
    count = len(cores)
    width = min(count, max(MIN_CORES, -(-JOBS_PER_CORE * count // jobs)))
    first = job * count // jobs
    return sorted(cores[(first + i) % count] for i in range(width))


def limit_to_cores(cores: Sequence[int]) -> None:
    """Let this process and its children run only on these cores, where the system supports that."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def lower_priority() -> None:
    """Lower the CPU priority of this process, its session and its children, as far as the system supports that."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError), open(SESSION_PRIORITY, "w") as file:
        file.write(str(NICENESS))


def has_low_priority() -> bool:
    """Whether this process or its parent called :func:`lower_priority`."""
    return os.getpriority(os.PRIO_PROCESS, 0) >= NICENESS
