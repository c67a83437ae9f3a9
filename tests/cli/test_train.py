"""``mtmc train policy``, and runs by a trained policy, as a user sees them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import mtmc, project

from mtmc_lsp.cli import app
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.explore.parquet import Writer
from mtmc_lsp.policies.model_file import read_model
from mtmc_lsp.training.tree import MeasuredTree
from tests.policies.trees import GPU, learnable_tree

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
GOOD = """\
import torch


# mtmc: x=f32[64,64]
def scores(x):
    return torch.softmax(torch.relu(x) * 2, -1)
"""


def store(folder: Path, tree: MeasuredTree) -> Path:
    """A folder of transitions, as ``mtmc explore`` writes it."""
    with Writer(folder) as writer:
        for program in tree.programs.values():
            writer.add_program(program)
        for version in tree.versions.values():
            writer.add_version(version)
        for items in tree.transitions.values():
            for item in items:
                writer.add_transition(item)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the command trained, with its report."""
    folder = tmp_path_factory.mktemp("trained")
    data = store(folder / "data", learnable_tree(40))
    patch = pytest.MonkeyPatch()
    out = folder / "ranker.policy"
    arguments = ["train", "policy", "--data", str(data), "--out", str(out), "--seconds", "60", "--seed", "3"]
    patch.setattr(sys, "argv", ["mtmc", *arguments])
    assert app(arguments, standalone_mode=False) == 0
    patch.undo()
    return out


def test_training_writes_a_model_and_its_report(trained: Path) -> None:
    header = read_model(trained).header
    assert header.device == GPU and header.counts["programs"] == 24
    assert header.command == "mtmc train policy --data data --out ranker.policy --seconds 60 --seed 3"
    assert str(trained.parent) not in json.dumps(to_json(header))
    text = trained.with_suffix(".md").read_text()
    assert "- Data: 24 programs, " in text and "## Test families: 4 programs of 1 family\n" in text
    document = json.loads(trained.with_suffix(".json").read_text())["training"]
    (test,) = (part for part in document["parts"] if part["part"] == "test")
    assert test["timed"]["replays"]["ranker-greedy"]["by_candidates"][1] == pytest.approx(1.5)
    page = trained.with_suffix(".html").read_text()
    assert page.count("<svg") == 5 and "roofline-greedy" in page


def test_replays_compare_planners_and_searches_on_held_out_families(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = trained.parent / "data", tmp_path / "replays.md"
    arguments = ["train", "replay", "--data", str(data), "--out", str(out), "--policy-file", str(trained)]
    monkeypatch.setattr(sys, "argv", ["mtmc", *arguments])
    assert app(arguments, standalone_mode=False) == 0
    printed = capsys.readouterr().out
    text = out.read_text()
    assert text in printed and f"written: {out}, {out.with_suffix('.json')}, {out.with_suffix('.html')}" in printed
    assert "- Command: mtmc train replay --data data --out replays.md --policy-file ranker.policy\n" in text
    assert "## Test families: 4 programs of 1 family; the best of their trees is 1.500x\n" in text
    replays = json.loads(out.with_suffix(".json").read_text())["replays"]["replays"]
    assert list(replays) == [
        *(f"{policy}-{search}" for policy in ("roofline", "ranker") for search in ("greedy", "beam", "mcts")),
        "random",
    ]
    for search in ("greedy", "beam", "mcts"):
        assert replays[f"ranker-{search}"]["by_candidates"][1] == pytest.approx(1.5)
        assert replays[f"ranker-{search}"]["candidates"] <= replays[f"roofline-{search}"]["candidates"]
    assert out.with_suffix(".html").read_text().count("<svg") == 2


def test_a_run_by_a_trained_ranker_says_so_in_its_steps(trained: Path, tmp_path: Path) -> None:
    project(tmp_path, GOOD)
    options = ("--planner", "ranker", "--policy-file", str(trained), "--arch", "sm_90", "--json")
    answer = mtmc(tmp_path, "optimize", "model.py::scores", *options, **NO_GPU)
    assert answer.code == 0, answer.err
    assert all(" The ranker policy (" in step["action"]["rationale"] for step in answer.document["steps"])
    assert answer.document["steps"]


def test_a_policy_file_that_cannot_be_used_is_a_note_of_the_run(tmp_path: Path) -> None:
    settings = '[tool.mtmc]\nplanner = "ranker"\npolicy-file = "other.policy"\n'
    project(tmp_path, GOOD, settings=settings)
    (tmp_path / "other.policy").write_text("nothing")
    answer = mtmc(tmp_path, "optimize", "model.py::scores", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    (note,) = answer.document["notes"]
    assert note == (
        "The ranker is not used, and the roofline planner chooses the steps: "
        f"{tmp_path}/other.policy: the policy file is damaged, or it is not a policy file. "
        "Copy it again, or train one: mtmc train policy --kind ranker --data DIR --out FILE."
    )
    assert answer.err.count("The ranker is not used") == 1
    assert not any("ranker" in step["action"]["rationale"] for step in answer.document["steps"])
    page = mtmc(tmp_path, "report", "--html", "run.html", **NO_GPU)
    assert page.code == 0, page.err
    assert "The ranker is not used, and the roofline planner" in (tmp_path / "run.html").read_text()
    assert "The ranker is not used" in mtmc(tmp_path, "report", **NO_GPU).out


def refused(*arguments: Any, command: str = "policy") -> str:
    with pytest.raises(MtmcError) as raised:
        app(["train", command, *map(str, arguments)], standalone_mode=False)
    return f"{raised.value} ({raised.value.exit_code})"


def test_mistakes_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    out = tmp_path / "ranker.policy"
    data = store(tmp_path / "data", learnable_tree(1))
    assert refused("--data", data, "--out", out, "--kind", "oracle") == (
        "--kind oracle does not exist\n  Choose ranker or lm. (2)"
    )
    assert refused("--data", data, "--out", out, "--without", "history,luck") == (
        "--without luck does not exist\n  Choose history or device or compile-reward. (2)"
    )
    assert refused("--data", data, "--out", out, "--new-model", "1M") == (
        "--new-model is an option of --kind lm\n  Leave it out, or add --kind lm. (2)"
    )
    assert refused("--data", data, "--out", tmp_path, "--kind", "lm", "--new-model", "1M", "--layers", "2") == (
        "--new-model and --layers exclude each other\n"
        "  Leave out --layers to train a new model, or --new-model to train an adapter of an existing one. (2)"
    )
    assert refused("--data", data, "--out", out, "--share", "2") == (
        "--share 2 is not possible\n  It must be above 0 and at most 1. (2)"
    )
    assert refused("--data", data, "--out", tmp_path / "no" / "file") == (
        f"{tmp_path}/no/file: is in a folder that does not exist\n  Name a file in an existing folder. (2)"
    )
    assert refused("--data", data, "--out", tmp_path / "ranker.json") == (
        f"{tmp_path}/ranker.json: a model cannot have the suffix .json, which its report has\n  Name it ranker.policy. (2)"
    )
    assert refused("--data", tmp_path / "absent", "--out", out) == (
        f"{tmp_path}/absent: no such folder\n  Name a folder of `mtmc explore --out`. (2)"
    )
    assert not out.exists()


def test_mistakes_of_replays_are_refused(trained: Path, tmp_path: Path) -> None:
    data, out = trained.parent / "data", tmp_path / "replays.md"

    def refused_replay(*arguments: Any) -> str:
        return refused("--policy-file", trained, *arguments, command="replay")

    assert refused_replay("--data", data, "--out", tmp_path / "no" / "replays.md") == (
        f"{tmp_path}/no/replays.md: is not a .md file in an existing folder\n  Name such a file. (2)"
    )
    assert refused_replay("--data", data, "--out", out, "--part", "train") == (
        "--part train does not exist\n  Choose test or validation. (2)"
    )
    assert refused_replay("--data", data, "--out", out, "--lm", tmp_path) == (
        f"{tmp_path}/policy.json: there is no policy of kind lm here\n"
        "  Name the folder `policy` that `mtmc train policy --kind lm --out DIR` writes below DIR. (2)"
    )
    assert not out.exists()


def test_without_lightgbm_or_pyarrow_the_message_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = store(tmp_path / "data", learnable_tree(1))
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    assert refused("--data", data, "--out", tmp_path / "ranker.policy") == (
        "the ranker needs LightGBM, which is not installed\n  Install it: pip install 'mtmc-lsp[learn]'. (3)"
    )
