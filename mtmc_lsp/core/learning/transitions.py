"""The tree of optimisation trials that policies learn from: programs, versions and measured transitions.

QiMeng-Kernel (arXiv 2511.20100) trains its policy on such a tree, so that training needs no coder and no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.workload import Capture


class Outcome(Enum):
    """What came of an action on a version, the furthest stage that it reached."""

    NOT_LEGAL = "not-legal"
    """The coder cannot write it, or it changes nothing."""
    COMPILE_ERROR = "compile-error"
    WRONG = "wrong"
    """The results differ, or the call raises."""
    CORRECT = "correct"
    """Correct, not timed: there is no GPU."""
    SLOWER = "slower"
    """Timed, and not faster than the version before beyond noise."""
    FASTER = "faster"
    OUT_OF_TIME = "out-of-time"
    """A stage ran into its limit of time or memory."""


@dataclass(frozen=True)
class Program:
    """A PyTorch program as captured."""

    id: str
    """Hash of the graph and the workload."""
    name: str
    family: str
    """Training and test sets are split by family: ``norm``, ``attention``, a repository of the public suite."""
    origin: str
    """``generated``, or the name of the suite."""
    capture: Capture
    """Contains no source text."""
    source: str = ""
    """The text of the file if we generated it; empty for the code of others."""


@dataclass(frozen=True)
class Version:
    """A node: a version of a program."""

    id: str
    """Hash of the program's id and the schedule."""
    program: str
    parent: str
    """Id of the version that it was first reached from; empty for the user's code."""
    action: str
    """Key of the action that it was first reached by; empty for the user's code."""
    depth: int
    """Number of actions since the user's code."""
    schedule: Mapping[str, object]
    """The coder's state as JSON."""
    median_us: float | None = None
    """Microseconds a call; None if it was not timed."""
    predicted_us: float | None = None
    """By the cost model of the device."""


@dataclass(frozen=True)
class Transition:
    """An edge: an action tried on a version."""

    program: str
    version: str
    """Id of the version that the action changes."""
    action: Mapping[str, object]
    """The :class:`~mtmc_lsp.core.action.MacroAction` as JSON."""
    key: str
    """The action's key."""
    rank: int
    """Position in the roofline planner's order, from 0; -1 if that planner did not list the action."""
    chosen_by: str
    """``roofline``, ``runner-up``, ``random``, or ``variant`` for one configuration of an action that measures several."""
    outcome: Outcome
    result: str
    """Id of the version that it leads to; empty if no version was written."""
    before_us: float | None
    """Median microseconds of ``version`` in the same measurement."""
    after_us: float | None
    ratio: float | None
    """Speedup over ``version``; None if it was not timed."""
    ratio_error: float | None
    """Standard error of ``ratio``."""
    seconds: float
    """Wall time of all stages of the trial."""
    detail: str
    """First line of the failure's reason; empty if there was none. Contains no code and no path."""
    device: str
    """Name of the GPU that it was tried on; empty without a GPU."""
    environment: str
    """Versions of torch, triton and mtmc-lsp with its commit: ``torch 2.11.0, triton 3.6.0, mtmc 0.5.0 (abc1234)``."""
