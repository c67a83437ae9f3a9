"""Runs ``mtmc`` as a user does: a process of its own, in the user's project.

As the problems of a suite do under ``mtmc bench``, the processes borrow one template, so that torch is imported once.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mtmc_lsp.process.fork_server import ForkServer, likely_variables

COMMAND = [sys.executable, "-m", "mtmc_lsp"]

MODEL = """\
import random

import torch


# mtmc: x=f32[8,48]
def two(x):
    a = torch.relu(x) + 1
    s = torch.sort(a).values
    return torch.softmax(s * 2, -1)


# mtmc: x=f32[8,48] y=i64[8]@0..47 scale=2.0 eps=0.5
def picked(x, y, eps, scale=1.0):
    return torch.relu(x).gather(1, y[:, None]) * scale + eps


def no_workload(x):
    return x + 1


# mtmc: x=f32[8,n_rows]
def no_size(x):
    return x + 1


# mtmc: x=f32[8,48]
def raises(x):
    raise ValueError("boom")


# mtmc: x=f32[8,48]
def branches(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


# mtmc: x=f32[8,48]
def nothing(x):
    x + 1


# mtmc: x=f32[8,48]
def chance(x):
    return x * random.random()


# mtmc: x=f32[8,48]
def remembers(x):
    return x + counted()


CALLS = []


def counted():
    CALLS.append(1)
    return len(CALLS)


# mtmc: x=f32[8,48]
def misfits(x):
    y = x + 1
    return y @ x[:3]


# mtmc: x=f32[400000,400000,40]
def huge(x):
    return x.sort().values


def broken(x):
    return x +
"""


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error that the document carries."""
        found: dict[str, Any] = self.document["error"]
        return found


def environment() -> dict[str, str]:
    """The environment of a user's shell with our interpreter as the project's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "TRITON_INTERPRET")}
    # Wide enough that a message is one line; the transcripts of tests/cli/test_transcripts.py have 100 columns.
    return {**kept, "COLUMNS": "400", "NO_COLOR": "1"}


@cache
def fork_server() -> ForkServer:
    """What workers of all commands of this test process become copies of; started when first lent, ended with the process."""
    one = ForkServer(sys.executable, likely_variables(), preload=True)
    atexit.register(one.close)
    return one


def mtmc(folder: Path, *arguments: str, **variables: str) -> Answer:
    """Run ``mtmc`` in a folder."""
    with fork_server().lend() as (offer, lines):
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=folder,
            env={**environment(), **offer, **variables},
            pass_fds=lines,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    return Answer(done.returncode, done.stdout, done.stderr)


def project(folder: Path, text: str = MODEL, settings: str = "") -> Path:
    """A user's project with one file; gives the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'user'\n{settings}")
    (folder / "model.py").write_text(text)
    return folder / "model.py"
