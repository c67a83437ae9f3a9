"""New small models and cut ones: made from the data, trained, stored in the policy, and read again with the same probabilities."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.policies.lm.client import LmPolicy
from mtmc_lsp.policies.lm.messages import ScoreRequest, Scores
from mtmc_lsp.policies.lm.policy_folder import DESCRIPTION, MODEL, MODEL_FILES, read_description
from mtmc_lsp.policies.lm.worker.language_model import load_base, load_policy
from mtmc_lsp.training.lm.best_paths import examples
from mtmc_lsp.training.lm.messages import Phase
from mtmc_lsp.training.lm.page import summary
from mtmc_lsp.training.lm.parameters import DEFAULT_MODEL, NEW_MODELS, LmParameters, lm_parameters
from mtmc_lsp.training.lm.train import TrainedLm
from mtmc_lsp.training.lm.worker.new_model import new_model
from mtmc_lsp.training.lm.worker.trainer import Trainer
from tests.policies_lm.test_train_command import train
from tests.policies_lm.tiny import model_folder
from tests.policies_lm.trees import parameters, tree


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(**changes: object) -> LmParameters:
    return parameters(model="", new_model="1M", supervised_rate=2e-3, **changes)


SHORT = small(supervised_epochs=1, warmup_updates=1, ppo_updates=1, walks=2, most_steps=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedLm:
    """A training of a new model."""
    return train(tmp_path_factory.mktemp("new") / "lm", SHORT)


@pytest.fixture(scope="module")
def folder(trained: TrainedLm) -> Path:
    """Its policy."""
    return trained.policy


def test_a_new_model_follows_from_the_texts_and_the_seed() -> None:
    trees = [tree("a"), tree("b")]
    first, second = new_model("1M", trees, 3, "cpu"), new_model("1M", trees, 3, "cpu")
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()
    weights = dict(second.causal.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in first.causal.named_parameters())
    other = dict(new_model("1M", trees, 4, "cpu").causal.named_parameters())
    assert any(not torch.equal(weight, other[name]) for name, weight in first.causal.named_parameters())
    # Words of the trees are single tokens, and any other text can still be read.
    text = " compiled, unseen Ωmega: fuse copied tuned."
    assert first.tokenizer.decode(first.encode(text)) == text
    assert len(first.encode("Kernels")) == 1 < len(first.encode("Ωmega"))


@pytest.mark.parametrize("size", list(NEW_MODELS))
def test_the_sizes_are_named_by_their_weights(size: str) -> None:
    model = new_model(size, [tree()], 0, "cpu")
    full = sum(each.numel() for each in model.causal.parameters())
    # A vocabulary of 2,048 tokens, which this tree does not fill.
    full += (2048 - len(model.tokenizer)) * NEW_MODELS[size]
    assert full == pytest.approx(1e6 * int(size.removesuffix("M")), rel=0.2)


def test_a_new_model_learns_the_best_path_from_nothing() -> None:
    training = Trainer([tree()], small(supervised_epochs=20, warmup_updates=0, ppo_updates=0), "cpu")
    points = [training.run(number) for number in range(1, training.updates + 1)]
    assert {point.phase for point in points} == {Phase.SUPERVISED}
    assert points[0].accuracy is not None and points[0].accuracy < 1.0
    assert points[-1].accuracy == 1.0
    known = examples([tree()], small(), with_failures=False)
    logs, _ = training.model.weigh_all([training.model.situation(each.state, each.texts) for each in known])
    assert [values.index(max(values)) for values in logs] == [each.best for each in known]


def test_a_training_of_a_new_model_goes_on_from_its_state() -> None:
    options = small(supervised_epochs=2, warmup_updates=1, ppo_updates=2, walks=4)
    whole = Trainer([tree()], options, "cpu")
    losses = [whole.run(number).loss for number in range(1, whole.updates + 1)]
    first = Trainer([tree()], options, "cpu")
    for number in (1, 2):
        first.run(number)
    second = Trainer([tree()], options, "cpu")
    second.model.restore(first.model.state())
    assert [second.run(number).loss for number in range(3, second.updates + 1)] == losses[2:]


def test_the_policy_contains_its_model_and_needs_no_other(folder: Path) -> None:
    description = read_description(folder)
    assert description.model == "" and {path.name for path in (folder / MODEL).iterdir()} >= set(MODEL_FILES)
    assert str(folder.parent) not in (folder / DESCRIPTION).read_text()
    policy = LmPolicy(folder)
    texts = ("fuse the kernel.", "tune.", "stop, nothing else will pay.")
    try:
        answer = policy.worker.call(ScoreRequest(str(folder), "cpu", "Task: one\nNext:", texts), 300.0)
    finally:
        policy.close()
    assert isinstance(answer, Scores) and sum(answer.probabilities) == pytest.approx(1.0)


def test_a_policy_with_a_new_model_can_be_moved(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    before = load_policy(folder, read_description(folder), "cpu").causal.state_dict()
    after = load_policy(moved, read_description(moved), "cpu").causal.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_missing_files_of_a_new_model_are_told_before_the_run(folder: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "policy"))
    (broken / MODEL / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match=r"the policy has no model/tokenizer\.json"):
        LmPolicy(broken)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("model.safetensors", "damaged", r"cannot load the language model .*model: SafetensorError"),
        ("config.json", '{"model_type": "nope"}', r"cannot load the language model .*model type `nope`"),
        ("tokenizer.json", "{}", "cannot load the language model"),
    ],
)
def test_a_damaged_new_model_is_one_message(folder: Path, tmp_path: Path, file: str, text: str, message: str) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "policy"))
    (broken / MODEL / file).write_text(text)
    with pytest.raises(RequestError, match=message) as caught:
        load_policy(broken, read_description(broken), "cpu")
    assert caught.value.remedy == "Train it again with this version: mtmc train policy --kind lm."


def test_a_cut_model_is_the_base_model_with_fewer_layers() -> None:
    cut, whole = load_base(str(model_folder()), "cpu", layers=1), load_base(str(model_folder()), "cpu")
    assert (len(cut.causal.model.layers), len(whole.causal.model.layers)) == (1, 2)
    ids = torch.tensor([cut.encode("Task: one\nNext:")])
    with torch.no_grad():
        after_one = whole.causal.model(ids, output_hidden_states=True).hidden_states[1]
        expected = whole.causal.model.norm(after_one)
        assert torch.allclose(cut.causal.model(ids).last_hidden_state, expected)


def test_a_training_of_a_cut_model_says_so_and_its_policy_cuts_again(tmp_path: Path) -> None:
    options = parameters(layers=1, supervised_epochs=1, warmup_updates=0, ppo_updates=1, walks=2, most_steps=2)
    trained = train(tmp_path / "lm", options)
    description = read_description(trained.policy)
    assert (description.layers, description.model) == (1, str(model_folder()))
    assert len(load_policy(trained.policy, description, "cpu").causal.model.layers) == 1
    assert summary(trained, options)[0].startswith("Model: the first 1 layers of ")


def test_more_layers_than_there_are_is_one_message() -> None:
    with pytest.raises(RequestError, match=r"the language model .* has 2 layers, so 3 cannot be kept"):
        load_base(str(model_folder()), "cpu", layers=3)


def test_parameters_of_a_command_line() -> None:
    adapter, new = lm_parameters("", seed=1, updates=5), lm_parameters("", new_model="4M", seed=1, updates=5)
    assert (adapter.model, adapter.new_model) == (DEFAULT_MODEL, "") and (new.model, new.new_model) == ("", "4M")
    assert new.supervised_rate > adapter.supervised_rate and new.supervised_epochs > adapter.supervised_epochs
    assert lm_parameters("", new_model="4M", epochs=3) == replace(
        lm_parameters("", new_model="4M"), supervised_epochs=3
    )
    with pytest.raises(RequestError, match=r"--new-model 9M does not exist\n  Choose 1M or 4M or 15M"):
        lm_parameters("", new_model="9M")
    for other in ({"model": "some/model"}, {"model": "", "layers": 2}):
        with pytest.raises(RequestError, match=r"--new-model and --(model|layers) exclude each other\n  Leave out --"):
            lm_parameters(**other, new_model="1M")  # type: ignore[arg-type]


def test_the_summary_names_a_new_model(trained: TrainedLm) -> None:
    assert summary(trained, SHORT)[0].startswith("Model: new, of size 1M, with ")
