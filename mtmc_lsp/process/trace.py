"""Records when processes start and end and what they are asked, for developers: ``MTMC_TRACE=FILE`` appends one JSON line each.

``scripts/trace_run.py`` prints such a file. Without the variable, nothing is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

TRACE = "MTMC_TRACE"
"""Environment variable with the path of the file."""
STARTED, ASKED, ENDED = "started", "asked", "ended"
"""Events: a process started, answered a command, ended."""
FORK, NEW, SERVER = "fork", "new", "fork server"
"""How a process started: by a fork, as a new interpreter, as a fork server. Branches of fork servers are not recorded."""


def note(event: str, pid: int, **facts: object) -> None:
    """Record an event of a process now. An error loses the line, never the run."""
    file = os.environ.get(TRACE)
    if not file:
        return
    line = json.dumps({"event": event, "pid": pid, "at": time.monotonic(), "by": os.getpid(), **facts})
    with contextlib.suppress(OSError), open(file, "ab", buffering=0) as stream:
        # One write, because several processes append to the file.
        stream.write(f"{line}\n".encode())


def note_end(pid: int) -> None:
    """Record that a process is about to be ended, with its processor time until now."""
    if os.environ.get(TRACE):
        note(ENDED, pid, cpu=processor_seconds(pid))


def processor_seconds(pid: int) -> float:
    """Processor time of a process and of its children that run: a supervisor's child does the work."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
        return sum(_seconds_of(each) for each in (str(pid), *children))
    return 0.0


def _seconds_of(pid: str) -> float:
    with contextlib.suppress(OSError):
        # After the name, which may contain spaces: the state, ten numbers, then user and system time.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
