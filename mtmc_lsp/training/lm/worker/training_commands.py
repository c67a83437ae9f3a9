"""The commands of a training: start or resume, and advance."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.policies.lm.policy_folder import LmPolicyDescription, write_description
from mtmc_lsp.policies.lm.worker.scoring import probe
from mtmc_lsp.training.lm.files import CURVES, POLICY, TREES
from mtmc_lsp.training.lm.messages import (
    AdvanceTrainingRequest,
    CurvePoint,
    StartTrainingRequest,
    TrainingStatus,
)
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import read_trees
from mtmc_lsp.training.lm.worker.checkpoint import load_checkpoint, replace_folder, save_checkpoint
from mtmc_lsp.training.lm.worker.trainer import Trainer


@dataclass
class _Training:
    folder: Path
    parameters: LmParameters
    identity: str
    """Parameters and data as text, which a checkpoint must share."""
    trainer: Trainer
    gpus: tuple[str, ...]
    update: int = 0
    stop_margin: float = 0.0

    def status(self, points: tuple[CurvePoint, ...] = ()) -> TrainingStatus:
        trainer = self.trainer
        weights = sum(each.numel() for each in trainer.model.trained.values())
        counts = (len(trainer.trees), len(trainer.held_out), len(trainer.examples), weights)
        return TrainingStatus(
            self.update, trainer.updates, *counts, str(trainer.model.language_model.device.type), points
        )


_training: _Training | None = None


def start_training(request: StartTrainingRequest) -> TrainingStatus:
    """Load everything; continue from the checkpoint if there is one."""
    global _training
    folder = Path(request.folder)
    trees = read_trees(folder / TREES)
    data = hashlib.sha256((folder / TREES).read_bytes()).hexdigest()
    identity = json.dumps([to_json(request.parameters), data])
    stored = load_checkpoint(folder, identity)
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(trees, request.parameters, device)
    gpus = tuple(sorted({tree.gpu for tree in trees if tree.gpu}))
    _training = _Training(folder, request.parameters, identity, trainer, gpus)
    if stored is not None:
        trainer.model.restore(stored)
        _training.update = stored["update"]
    _cut_curves(folder / CURVES, _training.update)
    return _training.status()


def advance_training(request: AdvanceTrainingRequest) -> TrainingStatus:
    """Do updates until the time is over, then write the checkpoint and the policy."""
    training = _training
    if training is None:
        # The process ended between two requests and was started again, so the model is gone.
        raise WorkerFailed("the training process ended", kind=FailureKind.CRASHED)
    deadline = time.monotonic() + request.seconds
    points: list[CurvePoint] = []
    while training.update < training.trainer.updates and (not points or time.monotonic() < deadline):
        point = training.trainer.run(training.update + 1)
        training.update += 1
        points.append(point)
        with (training.folder / CURVES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(point)) + "\n")
    if points:
        state = training.trainer.model.state()
        if request.is_last or training.update == training.trainer.updates:
            training.stop_margin = training.trainer.stop_margin()
        save_checkpoint(training.folder, {"update": training.update, "parameters": training.identity, **state})
        _export(training)
    return training.status(tuple(points))


def _export(training: _Training) -> None:
    """Write the policy as it is now."""
    parameters = training.parameters
    new = training.folder / f"{POLICY}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    training.trainer.model.save(new)
    description = LmPolicyDescription(
        "" if parameters.new_model else parameters.model,
        parameters.layers,
        parameters.normalisation,
        parameters.ablation.history,
        parameters.ablation.hardware,
        parameters.state_tokens,
        probe=probe(training.trainer.model.language_model),
        devices=training.gpus,
        names=parameters.names,
        stop_margin=training.stop_margin,
    )
    write_description(new, description)
    replace_folder(new, training.folder / POLICY)


def _cut_curves(path: Path, updates: int) -> None:
    """Drop the points after the checkpoint, whose updates are done again, and a line that a killed process left incomplete."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()[:updates]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
