"""The features of a decision: one row of numbers for each legal action and for STOP.

Rows are pure functions of the state and the actions. A value that does not exist (the ratio of a step that was not timed, an
action's saving in the row of STOP) is NaN. Counts and sizes are logarithms: their order of magnitude matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.protocols import State
from mtmc_lsp.policies.feature_names import FEATURES, LEARNED_KINDS
from mtmc_lsp.policies.history import TriedAction, present_us, tried_actions
from mtmc_lsp.policies.state_features import Version, device_features, graph_features, log, version_of

NAN = math.nan
OUTCOME_ORDER = (
    *(Outcome.NOT_LEGAL, Outcome.COMPILE_ERROR, Outcome.OUT_OF_TIME, Outcome.WRONG),
    *(Outcome.CORRECT, Outcome.SLOWER, Outcome.FASTER),
)
"""From the worst to the best; the position is a feature."""
REGION_CLASSES = ("reduction", "product", "convolution", "attention", "view")


@dataclass(frozen=True)
class Ranked:
    """An action and its position in the roofline planner's order."""

    action: MacroAction
    rank: int
    """From 0; -1 if that planner did not list the action."""


def ranked(actions: Sequence[MacroAction]) -> list[Ranked]:
    """Actions that are in the roofline planner's order."""
    return [Ranked(action, rank) for rank, action in enumerate(actions)]


class Featurizer:
    """Computes rows. Keeps the values of the last capture and the last version, since consecutive decisions share them."""

    def __init__(self, names: Sequence[str] = FEATURES) -> None:
        """``names`` are the columns of a row, in their order; a model knows them by position."""
        self._names = tuple(names)
        self._capture: object = None
        self._graph: Mapping[str, float] = {}
        self._version_key: tuple[object, object, object] = (None, None, None)
        self._version: Version | None = None

    def rows(self, state: State, actions: Sequence[Ranked]) -> list[list[float]]:
        """One row for each action, and the row of STOP at the end."""
        version = self._version_of(state)
        tried = tried_actions(state.history)
        common = {**self._graph_of(state), **version.features, **device_features(state)}
        common |= _history_features(state, tried, version)
        best_us = max((item.action.expected.saved_us for item in actions), default=0.0)
        common["action.best_saved_share"] = best_us / version.predicted_us
        rows = [
            {**common, **_action_features(item, best_us, version), **_kind_features(item, tried)} for item in actions
        ]
        rows.append({**common, **STOP_FEATURES})
        return [[row.get(name, NAN) for name in self._names] for row in rows]

    def version(self, state: State) -> Version:
        """Structure and predicted time of the present version."""
        return self._version_of(state)

    def _graph_of(self, state: State) -> Mapping[str, float]:
        if self._capture is not state.capture:
            self._capture, self._graph = state.capture, graph_features(state.capture)
        return self._graph

    def _version_of(self, state: State) -> Version:
        key = (state.capture, state.candidate, state.device)
        if self._version is None or any(a is not b for a, b in zip(key, self._version_key, strict=True)):
            self._version_key, self._version = key, version_of(state)
        return self._version


def log_ratio(ratio: float | None) -> float:
    """Logarithm to base 2 of a ratio: 0 for no change; NaN if it is unknown."""
    return math.log2(ratio) if ratio is not None and ratio > 0 else NAN


STOP_FEATURES: Mapping[str, float] = {
    "action.is_stop": 1.0,
    **{f"action.kind_{kind.value}": 0.0 for kind in LEARNED_KINDS},
}


def _action_features(item: Ranked, best_us: float, version: Version) -> dict[str, float]:
    action, expected = item.action, item.action.expected
    region = frozenset(action.region)
    units = version.units_of(region)
    features = {f"action.kind_{kind.value}": float(kind is action.kind) for kind in LEARNED_KINDS}
    return features | {
        "action.is_stop": 0.0,
        "action.rank": float(item.rank) if item.rank >= 0 else NAN,
        "action.saved_us": log(expected.saved_us),
        "action.saved_share": expected.saved_us / version.predicted_us,
        "action.saved_of_best": expected.saved_us / best_us if best_us > 0 else NAN,
        "action.bytes_saved": log((expected.bytes_before - expected.bytes_after) / 1e3),
        "action.bytes_ratio": _ratio(expected.bytes_after, expected.bytes_before),
        "action.flops_ratio": _ratio(expected.flops_after, expected.flops_before),
        "action.region_nodes": log(len(region)),
        "action.region_share": len(region) / max(1, len(version.classes)),
        "action.region_units": log(units.total),
        "action.region_kernels": log(units.kernels),
        **{f"action.region_{name}": float(name in units.classes) for name in REGION_CLASSES},
        "action.sites": log(_count(action, "sites")),
        "action.variants": log(_count(action, "variants")),
        "action.changes_rounding": float(action.changes_rounding),
    }


def _ratio(after: float, before: float) -> float:
    return log_ratio(after / before) if before > 0 and after > 0 else NAN


def _count(action: MacroAction, name: str) -> int:
    """Number of items of a list among the parameters; 0 if there is none."""
    items = action.params.get(name)
    return len(items) if isinstance(items, (list, tuple)) else 0


def _history_features(state: State, tried: Sequence[TriedAction], version: Version) -> dict[str, float]:
    last = tried[-1] if tried else None
    gains = [index for index, item in enumerate(tried) if item.outcome is Outcome.FASTER]
    measured_us = present_us(state.history)
    return {
        "history.steps": float(len(tried)),
        "history.faster": float(len(gains)),
        "history.slower": float(sum(item.outcome is Outcome.SLOWER for item in tried)),
        "history.failed": float(sum(item.has_failed for item in tried)),
        "history.since_gain": float(len(tried) - 1 - gains[-1] if gains else len(tried)),
        "history.last_outcome": float(OUTCOME_ORDER.index(last.outcome)) if last is not None else NAN,
        "history.last_ratio": log_ratio(last.ratio) if last is not None else NAN,
        "history.total_speedup": sum(
            log_ratio(item.ratio) for item in tried if item.is_accepted and item.ratio is not None
        ),
        "history.measured_to_predicted": log_ratio(measured_us / version.predicted_us if measured_us else None),
    }


def _kind_features(item: Ranked, tried: Sequence[TriedAction]) -> dict[str, float]:
    """What became of earlier steps of the action's kind, and of earlier steps on its region."""
    same = [step for step in tried if step.kind is item.action.kind]
    region = frozenset(item.action.region)
    overlapping = [step for step in tried if step.region & region]
    ratios = [step.ratio for step in same if step.ratio is not None]
    return {
        "history.kind_tried": float(len(same)),
        "history.kind_faster": float(sum(step.outcome is Outcome.FASTER for step in same)),
        "history.kind_slower": float(sum(step.outcome is Outcome.SLOWER for step in same)),
        "history.kind_failed": float(sum(step.has_failed for step in same)),
        "history.kind_last_ratio": log_ratio(ratios[-1]) if ratios else NAN,
        "history.region_tried": float(len(overlapping)),
        "history.region_not_faster": float(sum(step.outcome is not Outcome.FASTER for step in overlapping)),
    }
