"""The reasons of the ranker, as users read them."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.policies.feature_names import FEATURES
from mtmc_lsp.policies.features import Featurizer, ranked
from mtmc_lsp.policies.phrases import Subject, reasons
from mtmc_lsp.policies.ranker import stop_reason
from mtmc_lsp.policies.state_features import RegionUnits
from tests.policies.trees import GPU, NODES, action, edge, tree_of

EXPERIENCE = {"fuse, launches, first": (7, 9), "split, launches, first": (1, 2)}


def subject(
    kind: ActionKind = ActionKind.FUSE, *before: tuple[ActionKind, Outcome], region: tuple[str, ...] = NODES
) -> Subject:
    """An action of four operations after some steps on the same version."""
    item = action(kind, region, 12.0, number=9)
    edges = [
        edge("p/0", action(past, number=number), outcome, 0.9 if outcome is Outcome.SLOWER else None)
        for number, (past, outcome) in enumerate(before)
    ]
    tree = tree_of(edges)
    state = tree.state(tree.versions["p/0"], edges, GPU)
    row = Featurizer().rows(state, ranked([item]))[0]
    features = dict(zip(FEATURES, row, strict=True))
    return Subject(item, features, RegionUnits(1, 2, frozenset({"product"})), 120.0, GPU, EXPERIENCE)


@pytest.mark.parametrize(
    ("feature", "given", "phrase"),
    [
        ("action.region_units", subject(), "fuses 3 kernels of 120 us"),
        ("action.region_units", subject(ActionKind.SIDE_BY_SIDE), "launches together 3 kernels of 120 us"),
        ("action.region_product", subject(ActionKind.SPLIT), "its region contains a product"),
        ("action.kind_fuse", subject(), "this kind gained in 7 of 9 similar states"),
        ("action.kind_split", subject(ActionKind.SPLIT), "few states like this one had a split in training"),
        ("history.kind_tried", subject(), "no fusion was tried yet"),
        ("history.kind_slower", subject(ActionKind.FUSE, (ActionKind.FUSE, Outcome.SLOWER)), "an earlier fusion here was not faster"),
        ("history.kind_failed", subject(ActionKind.FUSE, (ActionKind.FUSE, Outcome.WRONG)), "an earlier fusion here failed"),
        ("history.region_tried", subject(), "no step on its operations was tried yet"),
        ("history.region_not_faster", subject(ActionKind.SPLIT, (ActionKind.FUSE, Outcome.SLOWER)), "0 of 1 earlier steps on its operations were faster"),
        ("history.since_gain", subject(ActionKind.SPLIT, (ActionKind.FUSE, Outcome.SLOWER)), "the last step gained nothing"),
        ("schedule.launch_share", subject(), "the call is limited by its launches"),
        ("schedule.kernels", subject(), "the version has 0 kernels and 4 torch calls"),
        ("action.rank", subject(), "the cost model ranks it first"),
        ("action.bytes_saved", subject(), "it moves 1 MB less"),
        ("action.changes_rounding", subject(), "it does not change rounding"),
        ("graph.bytes", subject(), "the graph has 4 operations"),
        ("device.bandwidth", subject(), "the device is NVIDIA H200"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_feature_that_decides_is_a_short_phrase(feature: str, given: Subject, phrase: str) -> None:
    assert reasons(given, {feature: 1.0}) == [phrase]


def test_a_predicted_saving_has_its_share_of_the_call() -> None:
    given = subject()
    share = 100 * 12.0 / 2 ** given.features["schedule.predicted_us"]
    assert reasons(given, {"action.saved_share": 1.0}) == [f"the cost model predicts 12 us less ({share:.0f} %)"]


def test_at_most_three_reasons_are_given_the_strongest_first_and_none_against_the_action() -> None:
    added = {
        "action.kind_fuse": 0.5,
        "action.region_units": 1.0,
        "action.region_share": 0.6,
        "history.kind_tried": 0.4,
        "action.rank": 0.3,
        "schedule.launch_share": -2.0,
        "device.bandwidth": 0.01,
    }
    assert reasons(subject(), added) == [
        "fuses 3 kernels of 120 us",
        "this kind gained in 7 of 9 similar states",
        "no fusion was tried yet",
    ]
    assert reasons(subject(), {"action.rank": -1.0}) == []


def test_stop_says_what_the_ranker_expects_only_where_it_ranks_first() -> None:
    features = {"history.since_gain": 2.0, "history.steps": 3.0}
    assert stop_reason(3, 0, 0.02, features) == (
        "the ranker expects less than 2 % from each of the 3 remaining actions; the last 2 steps gained nothing"
    )
    assert stop_reason(3, 2, 0.02, features) == "2 of the 3 remaining actions rank above the end of the search"
