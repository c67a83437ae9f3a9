"""Model files, and what a user reads when one cannot be used."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.action import GRAPH_KINDS
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.feature_names import FEATURE_VERSION
from mtmc_lsp.policies.model_file import MAX_FILE_BYTES, ModelFile, model_path, read_model, shipped_model
from mtmc_lsp.policies.opening import open_ranker
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.policies.ranker import RankerModel
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.ranker import RankerOptions, train_ranker
from mtmc_lsp.training.tree import device_of
from tests.policies.trees import GPU, learnable_tree

TRAIN = "mtmc train policy --kind ranker --data DIR --out FILE"
KINDS = tuple(kind.value for kind in GRAPH_KINDS)


@pytest.fixture(scope="module")
def model() -> ModelFile:
    return train_ranker(learnable_tree(20), lambda program: Split.TRAIN, RankerOptions(trees=10)).model


def message(path: Path) -> str:
    with pytest.raises(MtmcError) as raised:
        RankerModel.of_file(path)
    assert raised.value.where is None or raised.value.where.path == str(path)
    return f"{raised.value.message} | {raised.value.remedy}"


def changed(model: ModelFile, **header: object) -> bytes:
    return replace(model, header=replace(model.header, **header)).to_bytes()


def test_a_model_is_the_same_after_writing_and_reading(model: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "ranker.policy"
    path.write_bytes(model.to_bytes())
    read = read_model(path)
    assert read.trees == model.trees
    assert replace(read.header, digest="") == replace(model.header, digest="")
    assert read.to_bytes() == path.read_bytes()
    assert len(path.read_bytes()) < MAX_FILE_BYTES
    rows = [[0.5] * len(model.header.features), [float("nan")] * len(model.header.features)]
    assert RankerModel(read).scores(rows) == RankerModel(model).scores(rows)
    total = [sum(row) for row in RankerModel(read).contributions(rows)]
    assert total == pytest.approx(RankerModel(read).scores(rows))


@pytest.mark.parametrize("damage", ["text", "cut", "flipped", "other zip", "no json", "trees"])
def test_a_file_that_is_damaged_or_foreign_is_refused_with_a_remedy(
    model: ModelFile, damage: str, tmp_path: Path
) -> None:
    whole = model.to_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    header, _, trees = gzip.decompress(whole).decode().partition("\n")
    content = {
        "text": b"tree\nversion=v4\n",
        "cut": whole[: len(whole) // 2],
        "flipped": bytes(flipped),
        "other zip": gzip.compress(json.dumps({"weights": [1, 2]}).encode()),
        "no json": gzip.compress(b"\x00\xff"),
        "trees": gzip.compress(f"{header}\n{trees[:-20]}".encode()),
    }[damage]
    path = tmp_path / "ranker.policy"
    path.write_bytes(content)
    assert (
        message(path)
        == f"the policy file is damaged, or it is not a policy file | Copy it again, or train one: {TRAIN}."
    )


def test_a_missing_file_and_a_file_that_is_too_large_are_named(tmp_path: Path) -> None:
    remedy = f"Name another file with --policy-file, or train one: {TRAIN}."
    path = tmp_path / "absent.policy"
    assert message(path) == f"the policy file cannot be read: No such file or directory | {remedy}"
    assert message(tmp_path) == f"the policy file cannot be read: Is a directory | {remedy}"
    path.write_bytes(bytes(MAX_FILE_BYTES + 1))
    assert message(path).startswith("the policy file has more than 1 MB, which is more than a ranker has | ")


def test_the_folder_of_a_language_model_is_named_with_its_planner(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("{}")
    assert message(tmp_path) == "this is a policy of kind 'lm', not a ranker | Choose it with --planner lm."


def test_a_model_for_other_actions_features_or_formats_is_refused_with_the_difference(
    model: ModelFile, tmp_path: Path
) -> None:
    again = f"Train it again with this version of mtmc-lsp: {TRAIN}."
    path = tmp_path / "ranker.policy"
    cases = {
        "was trained for another catalogue of actions (different: autotune, pipeline)": {
            "action_kinds": ("pipeline", *(kind for kind in KINDS if kind != "autotune"))
        },
        "was trained for another catalogue of actions (different: another order of actions)": {
            "action_kinds": KINDS[::-1]
        },
        f"was trained on version 0 of the features, and this version has {FEATURE_VERSION}": {"feature_version": 0},
        "has the format 'mtmc-policy 9', and this version reads 'mtmc-policy 1'": {"format": "mtmc-policy 9"},
    }
    for text, header in cases.items():
        path.write_bytes(changed(model, **header))
        assert message(path) == f"the policy file {text} | {again}"
    path.write_bytes(changed(model, kind="lm"))
    assert message(path).startswith("the policy file contains a policy of kind 'lm', not a ranker | ")


def test_without_lightgbm_the_message_says_how_to_install_it(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ranker.policy"
    path.write_bytes(model.to_bytes())
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    remedy = "Install it: pip install 'mtmc-lsp[learn]'."
    assert message(path) == f"the ranker needs LightGBM, which is not installed | {remedy}"


def test_a_ranker_that_cannot_be_used_leaves_the_roofline_planner_with_a_note(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranking, path = RooflinePlanner(), tmp_path / "ranker.policy"
    path.write_bytes(b"nothing")
    opened = open_ranker(ranking, str(path), None)
    assert opened.planner is ranking
    assert opened.note == (
        f"The ranker is not used, and the roofline planner chooses the steps: {path}: the policy file is damaged, or it is "
        f"not a policy file. Copy it again, or train one: {TRAIN}."
    )
    path.write_bytes(model.to_bytes())
    opened = open_ranker(ranking, str(path), device_of(GPU))
    assert isinstance(opened.planner, PolicyPlanner) and opened.note == ""
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    assert open_ranker(ranking, str(path), None).planner is ranking


def test_another_gpu_than_that_of_the_training_is_a_note(model: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "ranker.policy"
    path.write_bytes(model.to_bytes())
    opened = open_ranker(RooflinePlanner(), str(path), replace(device_of(GPU), name="NVIDIA A10"))
    assert isinstance(opened.planner, PolicyPlanner)
    assert opened.note == (
        "The ranker was trained on NVIDIA H200; how well it chooses for NVIDIA A10 was not measured."
    )


def test_without_a_setting_the_shipped_model_is_used_if_there_is_one() -> None:
    if shipped_model() is None:
        with pytest.raises(MtmcError, match="this version ships no trained ranker"):
            model_path("")
    else:
        assert read_model(model_path("")).header.device
