"""What a search works with, when it ends, and how it reports progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.protocols import Coder, Measurer, Planner
from mtmc_lsp.core.run import Step
from mtmc_lsp.core.workload import Capture


@dataclass(frozen=True)
class Limits:
    """When a run ends, even if more actions are worth trying."""

    seconds: float = 300.0
    """After this time no new step starts."""
    steps: int = 24


def _ignore(*_: object) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Events:
    """Callbacks for the progress of a run. A step is stored before it is reported."""

    on_action: Callable[[int, MacroAction], None] = _ignore
    """Called with the step's number and its action before the step starts."""
    on_stage: Callable[[str], None] = _ignore
    on_step: Callable[[Step], None] = _ignore
    on_replayed: Callable[[Step], None] = _ignore
    """Called with each step of an earlier run that this run takes over without measuring it again."""
    on_withdrawn: Callable[[Step], None] = _ignore
    """Called with an accepted step that the run rejects at its end."""
    on_retimed: Callable[[Step], None] = _ignore
    """Called with the last accepted step when it was timed against baselines that were not ready before."""
    on_switched: Callable[[Step], None] = _ignore
    """Called with a reported step that joined or left the path to the fastest version of a search with branches, or whose
    verification ended later."""
    on_captured: Callable[[Capture], None] = _ignore
    """Called once, before the first step."""
    on_note: Callable[[str], None] = _ignore
    """Called with each of the run's notes when it becomes known."""


@dataclass(frozen=True)
class SearchComponents:
    """The parts of a search."""

    planner: Planner
    coder: Coder
    measurer: Measurer
    has_gpu: bool
    """Whether steps are timed."""
    limits: Limits
    baseline: str = "eager"
    """What the last version must beat: ``eager``, ``compile`` or ``best``."""
    plans_ahead: bool = False
    """Whether planning and writing are cheap and have no side effects, so that likely trials may begin early."""
