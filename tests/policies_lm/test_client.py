"""The policy as a search uses it: a worker scores, and every failure is one message while the roofline planner goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, RequestError, WorkerFailed
from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.client import LmPolicy, describe
from mtmc_lsp.policies.lm.opening import LmPlanner, open_lm
from mtmc_lsp.policies.lm.policy_folder import ADAPTER, DESCRIPTION, read_description
from mtmc_lsp.policies.lm.worker.scoring import action_log_probabilities, encode_action, read_states
from tests.golden.pairs import FOLDER, Pair
from tests.planning.situations import H200
from tests.policies_lm.tiny import adapted_model, write_policy


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

    from mtmc_lsp.policies.lm.action_text import STOP_TEXT, action_texts

    model = adapted_model(folder)
    texts = [encode_action(model, text) for text in (*action_texts(actions), STOP_TEXT)]
    description = read_description(folder)
    with torch.no_grad():
        states = read_states(model, [model.encode(describe(state, description))])
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
    policy.choices(state, actions[:2])
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
    assert f"{tmp_path}/absent/policy.json: there is no policy of kind lm here." in notes[1]
    assert all("mtmc train policy" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "{", "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: json.dumps({**json.loads(text), "normalisation": "none"}), "damaged"),
        (
            lambda text: json.dumps({**json.loads(text), "text_format": 99}),
            "trained with texts of format 99; this version writes 1",
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
