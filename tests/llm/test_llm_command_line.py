"""Scripted correct answers through the command line: the file equals a manual edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint
from searching import AgreeingMeasurer
from targets import TARGETS, Target
from test_model_targets import before
from typer.testing import CliRunner

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.cli import app
from mtmc_lsp.core.workload import Capture


@pytest.fixture
def by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter_worker):
    """Runs ``mtmc optimize`` in this process with a shared capture worker and a measurer that accepts everything."""

    def captured(pipeline: Pipeline) -> Capture:
        target = pipeline.target
        workload = find_workload(str(target.path), target.plain, target.definition)
        return run_capture(workload, target.plain, interpreter_worker, 120)

    monkeypatch.setattr(Pipeline, "_run_capture", captured)
    monkeypatch.setattr(Pipeline, "_open_measurer", lambda *_: AgreeingMeasurer())
    monkeypatch.setattr(Pipeline, "_start_fork_server", lambda _: None)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n[tool.mtmc.llm]\nretries = 0\n")

    def run(*arguments: str) -> dict[str, Any]:
        answer = CliRunner().invoke(app, ["optimize", *arguments, "--arch", "sm_90", "--json"])
        assert answer.exit_code == 0, answer.output
        document: dict[str, Any] = json.loads(answer.stdout)
        return document

    return run


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_good_answer_is_written_like_a_manual_edit_and_replayed(
    by_command, target: Target, tmp_path: Path, monkeypatch, captured
) -> None:
    file = tmp_path / "model.py"
    file.write_text(target.source)
    by_hand = target.by_hand(before(captured(target.source, target.name), target.source))
    monkeypatch.chdir(tmp_path)
    with Endpoint(target.answer).serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        document = by_command(f"model.py::{target.name}", "--coder", "llm", "--apply")
    steps = [step for step in document["steps"] if step["status"] == "accepted"]
    assert [step["candidate"]["source"] for step in steps][-1] == by_hand
    assert file.read_text() == by_hand
    for name in environ:
        monkeypatch.delenv(name)
    again = by_command("--replay", document["id"])
    assert again["final"]["source"] == by_hand
