"""``mtmc train policy --kind lm``: one command trains, a second one goes on, and the result is a policy that a search can use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.policies.lm.policy_folder import read_description
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.lm.messages import CurvePoint, Phase
from mtmc_lsp.training.lm.page import page, summary
from mtmc_lsp.training.lm.parameters import Ablation, LmParameters, ablation_of
from mtmc_lsp.training.lm.train import LmOptions, TrainedLm, train_lm
from mtmc_lsp.training.lm.worker.checkpoint import CHECKPOINT
from tests.policies.trees import learnable_tree
from tests.policies_lm.trees import parameters

DATA = learnable_tree(3)


def train(folder: Path, options: LmParameters, seconds: float = 600.0, **changes: object) -> TrainedLm:
    transitions = [item for several in DATA.transitions.values() for item in several]
    return train_lm(
        LmOptions(folder, seconds, options, "cpu"),
        DATA.programs.values(),
        DATA.versions.values(),
        transitions,
        part_of=lambda program: Split.TRAIN,
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def options() -> LmParameters:
    return parameters(supervised_epochs=1, supervised_batch=4, warmup_updates=1, ppo_updates=2, walks=2, most_steps=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, options: LmParameters) -> TrainedLm:
    return train(tmp_path_factory.mktemp("whole") / "new", options)


def _floats(point: CurvePoint) -> dict[str, float]:
    """The numbers of an update, without those that its phase does not have."""
    values = {
        name: value for name, value in vars(point).items() if name not in ("phase", "seconds") and value is not None
    }
    return {**values, "phase": list(Phase).index(point.phase)}


def test_a_training_writes_a_policy_curves_and_a_page(whole: TrainedLm, options: LmParameters) -> None:
    assert whole.is_complete
    assert [point.update for point in whole.points] == list(range(1, whole.status.updates + 1))
    description = read_description(whole.policy)
    assert description.model == options.model and description.devices == ("NVIDIA H200",)
    facts = summary(whole, options)
    assert any(fact.startswith("Data: 3 trees, ") for fact in facts)
    assert "No family is held out in this data, so nothing is known about other programs" in facts
    drawn = page(whole, options)
    assert set(drawn.charts) >= {"reward", "entropy", "kl", "value"}
    assert all(f'<figure id="{name}">' in drawn.body for name in drawn.charts)


def test_a_training_that_was_interrupted_goes_on(whole: TrainedLm, options: LmParameters, tmp_path: Path) -> None:
    """In one process with one thread it is identical (test_training.py); other processes round sums differently."""
    first = train(tmp_path, options, 0.01)
    assert first.status.update == 1 and not first.is_complete
    # As a kill in the middle of an update would leave it.
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"update": 99')
    trained = train(tmp_path, options)
    assert trained.is_complete
    for point, expected in zip(trained.points, whole.points, strict=True):
        assert _floats(point) == pytest.approx(_floats(expected), rel=1e-3, abs=1e-4)


def test_a_folder_with_another_training_is_refused(whole: TrainedLm, options: LmParameters) -> None:
    with pytest.raises(RequestError, match="holds a training with another model, data or other parameters"):
        train(whole.policy.parent, replace(options, seed=5))


def test_a_damaged_checkpoint_is_one_message(options: LmParameters, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"damaged")
    with pytest.raises(RequestError, match=r"checkpoint\.pt: the checkpoint is damaged"):
        train(tmp_path, options)


def test_data_without_training_families_is_refused(options: LmParameters, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the data holds no tree of a training family"):
        train_lm(LmOptions(tmp_path, 1.0, options), [], [], [])


def test_names_of_ablations_are_checked() -> None:
    assert ablation_of(("history", "device"), 0.5) == Ablation(history=False, hardware=False, data=0.5)
    assert ablation_of(("compile-reward", "supervised"), 1.0) == Ablation(staged_rewards=False, supervised=False)
    with pytest.raises(RequestError, match=r"--without colour does not exist\n  Choose from history, device"):
        ablation_of(("colour",), 1.0)
    with pytest.raises(RequestError, match="--share 0 is not a share"):
        ablation_of((), 0.0)


def test_the_command_trains_on_a_store_of_transitions(
    tmp_path: Path, options: LmParameters, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtmc_lsp.commands.learning.train import policy
    from mtmc_lsp.explore.parquet import Writer
    from mtmc_lsp.training.lm import train as module

    with Writer(tmp_path / "data") as writer:
        for program in DATA.programs.values():
            writer.add_program(program)
        for version in DATA.versions.values():
            writer.add_version(version)
        for several in DATA.transitions.values():
            for item in several:
                writer.add_transition(item)
    # Otherwise the hash of the family's name decides.
    monkeypatch.setitem(module.train_lm.__kwdefaults__, "part_of", lambda program: Split.TRAIN)
    out = tmp_path / "out"
    code = policy(
        tmp_path / "data", out, "lm", seconds=0.1, without="supervised", model=options.model, updates=1, as_json=False
    )
    text = capsys.readouterr().out
    assert code == 0
    assert "Updates: 1 of 9" in text and "The training is not complete. Run the same command again" in text
    assert json.loads((out / "curves.jsonl").read_text())["phase"] == "value warm-up"
    assert (out / "policy" / "policy.json").is_file() and f"written: {out / 'policy'}" in text
