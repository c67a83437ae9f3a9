"""The predictions of the cost model as words."""

from __future__ import annotations

import math

import pytest

from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.client import choice_texts
from mtmc_lsp.policies.lm.numbers import (
    ActionNumbers,
    choices_text,
    numbered_texts,
    percent,
    power_of_two,
    version_text,
)
from mtmc_lsp.policies.lm.prompt import estimated_tokens
from mtmc_lsp.policies.state_features import version_of
from tests.golden.pairs import FOLDER, Pair, pairs
from tests.planning.situations import H200


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.452, "45%"),
        (0.034, "3%"),
        (0.0, "0%"),
        (-0.27, "-25%"),
        (9.0, "400%"),
        (None, "unknown"),
        (math.nan, "unknown"),
    ],
)
def test_percentages_are_rounded_coarsely(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(("value", "text"), [(100.0, "128"), (1.0, "1"), (0.3, "0.25"), (0.0, "0"), (math.inf, "0")])
def test_sizes_are_the_nearest_powers_of_two(value: float, text: str) -> None:
    assert power_of_two(value) == text


def test_a_choice_tells_its_rank_its_saving_and_its_traffic() -> None:
    numbers = [ActionNumbers(40.0, 0.5, None, 3), ActionNumbers(10.0, None, 0.25, 20), None]
    assert numbered_texts(["fuse a, b.", "split c.", "stop."], numbers, 80.0) == [
        "rank 1 saves 50% of best 100% bytes 50% launches 3: fuse a, b.",
        "rank 2 saves 10% of best 25% operations 25% launches 16: split c.",
        "stop.",
    ]
    assert choices_text(numbers, 80.0) == "Choices: 3, best saves 50%"
    assert choices_text([None], 80.0) == "Choices: 1"
    assert choices_text(numbers * 10, 80.0) == "Choices: 9, best saves 50%", "as in the largest measured versions"
    assert "saves unknown" in numbered_texts(["a."], numbers[:1], 0.0)[0], "the time of the version is not known"


def test_numbers_of_real_actions_follow_the_cost_model_and_keep_texts_short_and_different() -> None:
    for pair in pairs():
        capture = pair.stored_capture()
        for candidate in pair.versions(capture):
            state = State(capture, candidate, (), H200, has_gpu=True)
            actions, version = RooflinePlanner().ranked(state), version_of(state)
            texts = choice_texts(actions, version)
            assert len(set(texts)) == len(texts)
            for rank, (action, text) in enumerate(zip(actions, texts, strict=True), 1):
                saved = percent(action.expected.saved_us / version.predicted_us)
                assert text.startswith(f"rank {min(rank, 9)} saves {saved} of best ")
                assert estimated_tokens(text) < 90


def test_a_version_tells_its_predicted_time_and_what_limits_it() -> None:
    pair = Pair(FOLDER / "autotune")
    capture = pair.stored_capture()
    version = version_of(State(capture, pair.versions(capture)[0], (), H200, has_gpu=True))
    text = version_text(version)
    assert text.startswith(f"Predicted: {power_of_two(version.predicted_us)} us, launches ")
    assert ", memory " in text and ", arithmetic " in text
