"""How much of a busy machine a process takes: what nobody waits for at the keyboard lets an editor go first."""

from __future__ import annotations

import contextlib
import os

NICENESS = 5
"""Of 19; with it a process gets about a third of what another gets that wants the same core. With more, a run would hardly get on
where something else keeps the machine busy."""
SHARE_OF_SESSION = "/proc/self/autogroup"
"""Where Linux shares cores out by session first, only this file says how much of them a session wants."""


def give_way() -> None:
    """Have this process, its session and what they start take only what others leave of the cores, as far as that can be said."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError), open(SHARE_OF_SESSION, "w") as file:
        file.write(str(NICENESS))


def gives_way() -> bool:
    """Whether this process, or the one that started it, was told to."""
    return os.getpriority(os.PRIO_PROCESS, 0) >= NICENESS
