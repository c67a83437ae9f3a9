"""The reasons of the ranker in words: the features that raise an action above the others, as short phrases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.policies.experience import Experience, experience_key, limit_of
from mtmc_lsp.policies.state_features import RegionUnits

MOST_PHRASES = 3
LEAST_SHARE = 0.1
"""A feature is a reason if it has at least this share of everything that speaks for the action."""
LEAST_TRIES = 3
"""Fewer tries in similar states are not evidence."""
KIND_WORDS: Mapping[ActionKind, str] = {
    ActionKind.FUSE: "fusion",
    ActionKind.TENSOR_CORE: "tensor-core product",
    ActionKind.SPLIT: "split",
    ActionKind.PARALLEL_SCAN: "parallel scan",
    ActionKind.CHUNK_PRODUCTS: "products of chunks",
    ActionKind.SIDE_BY_SIDE: "shared launch",
    ActionKind.ALGEBRA: "algebraic rewrite",
    ActionKind.CHANNELS_LAST: "change to channels last",
    ActionKind.FP16_OPERANDS: "change to 16-bit operands",
    ActionKind.IM2WIN: "im2win rewrite",
    ActionKind.LIBRARY: "library call",
    ActionKind.RECOMPUTE: "recomputation",
    ActionKind.CHUNK_ROWS: "loop over chunks of rows",
    ActionKind.RECOMPUTE_ATTENTION: "recomputation of an attention",
    ActionKind.CUDA_GRAPH: "CUDA graph",
    ActionKind.AUTOTUNE: "tuning",
}
"""A noun for each kind of action."""
LIMIT_WORDS = {
    "launches": "the call is limited by its launches",
    "memory": "the call is limited by memory bandwidth",
    "arithmetic": "the call is limited by arithmetic",
}


@dataclass(frozen=True)
class Subject:
    """An action and what is known about it."""

    action: MacroAction
    features: Mapping[str, float]
    units: RegionUnits
    units_us: float
    """Predicted time of the kernels and torch calls that compute its region now."""
    device: str
    experience: Experience


def reasons(subject: Subject, contributions: Mapping[str, float]) -> list[str]:
    """The strongest reasons for an action, at most three.

    Args:
        contributions: by feature, how much more it adds to the action's score than to the average choice's score.
    """
    by_topic: dict[str, float] = {}
    for name, value in contributions.items():
        topic = topic_of(name)
        by_topic[topic] = by_topic.get(topic, 0.0) + value
    positive = sum(value for value in by_topic.values() if value > 0)
    phrases: list[str] = []
    for topic, value in sorted(by_topic.items(), key=lambda item: (-item[1], item[0])):
        if value <= 0 or value < LEAST_SHARE * positive or len(phrases) == MOST_PHRASES:
            break
        phrase = PHRASES[topic](subject)
        if phrase and phrase not in phrases:
            phrases.append(phrase)
    return phrases


def topic_of(feature: str) -> str:
    """What a feature is about; its phrase is in :data:`PHRASES`."""
    if feature in TOPICS:
        return TOPICS[feature]
    group, _, name = feature.partition(".")
    if group == "action":
        return "region" if name.startswith("region") else "kind" if name.startswith("kind") else "saving"
    if group == "history":
        return "kind history" if name.startswith("kind") else "region history" if name.startswith("region") else group
    return group


TOPICS = {
    "action.is_stop": "kind",
    "action.rank": "rank",
    "action.sites": "region",
    "action.variants": "variants",
    "action.changes_rounding": "rounding",
    "action.bytes_saved": "traffic",
    "action.bytes_ratio": "traffic",
    "action.flops_ratio": "traffic",
    "schedule.launches": "limit",
    "schedule.launch_share": "limit",
    "schedule.memory_share": "limit",
    "schedule.arithmetic_share": "limit",
}


def saving_phrase(action: MacroAction) -> str:
    """What the cost model predicts for an action."""
    saved_us = action.expected.saved_us
    return f"the cost model predicts {saved_us:.3g} us less" if saved_us > 0 else "the cost model predicts no saving"


def _saving(subject: Subject) -> str:
    saved_us = subject.action.expected.saved_us
    share = subject.features["action.saved_share"]
    if saved_us <= 0:
        return ""
    return saving_phrase(subject.action) + (f" ({100 * share:.0f} %)" if share >= 0.01 else "")


def _traffic(subject: Subject) -> str:
    less = subject.action.expected.bytes_before - subject.action.expected.bytes_after
    return f"it moves {less / 1e6:.3g} MB less" if less >= 1e4 else _saving(subject)


def _region(subject: Subject) -> str:
    units = subject.units
    if subject.action.kind in (ActionKind.FUSE, ActionKind.SIDE_BY_SIDE) and units.total > 1:
        verb = "fuses" if subject.action.kind is ActionKind.FUSE else "launches together"
        return f"{verb} {units.total} kernels of {subject.units_us:.3g} us"
    special = [kind for kind in ("convolution", "attention", "product", "reduction") if kind in units.classes]
    if special:
        return f"its region contains {'an' if special[0] == 'attention' else 'a'} {special[0]}"
    return f"its region has {len(subject.action.region)} operations" if len(subject.action.region) > 1 else ""


def _kind(subject: Subject) -> str:
    key = experience_key(subject.action.kind, subject.features)
    gains, tries = subject.experience.get(key, (0, 0))
    if tries < LEAST_TRIES:
        return f"few states like this one had a {KIND_WORDS[subject.action.kind]} in training"
    return f"this kind gained in {gains} of {tries} similar states"


def _kind_history(subject: Subject) -> str:
    features, word = subject.features, KIND_WORDS[subject.action.kind]
    tried, faster = int(features["history.kind_tried"]), int(features["history.kind_faster"])
    if not tried:
        return f"no {word} was tried yet"
    if faster == tried:
        return f"an earlier {word} was faster" if tried == 1 else f"all {tried} earlier steps of this kind were faster"
    if not faster:
        result = "failed" if features["history.kind_failed"] == tried else "was not faster"
        return f"an earlier {word} here {result}"
    return f"{faster} of {tried} earlier steps of this kind were faster"


def _region_history(subject: Subject) -> str:
    tried = int(subject.features["history.region_tried"])
    if not tried:
        return "no step on its operations was tried yet"
    failed = int(subject.features["history.region_not_faster"])
    return f"{tried - failed} of {tried} earlier steps on its operations were faster"


def _history(subject: Subject) -> str:
    return history_phrase(subject.features)


def history_phrase(features: Mapping[str, float]) -> str:
    """The course of the run so far; empty in the first step."""
    since, steps = int(features["history.since_gain"]), int(features["history.steps"])
    if since:
        return "the last step gained nothing" if since == 1 else f"the last {since} steps gained nothing"
    return "the last step was faster" if steps else ""


def _limit(subject: Subject) -> str:
    return LIMIT_WORDS[limit_of(subject.features)]


def _rank(subject: Subject) -> str:
    rank = subject.features["action.rank"]
    if rank != rank:
        return ""
    return "the cost model ranks it first" if rank == 0 else f"the cost model ranks it number {int(rank) + 1}"


def _rounding(subject: Subject) -> str:
    return "it may change rounding" if subject.action.changes_rounding else "it does not change rounding"


def _variants(subject: Subject) -> str:
    variants = subject.action.params.get("variants")
    return f"it measures {len(variants)} configurations" if isinstance(variants, Sequence) else ""


def _graph(subject: Subject) -> str:
    operations = round(2 ** subject.features["graph.operations"] - 1)
    return "the graph has one operation" if operations == 1 else f"the graph has {operations} operations"


def _schedule(subject: Subject) -> str:
    calls = round(2 ** subject.features["schedule.torch_calls"] - 1)
    kernels = round(2 ** subject.features["schedule.kernels"] - 1)
    return f"the version has {_count(kernels, 'kernel')} and {_count(calls, 'torch call')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


PHRASES: Mapping[str, Callable[[Subject], str]] = {
    "saving": _saving,
    "traffic": _traffic,
    "region": _region,
    "kind": _kind,
    "kind history": _kind_history,
    "region history": _region_history,
    "history": _history,
    "limit": _limit,
    "rank": _rank,
    "rounding": _rounding,
    "variants": _variants,
    "graph": _graph,
    "schedule": _schedule,
    "device": lambda subject: f"the device is {subject.device}",
}
"""The phrase of each topic; empty if there is nothing to say."""
