"""The features of a decision."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest

from mtmc_lsp.core.action import GRAPH_KINDS, ActionKind
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.protocols import State
from mtmc_lsp.policies.feature_names import FEATURE_VERSION, FEATURES, GROUPS, features_without
from mtmc_lsp.policies.features import Featurizer, ranked
from mtmc_lsp.policies.history import outcome_of
from mtmc_lsp.policies.phrases import KIND_WORDS, PHRASES, topic_of
from mtmc_lsp.policies.state_features import OPERATION_CLASSES, operation_class
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.tuning.schedule_cost import schedule_cost
from tests.golden.pairs import pairs
from tests.planning.situations import H200, schedule_of
from tests.policies.trees import GPU, NODES, action, edge, tree_of

DIGESTS = {1: "84269d23c254289d"}
"""Of the names, by the version of the features."""


def rows(state: State, *actions: object) -> list[dict[str, float]]:
    listed = Featurizer().rows(state, ranked(actions))  # type: ignore[arg-type]
    return [dict(zip(FEATURES, row, strict=True)) for row in listed]


def state_after(*edges: tuple[str, Outcome, float | None, str]) -> State:
    """A state after transitions from each to the next version."""
    source, made = "p/0", []
    for number, (kind, outcome, ratio, result) in enumerate(edges):
        item = action(ActionKind(kind), saved_us=9.0, number=number)
        made.append(edge(source, item, outcome, ratio, result=result))
        source = result if outcome is Outcome.FASTER else source
    tree = tree_of(made)
    return tree.state(tree.versions[source], made, GPU)


def test_names_are_stable_and_belong_to_a_group_and_a_phrase() -> None:
    assert len(FEATURES) == len(set(FEATURES))
    digest = hashlib.sha256(" ".join(FEATURES).encode()).hexdigest()[:16]
    assert DIGESTS[FEATURE_VERSION] == digest, "another list of features needs another version"
    assert {name.partition(".")[0] for name in FEATURES} == set(GROUPS)
    assert {topic_of(name) for name in FEATURES} == set(PHRASES)
    assert set(KIND_WORDS) == set(GRAPH_KINDS)
    assert not [name for name in features_without("history", "device") if name.startswith(("history.", "device."))]


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.name)
def test_every_feature_is_a_number_where_it_has_to_exist(pair) -> None:
    capture = pair.stored_capture()
    for version in pair.versions(capture):
        nodes = tuple(node.name for node in capture.graph.nodes)
        first, stop = rows(State(capture, version, (), H200, True), action(region=nodes))
        missing = {name for name, value in first.items() if math.isnan(value)}
        assert missing <= {
            *("schedule.nodes_per_kernel", "history.last_outcome", "history.last_ratio", "history.kind_last_ratio"),
            "history.measured_to_predicted",
        }
        assert stop["action.is_stop"] == 1.0 and first["action.is_stop"] == 0.0
        assert math.isnan(stop["action.saved_us"]) and math.isnan(stop["history.kind_tried"])
        assert not [name for name, value in first.items() if math.isinf(value)]
        schedule = schedule_of(version)
        cost = schedule_cost(ir_of(capture.graph, schedule), schedule, H200)
        assert 2 ** first["schedule.predicted_us"] == pytest.approx(cost.us)


def test_operations_have_the_class_that_their_name_says() -> None:
    classes = {
        "addmm": "product", "bmm": "product", "convolution": "convolution", "_softmax": "softmax", "sum": "reduction",
        "native_layer_norm": "normalisation", "max_pool2d_with_indices": "pooling", "view": "view", "lstm": "recurrent",
        "cumsum": "scan", "gather": "index", "native_dropout": "random", "relu_": "pointwise", "mul": "pointwise",
        "_scaled_dot_product_flash_attention": "attention", "_unsafe_view": "view", "t": "view",
    }  # fmt: skip
    assert {name: operation_class(name) for name in classes} == classes
    assert set(classes.values()) == set(OPERATION_CLASSES)


def test_the_history_of_a_kind_counts_its_steps_alone() -> None:
    state = state_after(
        ("fuse", Outcome.FASTER, 1.5, "p/1"),
        ("autotune", Outcome.SLOWER, 0.9, ""),
        ("autotune", Outcome.WRONG, None, ""),
    )
    fuse, tune, _ = rows(state, action(ActionKind.FUSE), action(ActionKind.AUTOTUNE))
    assert (fuse["history.kind_tried"], fuse["history.kind_faster"]) == (1.0, 1.0)
    assert [tune[f"history.kind_{name}"] for name in ("tried", "faster", "slower", "failed")] == [2.0, 0.0, 1.0, 1.0]
    assert fuse["history.kind_last_ratio"] == pytest.approx(math.log2(1.5))
    assert [fuse[f"history.{name}"] for name in ("steps", "faster", "slower", "failed", "since_gain")] == [
        3,
        1,
        1,
        1,
        2,
    ]
    assert fuse["history.total_speedup"] == pytest.approx(math.log2(1.5))
    assert math.isnan(fuse["history.last_ratio"])


def test_a_measured_time_is_compared_with_the_prediction() -> None:
    state = state_after(("fuse", Outcome.FASTER, 1.5, "p/1"))
    (row, _) = rows(state, action())
    predicted = 2 ** row["schedule.predicted_us"]
    assert 2 ** row["history.measured_to_predicted"] == pytest.approx(100.0 / 1.5 / predicted)


def test_savings_are_relative_to_the_call_and_to_the_best_action() -> None:
    state = state_after()
    first, second, stop = rows(state, action(saved_us=8.0), action(saved_us=2.0, number=1))
    predicted = 2 ** first["schedule.predicted_us"]
    assert first["action.saved_share"] == pytest.approx(8.0 / predicted)
    assert (first["action.saved_of_best"], second["action.saved_of_best"]) == (1.0, 0.25)
    assert stop["action.best_saved_share"] == pytest.approx(8.0 / predicted)
    assert (first["action.rank"], second["action.rank"]) == (0.0, 1.0)


def test_a_region_counts_the_launches_that_it_would_merge() -> None:
    pair = next(item for item in pairs() if item.name == "fuse")
    capture = pair.stored_capture()
    before, after = pair.versions(capture)[0], pair.versions(capture)[-1]
    nodes = tuple(node.name for node in capture.graph.nodes)
    (unfused, _), (fused, _) = (
        rows(State(capture, version, (), H200, True), action(region=nodes)) for version in (before, after)
    )
    assert unfused["action.region_kernels"] == 0.0 and unfused["action.region_units"] == math.log2(1 + len(nodes))
    assert fused["action.region_kernels"] == fused["action.region_units"] == 1.0
    assert unfused["schedule.torch_calls"] == math.log2(1 + len(nodes)) and fused["schedule.torch_calls"] == 0.0


def test_features_are_a_pure_function_of_the_state() -> None:
    state = state_after(("fuse", Outcome.FASTER, 1.5, "p/1"))
    shared = Featurizer()
    first = shared.rows(state, ranked([action()]))
    other = state_after(("fuse", Outcome.SLOWER, 0.9, ""))
    assert str(shared.rows(other, ranked([action()]))) != str(first)
    assert str(shared.rows(state, ranked([action()]))) == str(first)
    slow = replace(state, device=replace(state.device, bandwidth=state.device.bandwidth / 2))
    changed = dict(zip(FEATURES, shared.rows(slow, ranked([action()]))[0], strict=True))
    before = dict(zip(FEATURES, first[0], strict=True))
    assert changed["device.bandwidth"] == before["device.bandwidth"] / 2
    assert changed["schedule.predicted_us"] > before["schedule.predicted_us"]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_stored_transition_has_its_outcome_as_a_step_too(outcome: Outcome) -> None:
    ratio = {Outcome.FASTER: 1.4, Outcome.SLOWER: 0.9}.get(outcome)
    made = edge("p/0", action(region=NODES[:1]), outcome, ratio, result="" if outcome is Outcome.NOT_LEGAL else "p/1")
    tree = tree_of([made])
    (step,) = tree.state(tree.versions["p/0"], [made], GPU).history
    assert outcome_of(step) is outcome
