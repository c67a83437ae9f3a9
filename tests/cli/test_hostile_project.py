"""``mtmc`` in a project whose ``.mtmc`` leads elsewhere, and in a folder whose files hide modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runner import Answer, environment, mtmc

from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.isolation import isolated_command
from mtmc_lsp.search.store import Store
from tests.hostile import STORES, imported, plant_modules, project, snapshot

MODEL = (
    "import torch\n\n\ndef f(x):\n    return torch.relu(x) + 1\n\n\n# mtmc: x=f32[4,6]\ndef g(x):\n    return x + 1\n"
)


def isolated(folder: Path, *arguments: str, **variables: str) -> Answer:
    """The same, started as our own processes are."""
    done = subprocess.run(
        [*isolated_command("mtmc_lsp"), *arguments],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def refused(answer: Answer) -> None:
    assert answer.code == 3
    assert "so it is neither read nor written" in answer.err
    assert "Remove it" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("kind", STORES)
def test_a_store_that_leads_out_of_the_project_is_refused(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "user"
    elsewhere = project(root, kind)
    before = snapshot(elsewhere)
    for command in (["runs"], ["report"], ["optimize", "--resume"], ["export", "1234"]):
        refused(mtmc(root, *command))
    assert snapshot(elsewhere) == before


@pytest.mark.parametrize("kind", ["folder", "records", "records-pipe"])
def test_records_that_lead_out_of_the_project_are_not_read(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "user"
    elsewhere = project(root, kind)
    (root / "model.py").write_text(MODEL)
    before = snapshot(elsewhere)
    refused(mtmc(root, "plan", "model.py::f"))
    assert snapshot(elsewhere) == before


@pytest.mark.parametrize("kind", ["folder", "failures"])
def test_a_failing_case_is_not_written_out_of_the_project(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "user"
    elsewhere = project(root, kind)
    (root / "model.py").write_text(MODEL)
    before = snapshot(elsewhere)
    refused(mtmc(root, "verify", "model.py::g", "model.py::f"))
    assert snapshot(elsewhere) == before


def test_bench_neither_keeps_runs_out_of_its_folder_nor_imports_from_there(tmp_path: Path) -> None:
    root = tmp_path / "results"
    elsewhere = project(root, "database")
    plant_modules(root)
    suite = tmp_path / "suite"
    suite.mkdir()
    problem = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n\n\n"
    (suite / "1_add.py").write_text(
        f"{problem}def get_inputs():\n    return [torch.ones(4)]\n\n\ndef get_init_inputs():\n    return []\n"
    )
    before = snapshot(elsewhere)
    isolated(root, "bench", str(suite), "--out", "results.jsonl", "--python", sys.executable)
    [record] = [json.loads(line) for line in (root / "results.jsonl").read_text().splitlines()]
    assert record["error"]["code"] == "unsafe-file"
    assert imported(root) == []
    assert snapshot(elsewhere) == before


@pytest.mark.parametrize("path", ["", ".", "{folder}"])
def test_the_command_line_started_isolated_imports_nothing_from_its_folder(tmp_path: Path, path: str) -> None:
    plant_modules(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    answer = isolated(tmp_path, "runs", "--json", PYTHONPATH=path.format(folder=tmp_path))
    assert answer.code == 0
    assert answer.document["runs"] == []
    assert imported(tmp_path) == []


def test_code_of_the_user_still_imports_from_its_folder_and_from_pythonpath(tmp_path: Path) -> None:
    project_folder, library = tmp_path / "user", tmp_path / "library"
    for folder in (project_folder, library):
        folder.mkdir()
    (project_folder / "pyproject.toml").touch()
    (project_folder / "beside.py").write_text("ONE = 1\n")
    (library / "on_the_path.py").write_text("TWO = 2\n")
    (project_folder / "model.py").write_text(
        "import torch\nfrom beside import ONE\nfrom on_the_path import TWO\n\n\n"
        "# mtmc: x=f32[8,48]\ndef f(x):\n    return torch.relu(x) * TWO + ONE\n"
    )
    answer = isolated(project_folder, "plan", "model.py::f", "--json", PYTHONPATH=os.pathsep.join(["", str(library)]))
    assert answer.code == 0, answer.err
    assert answer.document["actions"]


def test_a_stored_run_does_not_make_apply_write_a_file_outside_of_the_project(tmp_path: Path) -> None:
    root, other = tmp_path / "user", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        (folder / "pyproject.toml").touch()
    (other / "model.py").write_text(MODEL)
    with Store(root / ".mtmc") as store:
        store.begin(str(other / "model.py"), "g", "hash", Environment("", "", "", "", "", ""))
    before = snapshot(other)
    answer = mtmc(root, "optimize", "--resume", "--apply")
    assert answer.code == 2
    assert f"{other / 'model.py'}: the run's file is outside this project" in answer.err
    assert "FILE::NAME" in answer.err
    assert snapshot(other) == before
