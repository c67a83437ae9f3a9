"""``mtmc apply``, and ``mtmc optimize FILE`` without a target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from runner import mtmc, project

from mtmc_lsp.source.compose import strip_generated

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TEXT = """\
import torch
from torch import nn


# mtmc: x=f32[8,48]
def scaled(x):
    return torch.softmax(torch.relu(x) * 2, -1)


def helper(x):
    return x + 1


# mtmc: x=f32[8,48]
def branches(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


# mtmc: x=f32[8,48]
class Block(nn.Module):
    def forward(self, x):
        return torch.softmax(torch.relu(x), -1)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A project after a run of all its targets, which wrote nothing."""
    folder = tmp_path_factory.mktemp("all")
    project(folder, TEXT)
    answer = mtmc(folder, "optimize", "model.py", "--all", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    return folder, answer.document


def test_all_optimises_every_target_that_has_inputs_and_tells_which_was_refused(finished) -> None:
    folder, document = finished
    assert [run["target"]["qualname"] for run in document["runs"]] == ["scaled", "Block"]
    assert [error["line"] for error in document["errors"]] == [TEXT.splitlines().index("    if x.sum() > 0:") + 1]
    assert (folder / "model.py").read_text() == TEXT


def test_a_file_without_a_target_lists_its_targets(finished) -> None:
    folder, _ = finished
    answer = mtmc(folder, "optimize", "model.py", **NO_GPU)
    assert (answer.code, answer.out) == (2, "")
    rows = re.findall(r"^  (\w+) +line (\d+), (.*)$", answer.err, re.M)
    assert rows == [
        ("scaled", "6", "inputs from directive"),
        ("helper", "10", "no example inputs yet"),
        ("branches", "15", "inputs from directive"),
        ("Block", "22", "inputs from directive"),
    ]
    assert "mtmc optimize model.py::scaled; or add --all" in answer.err


def test_a_file_with_one_target_needs_no_name(tmp_path: Path) -> None:
    project(tmp_path, TEXT[: TEXT.index("def helper")])
    answer = mtmc(tmp_path, "optimize", "model.py", "--arch", "sm_90", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "Optimizing scaled in model.py" in answer.out


def test_apply_writes_a_stored_run_after_edits_around_its_target_but_not_after_edits_of_it(finished) -> None:
    folder, document = finished
    file, run = folder / "model.py", document["runs"][0]["id"]
    edited = "# a new first line\n" + TEXT.replace("return x + 1", "return x + 2")
    file.write_text(edited)
    answer = mtmc(folder, "apply", run[:8])
    assert answer.code == 0, answer.err
    written = file.read_bytes()
    assert b"@triton.jit" in written
    assert strip_generated(written, "scaled") == edited.encode()
    assert "mtmc why model.py::scaled" in answer.out
    file.write_text(TEXT.replace("torch.relu(x) * 2", "torch.relu(x) * 3"))
    answer = mtmc(folder, "apply", run, "--json")
    assert (answer.code, answer.error["code"]) == (2, "file-changed")
    assert answer.error["message"] == f"scaled changed since run {run}"
    file.write_text(TEXT)
    answer = mtmc(folder, "apply", run, "--json")
    assert answer.code == 0, answer.err
    assert answer.document["path"] == str(file)
    assert file.read_text() == document["runs"][0]["final"]["source"]
