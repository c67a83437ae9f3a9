"""``kill -9`` at the worst moments: the store goes on, and the file is as it was or as accepted."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import COMMAND, environment, mtmc, project

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TEXT = """\
import torch


# mtmc: x=f32[8,48]
def two(x):
    a = torch.relu(x) + 1
    s = torch.sort(a).values
    return torch.softmax(s * 2, -1)
"""
KILLED_WHILE_WRITING = """\
import os, signal, sys
replace = os.replace
def killed(source, target):
    if str(target).endswith("model.py"):
        {before}
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
sys.argv = ["mtmc", "optimize", "model.py::two", "--arch", "sm_90", "--apply", "--no-diff"]
from mtmc_lsp.cli import main
main()
"""


def stored_steps(folder: Path) -> list[Any]:
    with sqlite3.connect(folder / ".mtmc" / "store.db") as store:
        return [json.loads(row[0]) for row in store.execute("select document from steps order by number")]


def test_a_killed_run_is_listed_and_goes_on_from_its_last_step_without_measuring_it_again(tmp_path: Path) -> None:
    project(tmp_path, TEXT)
    process = subprocess.Popen(
        [*COMMAND, "optimize", "model.py::two", "--arch", "sm_90", "--no-diff"],
        cwd=tmp_path,
        env={**environment(), **NO_GPU, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "✓ Step 1" in line:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = stored_steps(tmp_path)
    assert before
    assert "unfinished" in mtmc(tmp_path, "runs").out
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--resume", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    # Each verdict has a seed of its own in its checks, so a step that is equal was not verified again.
    assert answer.document["steps"][: len(before)] == before
    assert "accepted before" in answer.err
    assert (tmp_path / "model.py").read_text() == TEXT


@pytest.mark.parametrize(("before", "is_written"), [("pass", False), ("replace(source, target)", True)])
def test_a_kill_at_the_moment_of_writing_leaves_the_whole_old_or_the_whole_new_file(
    before: str, is_written: bool, tmp_path: Path
) -> None:
    file = project(tmp_path, TEXT)
    code = KILLED_WHILE_WRITING.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**environment(), **NO_GPU}, check=False)
    assert done.returncode == -signal.SIGKILL
    (record,) = mtmc(tmp_path, "runs", "--json").document["runs"]
    assert record["status"] == "unmeasured"
    with sqlite3.connect(tmp_path / ".mtmc" / "store.db") as store:
        (row,) = store.execute("select result from runs")
    accepted = json.loads(row[0])["final"]["source"]
    assert file.read_text() == (accepted if is_written else TEXT)
    assert [path.read_text() for path in (tmp_path / ".mtmc" / "backups").iterdir()] == [TEXT]
    # The next run, on the optimised file too, is not in the way of what the killed one left behind.
    again = mtmc(tmp_path, "optimize", "model.py::two", "--arch", "sm_90", "--apply", "--json", **NO_GPU)
    assert again.code == 0, again.err
    assert file.read_text() == again.document["final"]["source"]
    assert sorted(path.name for path in tmp_path.glob(".model.py*")) == []
