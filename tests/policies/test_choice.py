"""The choice of the planner: settings, the editor, stored runs and benches."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.app.bench.runner import Plan
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.settings import PLANNERS, RANDOM, Settings, read_settings
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.server.options import ClientSettings
from mtmc_lsp.server.options import read_settings as read_client_settings
from mtmc_lsp.training.ranker import RankerOptions, train_ranker
from tests.policies.trees import learnable_tree


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "ranker.policy"
    path.write_bytes(
        train_ranker(learnable_tree(10), lambda item: Split.TRAIN, RankerOptions(trees=3)).model.to_bytes()
    )
    return path


def test_a_policy_file_is_relative_to_the_project_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.mtmc]\nplanner = "ranker"\npolicy-file = "models/own.policy"\n')
    (tmp_path / "package").mkdir()
    settings = read_settings(tmp_path / "package")
    assert (settings.planner, settings.policy_file) == ("ranker", str(tmp_path / "models/own.policy"))
    (tmp_path / "pyproject.toml").write_text('[tool.mtmc]\nplanner = "oracle"\n')
    with pytest.raises(RequestError, match=r"'oracle' is not one of roofline, ranker, lm, llm"):
        read_settings(tmp_path)


def test_the_default_is_the_roofline_planner() -> None:
    planner, _ = Backends.from_settings(Settings()).open(Settings(), None)
    assert isinstance(planner, RooflinePlanner)


def test_the_ranker_is_opened_from_its_file_and_a_missing_one_is_noted(policy_file: Path) -> None:
    notes: list[str] = []
    settings = Settings(planner="ranker", policy_file=str(policy_file))
    planner, _ = Backends.from_settings(settings).open(settings, None, on_note=notes.append)
    assert isinstance(planner, PolicyPlanner) and notes == []
    settings = Settings(planner="ranker", policy_file=str(policy_file.with_name("absent")))
    planner, _ = Backends.from_settings(settings).open(settings, None, on_note=notes.append)
    assert isinstance(planner, RooflinePlanner) and len(notes) == 1


def test_chance_can_be_measured_and_is_no_choice_of_users() -> None:
    settings = Settings(planner=RANDOM)
    planner, _ = Backends.from_settings(settings).open(settings, None)
    assert isinstance(planner, PolicyPlanner) and planner._policy.name == RANDOM
    assert RANDOM not in PLANNERS


def test_without_consent_to_a_language_model_the_ranker_stays() -> None:
    assert Backends("ranker", "llm").without_model == Backends("ranker", "builtin")
    assert Backends("llm", "auto").without_model == Backends()
    assert not Backends("ranker").ask_a_model


def test_a_stored_run_knows_its_planner_and_its_policy_file() -> None:
    settings = Settings(planner="ranker", policy_file="/models/own.policy")
    stored = from_json(RunConfig, to_json(RunConfig("ranker", "builtin", settings)))
    assert stored.backends == Backends("ranker") and stored.settings == settings


def test_the_editor_can_choose_the_ranker_and_its_file() -> None:
    client, errors = read_client_settings({"planner": "ranker", "policyFile": "/models/own.policy"})
    assert errors == [] and client == ClientSettings(planner="ranker", policy_file="/models/own.policy")
    assert client.run_settings() == {"planner": "ranker", "policy_file": "/models/own.policy"}


def test_a_result_of_a_bench_belongs_to_the_content_of_the_policy_file(tmp_path: Path) -> None:
    path, problem = tmp_path / "own.policy", tmp_path / "problem.py"
    problem.write_text("x = 1\n")

    def key(content: bytes, name: str = "own.policy") -> str:
        (tmp_path / name).write_bytes(content)
        settings = Settings(planner="ranker", policy_file=str(tmp_path / name))
        return Plan(settings, "python", 10.0, {}).key(Problem("p", problem, tmp_path, ""))

    assert key(b"one") == key(b"one", "copy.policy") != key(b"two")
    assert path.exists()
