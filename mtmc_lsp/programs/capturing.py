"""Captures many targets quickly, with one worker for all of them.

A new worker prepares torch's export for seconds at its first capture. The programs are therefore trusted not to disturb each
other; after an error the next program gets a new worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.pipeline import CAPTURE_SECONDS, Pipeline
from mtmc_lsp.app.regions.capture import workload_of
from mtmc_lsp.app.target_file import OpenTarget, Request, open_target
from mtmc_lsp.capture.client import run_capture
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.worker_process import Worker

ARCHS = ("sm_90",)
"""The actions are planned for this architecture, without a GPU."""


@dataclass(frozen=True)
class CapturedProblem:
    """What the capture of a problem gave."""

    problem: Problem
    captures: tuple[Capture, ...]
    """The whole target, or its regions; empty if nothing was captured."""
    actions: int
    """Number of first actions that the roofline planner proposes."""
    error: str
    """Why the whole target was not captured; empty if it was."""


def capture_problems(problems: Iterable[Problem], python: str) -> Iterator[CapturedProblem]:
    """Capture and plan each problem: the whole target, or else its regions."""
    worker: Worker | None = None
    try:
        for problem in problems:
            captures: tuple[Capture, ...] = ()
            actions, error = 0, ""
            try:
                target = open_target(Request(problem.path, problem.target, Settings(), python))
                worker = worker or Worker(python, cwd=str(target.project), env={})
                captures = (run_capture(workload_of(target), target.plain, worker, CAPTURE_SECONDS),)
                actions = _first_actions(captures[0], target)
            except MtmcError as failure:
                error = " ".join(failure.message.split())
                if worker is not None:
                    worker.close()
                    worker = None
                captures = _regions(problem, python)
            yield CapturedProblem(problem, captures, actions, error)
    finally:
        if worker is not None:
            worker.close()


def _first_actions(capture: Capture, target: OpenTarget) -> int:
    root = BuiltinCoder().start(capture, target.plain.decode())
    state = State(capture, root, (), planning_model(ARCHS), has_gpu=False)
    return len(RooflinePlanner.of(target.settings).ranked(state))


def _regions(problem: Problem, python: str) -> tuple[Capture, ...]:
    with suppress(MtmcError):
        target = open_target(Request(problem.path, problem.target, Settings(), python))
        with Pipeline(target) as pipeline:
            return pipeline.captures()
    return ()
