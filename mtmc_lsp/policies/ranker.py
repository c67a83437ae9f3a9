"""The ranker: gradient-boosted trees (LightGBM, LambdaRank) score the legal actions and STOP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State
from mtmc_lsp.policies.feature_names import FEATURES
from mtmc_lsp.policies.features import Featurizer, Ranked, ranked
from mtmc_lsp.policies.model_file import ModelFile, ModelHeader, read_model, require_lightgbm
from mtmc_lsp.policies.phrases import Subject, history_phrase, reasons, saving_phrase
from mtmc_lsp.policies.state_features import Version

EXPLAINED, COMPARED = 2, 4
"""The most probable choices have their full reasons, compared with as many of the most probable choices. The others only have the
saving that the cost model predicts: reasons (TreeSHAP) are the most expensive part of a decision."""


class RankerModel:
    """A trained ranker that is ready to score."""

    def __init__(self, model: ModelFile) -> None:
        """Load the trees.

        Raises:
            EnvironmentNotAble: LightGBM is not installed.
        """
        require_lightgbm()
        import lightgbm

        self.header: ModelHeader = model.header
        self._booster = lightgbm.Booster(model_str=model.trees)

    @classmethod
    def of_file(cls, path: Path) -> RankerModel:
        """Read a model file and load it.

        Raises:
            RequestError: the file cannot be used with this version.
            EnvironmentNotAble: LightGBM is not installed.
        """
        return cls(read_model(path))

    def contributions(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """What each feature adds to the score of each row (TreeSHAP), and the mean score at the end. They sum to the score."""
        contributions: list[list[float]] = self._predict(rows, pred_contrib=True)
        return contributions

    def scores(self, rows: Sequence[Sequence[float]]) -> list[float]:
        """The score of each row; only differences within a state have a meaning."""
        scores: list[float] = self._predict(rows, raw_score=True)
        return scores

    def _predict(self, rows: Sequence[Sequence[float]], **options: bool) -> Any:
        # One thread: starting threads takes longer than the work of a decision.
        predicted: Any = self._booster.predict([list(row) for row in rows], num_threads=1, **options)
        return predicted.tolist()


class RankerPolicy:
    """Weighs actions by the scores of a trained ranker."""

    name = "ranker"

    def __init__(self, model: RankerModel) -> None:
        self._model = model
        self._names = model.header.features
        self._features = Featurizer(FEATURES)
        self._columns = [FEATURES.index(name) for name in self._names]

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        """The probability of each action and of STOP, the most probable first."""
        return self.ranked_choices(state, ranked(actions))

    def ranked_choices(self, state: State, actions: Sequence[Ranked]) -> list[Choice]:
        """As :meth:`choices`, for actions in any order whose position in the roofline planner's order is known."""
        rows = self._features.rows(state, actions)
        inputs = [[row[column] for column in self._columns] for row in rows]
        scores = self._model.scores(inputs)
        # The row after those of the actions is STOP.
        scores[-1] -= self._model.header.stop_margin
        weights = softmax([score / self._model.header.temperature for score in scores])
        order = sorted(range(len(rows)), key=lambda index: (-weights[index], _key(actions, index)))
        explained = order[:EXPLAINED]

        def features_of(index: int) -> dict[str, float]:
            return dict(zip(FEATURES, rows[index], strict=True))

        added = dict(zip(explained, self._added(inputs, order[:COMPARED]), strict=False))
        version = self._features.version(state)
        return [
            Choice(
                actions[index].action if index < len(actions) else None,
                weights[index],
                self._reason(state, version, actions[index].action, features_of(index), added.get(index))
                if index < len(actions)
                else stop_reason(len(actions), order.index(index), self._model.header.stop_gain, features_of(index)),
            )
            for index in order
        ]

    def _added(self, inputs: Sequence[Sequence[float]], compared: Sequence[int]) -> list[dict[str, float]]:
        """For each compared choice, by feature: what it adds to the score more than to the mean of these choices."""
        contributions = self._model.contributions([inputs[index] for index in compared])
        means = [math.fsum(column) / len(compared) for column in zip(*contributions, strict=True)]
        return [{name: row[i] - means[i] for i, name in enumerate(self._names)} for row in contributions]

    def _reason(
        self,
        state: State,
        version: Version,
        action: MacroAction,
        features: Mapping[str, float],
        added: Mapping[str, float] | None,
    ) -> str:
        if added is None:
            return saving_phrase(action)
        units = version.units_of(action.region)
        units_us = version.units_us(action.region)
        subject = Subject(action, features, units, units_us, state.device.name, self._model.header.experience)
        return "; ".join(reasons(subject, added)) or "no other choice has a higher score"


def stop_reason(count: int, better: int, stop_gain: float, features: Mapping[str, float]) -> str:
    """Why the ranker ends a search, or why it does not.

    Args:
        count: number of actions.
        better: how many of them have a higher score than STOP.
    """
    if better:
        return f"{better} of the {count} remaining actions rank above the end of the search"
    each = "the remaining action" if count == 1 else f"each of the {count} remaining actions"
    course = history_phrase(features)
    because = f"; {course}" if course and features["history.since_gain"] else ""
    return f"the ranker expects less than {100 * stop_gain:g} % from {each}{because}"


def softmax(scores: Sequence[float]) -> list[float]:
    """Probabilities that sum to one."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    # Exact, so that the order of the scores does not matter.
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _key(actions: Sequence[Ranked], index: int) -> tuple[bool, int, str]:
    """Orders choices of equal probability: by rank, then by key; STOP is the last."""
    if index == len(actions):
        return (True, 0, "")
    return (False, actions[index].rank, actions[index].action.key)
