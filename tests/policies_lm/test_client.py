"""The policy as a search uses it: a worker scores, and every failure is one message while the roofline planner goes on."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, RequestError, WorkerFailed
from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.client import LmPolicy, choice_texts, describe, with_stop_margin
from mtmc_lsp.policies.lm.messages import ScoreRequest
from mtmc_lsp.policies.lm.opening import LmPlanner, open_lm
from mtmc_lsp.policies.lm.policy_folder import ADAPTER, DESCRIPTION, read_description
from mtmc_lsp.policies.lm.worker.language_model import load_base
from mtmc_lsp.policies.lm.worker.score_command import score
from mtmc_lsp.policies.lm.worker.scoring import action_log_probabilities, encode_action, read_states
from mtmc_lsp.policies.state_features import version_of
from tests.golden.pairs import FOLDER, Pair
from tests.planning.situations import H200
from tests.policies_lm.tiny import adapted_model, model_folder, write_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("lm") / "policy")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[LmPolicy]:
    one = LmPolicy(folder)
    yield one
    one.close()


def channels_last() -> State:
    pair = Pair(FOLDER / "channels-last")
    capture = pair.stored_capture()
    return State(capture, pair.versions(capture)[0], (), H200, has_gpu=True)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_choices_have_the_probabilities_of_the_model_with_its_adapter(policy: LmPolicy, folder: Path) -> None:
    state = channels_last()
    actions = RooflinePlanner().ranked(state)
    assert len(actions) > 2
    choices = policy.choices(state, actions)
    assert {choice.key for choice in choices} == {*(action.key for action in actions), "stop"}
    assert [c.probability for c in choices] == sorted((c.probability for c in choices), reverse=True)
    assert sum(choice.probability for choice in choices) == pytest.approx(1.0)
    expected = expected_probabilities(state, actions, folder)
    assert {choice.key: choice.probability for choice in choices} == pytest.approx(expected, rel=1e-3, abs=1e-6)


def expected_probabilities(state: State, actions: list[MacroAction], folder: Path) -> dict[str, float]:
    """By the adapted model in this process, without merging the adapter."""
    import torch

    from mtmc_lsp.policies.lm.action_text import STOP_TEXT

    model = adapted_model(folder)
    texts = [encode_action(model, text) for text in (*choice_texts(actions, version_of(state)), STOP_TEXT)]
    description = read_description(folder)
    with torch.no_grad():
        states = read_states(model, [model.encode(describe(state, actions, description))])
        (logs,) = action_log_probabilities(model, states, [texts], description.normalisation)
    return dict(zip((*(action.key for action in actions), "stop"), logs.exp().tolist(), strict=True))


def test_a_reason_tells_margin_and_what_the_model_read(policy: LmPolicy) -> None:
    state = channels_last()
    choices = policy.choices(state, RooflinePlanner().ranked(state))
    assert choices[0].reason.startswith(f"probability {choices[0].probability:.2f} of {len(choices)} choices; next: ")
    assert (
        f"with {choices[1].probability:.2f}; the model read 3 operations, 0 kernels, 0 tried steps" in choices[0].reason
    )
    assert "; first: " in choices[1].reason and f"with {choices[0].probability:.2f};" in choices[1].reason


def test_latency_is_measured_and_a_later_decision_reuses_the_state(policy: LmPolicy) -> None:
    state = channels_last()
    actions = RooflinePlanner().ranked(state)
    policy.choices(state, actions)
    policy.choices(state, actions)
    latency = policy.latency
    assert latency is not None and latency.decisions >= 2
    assert 0 < latency.median_seconds <= latency.longest_seconds and latency.load_seconds > 0
    assert "decisions, median" in latency.text
    last = policy.answers[-1]
    assert last.load_seconds == 0.0 and last.reused_tokens == last.state_tokens - 1


def test_a_crash_is_one_message_and_the_next_decision_works(policy: LmPolicy) -> None:
    state = channels_last()
    actions = RooflinePlanner().ranked(state)
    before = policy.choices(state, actions)
    process = policy.worker._process
    assert process is not None
    os.killpg(process.pid, signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    after = policy.choices(state, actions)
    assert [choice.probability for choice in after] == pytest.approx([choice.probability for choice in before])


def test_a_decision_that_takes_longer_than_the_run_allows_says_so(policy: LmPolicy) -> None:
    state = channels_last()
    actions = RooflinePlanner().ranked(state)
    policy.choices(state, actions)
    with pytest.raises(WorkerFailed) as caught:
        policy.choices(replace(state, deadline=0.0), actions)
    assert str(caught.value) == ("its decision took longer than the run allows\n  Give the run a larger --budget.")
    assert policy.choices(state, actions), "the next decision works"


def test_when_the_policy_fails_the_roofline_planner_goes_on_with_a_note(
    policy: LmPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def crash(*_: object) -> object:
        calls.append(1)
        raise WorkerFailed("the process ended with signal SIGSEGV during policies.lm.score", kind=FailureKind.CRASHED)

    monkeypatch.setattr(policy, "choices", crash)
    notes: list[str] = []
    planner = LmPlanner(RooflinePlanner(), policy, notes.append)
    state = channels_last()
    expected = RooflinePlanner().propose(state)
    assert planner.propose(state) == expected
    assert planner.propose(state) == expected
    weighed = planner.choices(state)
    assert not isinstance(expected, Stop) and weighed[0].key == expected.key
    assert sum(choice.probability for choice in weighed) == pytest.approx(1.0)
    assert notes == [
        "The lm policy is not used, and the roofline planner chooses the steps: "
        "the process ended with signal SIGSEGV during policies.lm.score."
    ]
    assert len(calls) == 1, "it is not tried again"


def test_the_planner_proposes_the_most_probable_action(policy: LmPolicy) -> None:
    state = channels_last()
    choices = [c for c in policy.choices(state, RooflinePlanner().ranked(state)) if c.action is not None]
    proposed = LmPlanner(RooflinePlanner(), policy, pytest.fail).propose(state)
    assert not isinstance(proposed, Stop) and choices[0].action is not None
    assert proposed.key == choices[0].action.key
    assert "The lm policy (" in proposed.rationale


def test_without_a_policy_the_roofline_planner_goes_on_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    for name in ("", str(tmp_path / "absent")):
        planner = open_lm(RooflinePlanner(), name, H200, notes.append)
        assert isinstance(planner, RooflinePlanner)
    assert notes[0].startswith(
        "The lm policy is not used, and the roofline planner chooses the steps: no policy is named."
    )
    assert f"{tmp_path}/absent: there is no policy of kind lm here." in notes[1]
    assert all("mtmc train policy" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "{", "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: json.dumps({**json.loads(text), "normalisation": "none"}), "damaged"),
        (
            lambda text: json.dumps({**json.loads(text), "text_format": 99}),
            "trained with texts of format 99; this version writes 2",
        ),
        (
            lambda text: json.dumps({**json.loads(text), "catalogue": ["fuse", "teleport"]}),
            "trained for other actions than this version has; they differ in .*teleport",
        ),
    ],
)
def test_a_foreign_or_damaged_policy_is_one_message(folder: Path, tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    broken = copied(folder, tmp_path / "policy")
    description = broken / DESCRIPTION
    description.write_text(change(description.read_text()))
    with pytest.raises(RequestError, match=rf"policy\.json: .*{message}"):
        LmPolicy(broken)


def test_a_missing_adapter_is_told_before_the_run(folder: Path, tmp_path: Path) -> None:
    broken = copied(folder, tmp_path / "policy")
    (broken / ADAPTER / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"has no adapter/adapter_model\.safetensors"):
        LmPolicy(broken)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("adapter", RequestError, r"cannot load the adapter .*SafetensorError"),
        ("model", RequestError, r"there is no folder /absent/model"),
        ("file", RequestError, r"there is no model file /absent/model\.gguf"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_message(
    folder: Path, tmp_path: Path, change: str, error: type[Exception], message: str
) -> None:
    broken = copied(folder, tmp_path / "policy")
    description = broken / DESCRIPTION
    if change == "adapter":
        (broken / ADAPTER / "adapter_model.safetensors").write_bytes(b"damaged")
    else:
        name = "/absent/model" if change == "model" else "/absent/model.gguf"
        description.write_text(json.dumps({**json.loads(description.read_text()), "model": name}))
    policy = LmPolicy(broken)
    state = channels_last()
    try:
        with pytest.raises(error, match=message):
            policy.choices(state, RooflinePlanner().ranked(state))
    finally:
        policy.close()


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_one_message_with_its_remedy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    message = f"No module named {package}"
    (tmp_path / f"{package}.py").write_text(f"raise ImportError({message!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    policy = LmPolicy(folder)
    state = channels_last()
    try:
        with pytest.raises(
            EnvironmentNotAble, match=f"the lm policy needs {package}, which .* cannot import"
        ) as caught:
            policy.choices(state, RooflinePlanner().ranked(state))
    finally:
        policy.close()
    assert caught.value.remedy == 'Install them for this interpreter: pip install "mtmc-lsp[learn]"'
    assert sys.executable in caught.value.message


def test_a_folder_can_be_relative_to_the_current_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    policy, state = LmPolicy(Path(folder.name)), channels_last()
    try:
        assert policy.choices(state, RooflinePlanner().ranked(state))
    finally:
        policy.close()


def _adapter(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import load_file, save_file

    path = folder / ADAPTER / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda weights: {name: weight * float("nan") for name, weight in weights.items()}, id="not numbers"
        ),
        pytest.param(
            lambda weights: {name.replace("layers", "blocks"): each for name, each in weights.items()},
            id="of another model",
        ),
        pytest.param(lambda weights: dict(list(weights.items())[::2]), id="half missing"),
    ],
)
def test_weights_that_load_but_are_not_those_of_the_training_are_refused(folder: Path, tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    """peft warns of missing weights and leaves the adapter without effect."""
    broken = copied(folder, tmp_path / "policy")
    _adapter(broken, change)
    with pytest.raises(
        RequestError, match=r"policy: the model of the policy does not give the probabilities that it had"
    ):
        score_here(broken)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A small model is read with one thread, also in this process."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def score_here(folder: Path) -> tuple[float, ...]:
    """Score in this process: a worker takes seconds to start."""
    return score(ScoreRequest(str(folder), "cpu", "Task: one\nNext:", ("fuse.", "tune."))).probabilities


def test_a_base_model_that_was_replaced_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = Path(shutil.copytree(model_folder(), tmp_path / "model"))
    weights = other / "model.safetensors"
    save_file({name: -each for name, each in load_file(weights).items()}, weights, {"format": "pt"})
    broken = copied(folder, tmp_path / "policy")
    description = broken / DESCRIPTION
    description.write_text(json.dumps({**json.loads(description.read_text()), "model": str(other)}))
    assert sum(score_here(folder)) == pytest.approx(1.0)
    with pytest.raises(RequestError, match=r"base model are damaged or were replaced\n  Train it again"):
        score_here(broken)


@pytest.mark.parametrize("change", [{"layers": -1}, {"state_tokens": 0}])
def test_a_number_of_the_description_that_is_out_of_range_is_told(
    folder: Path, tmp_path: Path, change: dict[str, int]
) -> None:
    broken = copied(folder, tmp_path / "policy")
    description = broken / DESCRIPTION
    description.write_text(json.dumps({**json.loads(description.read_text()), **change}))
    with pytest.raises(RequestError, match="it is damaged \\(a number is out of range\\)"):
        LmPolicy(broken)


def test_a_file_in_place_of_the_folder_is_named_as_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "ranker.policy"
    file.write_bytes(b"\x1f\x8b")
    with pytest.raises(RequestError, match=r"ranker\.policy: there is no policy of kind lm here\n  Name the folder"):
        LmPolicy(file)


def test_a_gguf_file_without_its_package_names_the_package(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def missing(*_: object, **__: object) -> object:
        raise ImportError("Please install torch and gguf>=0.10.0 to load a GGUF checkpoint in PyTorch.")

    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(EnvironmentNotAble, match=r"model\.gguf needs another package: ImportError: Please") as caught:
        load_base(str(tmp_path / "model.gguf"), "cpu")
    assert caught.value.remedy == "Install it for this interpreter: pip install gguf"


def test_a_margin_makes_stop_less_probable_and_keeps_the_sum() -> None:
    assert with_stop_margin((0.2, 0.2, 0.6), 0.0) == [0.2, 0.2, 0.6]
    changed = with_stop_margin((0.2, 0.2, 0.6), math.log(3.0))
    assert changed == pytest.approx([1 / 3, 1 / 3, 1 / 3])
