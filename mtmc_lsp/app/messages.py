"""What ``worker/probe.py`` prints for ``mtmc doctor``, one JSON object for each of its modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WORKS = "works"
"""The result of a test that passed; else the result says what is wrong."""


@dataclass(frozen=True)
class InterpreterProbe:
    """With ``--interpret``."""

    interpreter: str
    """Result of running a kernel by Triton's interpreter."""


@dataclass(frozen=True)
class CompilerProbe:
    """Without arguments."""

    compilers: Mapping[str, str]
    """For each architecture the result of compiling a kernel."""
    gpu: str
    """Name of the CUDA GPU; empty without one."""


@dataclass(frozen=True)
class SandboxProbe:
    """With ``--sandbox``."""

    level: str
    """The sandbox that the process entered, in words."""
    cuda: str
    """Result of running a kernel on the GPU in that sandbox."""
