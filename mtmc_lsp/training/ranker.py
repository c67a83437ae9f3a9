"""Trains the ranker: LightGBM's LambdaRank on the groups of the training families."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
from mtmc_lsp.policies.feature_names import DEVICE, FEATURES, HISTORY, features_without
from mtmc_lsp.policies.model_file import MAX_FILE_BYTES, ModelFile, ModelHeader, require_lightgbm
from mtmc_lsp.policies.ranker import RankerModel, softmax
from mtmc_lsp.programs.fingerprints import is_forbidden
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.dataset import Group, SplitOf, groups_of
from mtmc_lsp.training.labels import LABEL_GAIN, STOP_GAIN
from mtmc_lsp.training.stopping import best_stop_margin
from mtmc_lsp.training.tree import MeasuredTree

ABLATIONS = ("history", "device", "compile-reward")
"""What ``--without`` can leave out: features of the history, features of the device, grades of failures."""
MOST_TREES, PATIENCE = 250, 40
"""Most trees, and how many of them may bring no gain on the validation families before training ends."""
CHECKED_POSITION = 3
"""Training ends when NDCG at this position no longer rises on the validation families."""
TEMPERATURES = tuple(2.0 ** (power / 2) for power in range(-6, 9))
FEW_ROWS, MANY_ROWS = 2000, 30_000
"""With few rows, leaves may be smaller; with many, several threads train."""


@dataclass(frozen=True)
class RankerOptions:
    """How a ranker is trained."""

    seed: int = 0
    seconds: float = 600.0
    """Training ends after this time, with the trees that it has."""
    without: tuple[str, ...] = ()
    """Members of :data:`ABLATIONS`."""
    share: float = 1.0
    """Share of the training programs that is used."""
    trees: int = MOST_TREES

    def __post_init__(self) -> None:
        unknown = [name for name in self.without if name not in ABLATIONS]
        if unknown:
            raise RequestError(f"--without {unknown[0]} does not exist", remedy=f"Choose {' or '.join(ABLATIONS)}.")
        if not 0 < self.share <= 1:
            raise RequestError(f"--share {self.share:g} is not possible", remedy="It must be above 0 and at most 1.")

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the model sees."""
        return features_without(*(name for name in self.without if name in (HISTORY, DEVICE)))


@dataclass(frozen=True)
class TrainedRanker:
    """A model and how its training went."""

    model: ModelFile
    curve: tuple[tuple[int, float, float | None], ...]
    """Number of trees, and NDCG on the training and the validation families (None if there are none)."""
    seconds: float
    programs: tuple[str, ...]
    """Ids of the programs that it was trained on."""


def train_ranker(
    tree: MeasuredTree,
    split_of: SplitOf,
    options: RankerOptions,
    provenance: Callable[[ModelHeader], ModelHeader] = lambda header: header,
    on_progress: Callable[[str], None] = lambda text: None,
) -> TrainedRanker:
    """Train a ranker on the programs of the part ``train``.

    Args:
        split_of: the part of each program; ``validation`` decides when training ends.
        provenance: completes the header: commit, command.
        on_progress: called with what is done.

    Raises:
        EnvironmentNotAble: LightGBM or pyarrow is not installed.
        RequestError: the data has no group to learn from.
    """
    require_lightgbm()
    began = time.monotonic()
    on_progress("computing features")
    chosen = programs_of(tree, split_of, Split.TRAIN, share=options.share, seed=options.seed)
    with_failures = "compile-reward" not in options.without
    groups, experience = groups_of(tree, chosen, with_failures=with_failures)
    if not any(group.has_stop for group in groups):
        raise RequestError(
            f"the data has no timed version with several outcomes to learn from ({len(chosen)} programs for training)",
            remedy="Collect more: mtmc explore on a machine with a GPU.",
        )
    checked, _ = groups_of(tree, programs_of(tree, split_of, Split.VALIDATION), with_failures=with_failures)
    on_progress(f"training on {len(groups)} states")
    trees, curve = _trees(groups, checked, options, began, on_progress)
    header = ModelHeader(
        options.features,
        temperature=1.0,
        stop_gain=STOP_GAIN,
        experience=experience.counts(),
        device=", ".join(sorted({name for program in chosen for name in tree.devices_of(program)})),
        environment=_environment(tree, chosen),
        counts=_counts(groups, chosen),
    )
    model = ModelFile(provenance(header), trees)
    temperature = best_temperature(RankerModel(model), checked or groups, options.features)
    model = replace(model, header=replace(model.header, temperature=temperature))
    on_progress("choosing when to stop")
    margin = best_stop_margin(tree, programs_of(tree, split_of, Split.VALIDATION), model)
    model = replace(model, header=replace(model.header, stop_margin=margin))
    if len(model.to_bytes()) > MAX_FILE_BYTES:
        raise RequestError("the model has more than 1 MB", remedy="Train fewer trees: --trees 200.")
    return TrainedRanker(model, curve, time.monotonic() - began, tuple(chosen))


def programs_of(tree: MeasuredTree, split_of: SplitOf, part: Split, *, share: float = 1.0, seed: int = 0) -> list[str]:
    """Ids of the programs of one part, or a random share of them, which contains each smaller share of the same seed.

    Programs with the graph of a benchmark are only tested on.
    """
    programs = [program for program in tree.programs.values() if split_of(program) is part]
    names = sorted(program.id for program in programs if part is Split.TEST or not is_forbidden(program.capture))
    if share < 1.0:
        random.Random(seed).shuffle(names)
        names = names[: max(1, math.ceil(share * len(names)))] if names else []
    return sorted(names)


def inputs_of(group: Group, features: Sequence[str]) -> list[list[float]]:
    """The rows of a group with the columns that a model sees."""
    columns = [FEATURES.index(name) for name in features]
    return [[row[column] for column in columns] for row in group.rows]


def best_temperature(model: RankerModel, groups: Collection[Group], features: Sequence[str]) -> float:
    """The temperature under which the best choices of the groups are the most probable (least cross-entropy)."""
    scored = [
        (model.scores(inputs_of(group, features)), [label == max(group.labels) for label in group.labels])
        for group in groups
        if group.has_stop
    ]

    def loss(temperature: float) -> float:
        total = 0.0
        for scores, best in scored:
            weights = softmax([score / temperature for score in scores])
            share = sum(weight for weight, is_best in zip(weights, best, strict=True) if is_best)
            total -= math.log(max(share, 1e-12))
        return total

    return min(TEMPERATURES, key=loss) if scored else 1.0


def _trees(
    groups: Sequence[Group],
    checked: Sequence[Group],
    options: RankerOptions,
    began: float,
    on_progress: Callable[[str], None],
) -> tuple[str, tuple[tuple[int, float, float | None], ...]]:
    """The text of the trees, and NDCG by their number."""
    import lightgbm

    data = _table(lightgbm, groups, options.features)
    sets, names = [data], [Split.TRAIN.value]
    if checked:
        sets.append(_table(lightgbm, checked, options.features, reference=data))
        names.append(Split.VALIDATION.value)
    rows = sum(len(group.rows) for group in groups)
    parameters = {
        "objective": "lambdarank",
        "metric": "ndcg",
        "eval_at": [CHECKED_POSITION],
        "label_gain": list(LABEL_GAIN),
        "learning_rate": 0.06,
        "num_leaves": 20,
        # The reasons of a decision (TreeSHAP) take time with the square of the depth.
        "max_depth": 6,
        "min_data_in_leaf": 20 if rows >= FEW_ROWS else 3,
        "min_sum_hessian_in_leaf": 1e-3,
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "lambda_l2": 1.0,
        # Threads wait for each other after every feature, which takes longer than the work if there are few rows.
        "num_threads": 1 if rows < MANY_ROWS else 0,
        "seed": options.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }
    results: dict[str, Any] = {}
    callbacks = [lightgbm.record_evaluation(results), _deadline(lightgbm, began + options.seconds, on_progress)]
    if checked:
        callbacks.append(lightgbm.early_stopping(PATIENCE, first_metric_only=True, verbose=False))
    booster = lightgbm.train(
        parameters, data, num_boost_round=options.trees, valid_sets=sets, valid_names=names, callbacks=callbacks
    )
    metric = f"ndcg@{CHECKED_POSITION}"
    trained = results[Split.TRAIN.value][metric]
    validated = results[Split.VALIDATION.value][metric] if checked else [None] * len(trained)
    curve = tuple(
        (i, float(a), None if b is None else float(b))
        for i, (a, b) in enumerate(zip(trained, validated, strict=True), 1)
    )
    count = booster.best_iteration if booster.best_iteration > 0 else None
    return booster.model_to_string(num_iteration=count), curve


def _deadline(lightgbm: Any, end: float, on_progress: Callable[[str], None]) -> Callable[[Any], None]:
    """A callback that ends training at a time of the monotonic clock."""

    def check(environment: Any) -> None:
        if environment.iteration % 20 == 19:
            on_progress(f"{environment.iteration + 1} trees")
        if time.monotonic() >= end:
            raise lightgbm.callback.EarlyStopException(environment.iteration, environment.evaluation_result_list)

    # LightGBM runs callbacks by this number: after the one that records the metrics.
    check.order = 40  # type: ignore[attr-defined]
    return check


def _table(lightgbm: Any, groups: Sequence[Group], features: Sequence[str], reference: Any = None) -> Any:
    """The groups as a data set of LightGBM."""
    try:
        import pyarrow
    except ImportError:
        raise EnvironmentNotAble(
            "training needs pyarrow, which is not installed", remedy="Install it: pip install 'mtmc-lsp[learn]'."
        ) from None
    columns = {
        name: pyarrow.array([row[FEATURES.index(name)] for group in groups for row in group.rows], pyarrow.float64())
        for name in features
    }
    return lightgbm.Dataset(
        pyarrow.table(columns),
        label=[label for group in groups for label in group.labels],
        weight=[group.weight for group in groups for _ in group.rows],
        group=[len(group.rows) for group in groups],
        reference=reference,
        free_raw_data=True,
        params={"feature_pre_filter": False},
    )


def _counts(groups: Sequence[Group], programs: Sequence[str]) -> Mapping[str, int]:
    return {
        "programs": len(programs),
        "versions": len({group.version for group in groups}),
        "states": len(groups),
        "choices": sum(len(group.rows) for group in groups),
    }


def _environment(tree: MeasuredTree, programs: Sequence[str]) -> str:
    """The environment of most transitions."""
    counts: dict[str, int] = {}
    for program in programs:
        for version in tree.by_program.get(program, ()):
            for item in tree.of_version(version.id):
                counts[item.environment] = counts.get(item.environment, 0) + 1
    return max(counts, key=lambda name: (counts[name], name), default="")
