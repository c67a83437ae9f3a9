"""Trains an ``lm`` policy in a worker process, for some time; the same call again goes on where it ended."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.errors import FailureKind, Location, RequestError, WorkerFailed
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.transitions import Program, Transition, Version
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.programs.splits import Split, split_of
from mtmc_lsp.training.lm.building import build_trees
from mtmc_lsp.training.lm.files import CURVES, POLICY, TREES
from mtmc_lsp.training.lm.messages import AdvanceTrainingRequest, CurvePoint, StartTrainingRequest, TrainingStatus
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import write_trees

LOAD_SECONDS = 900.0
"""Limit for loading the model and the trees; a first use downloads the model."""
SLICE_SECONDS = 30.0
"""Time between two checkpoints."""
UPDATE_SECONDS = 1800.0
"""Limit for one update, which takes long on a CPU."""
CONTINUE = "Run the same command again: it continues from the last checkpoint."


@dataclass(frozen=True)
class LmOptions:
    """What a training is asked for."""

    out: Path
    """The folder of the training; it is created."""
    seconds: float
    """Time for training, without loading the model."""
    parameters: LmParameters
    device: str = ""
    """``cpu`` or ``cuda``; empty for a GPU if there is one."""
    python: str = sys.executable
    """The interpreter with torch, transformers and peft."""


@dataclass(frozen=True)
class TrainedLm:
    """A training after its last update."""

    status: TrainingStatus
    points: tuple[CurvePoint, ...]
    """Of all updates since the beginning."""
    policy: Path
    """The folder to name as ``policy_file``."""

    @property
    def is_complete(self) -> bool:
        """Whether all updates are done."""
        return self.status.update >= self.status.updates


def train_lm(
    options: LmOptions,
    programs: Iterable[Program],
    versions: Iterable[Version],
    transitions: Iterable[Transition],
    *,
    part_of: Callable[[Program], Split] = split_of,
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
) -> TrainedLm:
    """Train on measured transitions for ``options.seconds``.

    Args:
        part_of: the part of a program by its family: train, validation or test.
        on_status: called after each checkpoint.

    Raises:
        RequestError: the data has no tree to train on, the model cannot be loaded, or the folder holds another training.
        EnvironmentNotAble: a package is missing.
        WorkerFailed: the training process crashed.
    """
    trees = build_trees(
        programs, versions, transitions, part_of, tokens=options.parameters.state_tokens, names=options.parameters.names
    )
    if all(tree.is_held_out for tree in trees):
        message = "the data holds no tree of a training family"
        raise RequestError(message, remedy="Collect transitions of more programs with mtmc explore.")
    folder = _folder(options.out)
    write_trees(folder / TREES, trees)
    with Worker(options.python, cwd=str(folder)) as worker:
        start = StartTrainingRequest(str(folder), options.device, options.parameters)
        status = worker.call(start, LOAD_SECONDS)
        on_status(status)
        deadline = time.monotonic() + options.seconds
        is_last = False
        while status.update < status.updates and not is_last:
            left = max(0.0, deadline - time.monotonic())
            is_last = left <= SLICE_SECONDS
            request = AdvanceTrainingRequest(min(SLICE_SECONDS, left), is_last)
            try:
                status = worker.call(request, UPDATE_SECONDS + SLICE_SECONDS)
            except WorkerFailed as error:
                raise _with_remedy(error) from None
            on_status(status)
    return TrainedLm(status, read_curves(folder / CURVES), folder / POLICY)


def read_curves(path: Path) -> tuple[CurvePoint, ...]:
    """The points of all updates so far.

    Raises:
        RequestError: the file is damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ()
    try:
        return tuple(from_json(CurvePoint, json.loads(line)) for line in lines)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"the curves are damaged: {error}", where=Location(str(path)), remedy="Remove the file."
        ) from None


def _folder(path: Path) -> Path:
    folder = path.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot be the folder of a training: {error.strerror}"
        raise RequestError(message, where=Location(str(path)), remedy="Name another folder.") from None
    shutil.rmtree(folder / f"{POLICY}.new", ignore_errors=True)
    return folder


def _with_remedy(error: WorkerFailed) -> WorkerFailed:
    if error.kind is FailureKind.CANCELLED:
        return error
    remedy = f"{error.remedy} {CONTINUE}" if error.remedy and not error.kind.is_out_of_memory else CONTINUE
    if error.kind.is_out_of_memory:
        remedy = f"{CONTINUE} If it happens again, name a smaller model."
    return WorkerFailed(error.message, remedy=remedy, kind=error.kind)
