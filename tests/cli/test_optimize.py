"""A run from the user's file to verified patches, as a user sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import COMMAND, MODEL, environment, mtmc, project

from mtmc_lsp.source.compose import strip_generated

GOOD = MODEL[: MODEL.index("def no_workload")]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A finished run of ``two`` on a machine without a GPU: its folder, document and progress."""
    folder = tmp_path_factory.mktemp("finished")
    project(folder, GOOD)
    answer = mtmc(folder, "optimize", "model.py::two", "--arch", "sm_90,gfx942", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    return folder, answer.document, answer.err


def test_the_document_carries_what_the_contract_promises(finished) -> None:
    _, document, _ = finished
    assert document["schema"] == 1
    for key in ("target", "workload", "environment", "baselines", "steps", "final", "status"):
        assert key in document
    assert {"gpu", "driver", "torch", "triton", "python"} <= set(document["environment"])
    step = document["steps"][0]
    assert {"action", "status", "reason", "diff", "verdict", "timing"} <= set(step)
    assert {"source", "diff", "speedup", "roofline"} <= set(document["final"])


def test_without_a_gpu_steps_are_verified_and_compiled_and_no_time_is_claimed(finished) -> None:
    _, document, progress = finished
    assert document["status"] == "unmeasured"
    assert document["final"]["speedup"] is None
    assert document["baselines"] == []
    for step in document["steps"]:
        assert step["timing"] is None
        if step["status"] == "accepted":
            assert step["verdict"]["status"] == "correct"
            assert {kernel["arch"] for kernel in step["report"]["kernels"]} == {"sm_90", "gfx942"}
    assert "unmeasured: no CUDA GPU; verified by Triton's interpreter and compiled for sm_90, gfx942" in progress
    assert " us" not in progress
    assert "speedup" not in progress


def test_without_apply_the_file_stays_as_it_is(finished) -> None:
    folder, document, _ = finished
    assert (folder / "model.py").read_text() == GOOD
    assert document["final"]["source"] != GOOD
    assert "+@triton.jit" in document["final"]["diff"]


def test_the_run_is_listed(finished) -> None:
    folder, document, _ = finished
    records = mtmc(folder, "runs", "--json").document["runs"]
    assert [(r["id"], r["status"], r["steps"]) for r in records] == [
        (document["id"], "unmeasured", len(document["steps"]))
    ]
    text = mtmc(folder, "runs").out
    assert document["id"] in text
    assert "model.py::two" in text


def test_a_finished_run_cannot_be_resumed(finished) -> None:
    folder, document, _ = finished
    answer = mtmc(folder, "optimize", document["id"], "--resume", "--json")
    assert answer.code == 2
    assert "is finished" in answer.error["message"]


def check_export(folder: Path, run: str, expected: str) -> None:
    """The exported file runs alone under torch, and computes what the target does."""
    written, own = folder / "exported.py", folder / "own.py"
    answer = mtmc(folder, "export", run, "--out", str(written), "--reference", str(own), "--json")
    assert answer.code == 0, answer.err
    assert written.read_text() == answer.document["source"]
    assert "mtmc:" not in written.read_text().replace("# mtmc: x=", "")
    assert "triton" not in own.read_text()
    code = (
        "import torch, exported, model, own\n"
        "new = exported.ModelNew(*exported.get_init_inputs())\n"
        "inputs = exported.get_inputs()\n"
        f"torch.testing.assert_close(new(*inputs), {expected})\n"
        f"torch.testing.assert_close(own.Model(*own.get_init_inputs())(*inputs), {expected})\n"
        "assert [x.shape for x in own.get_inputs()] == [x.shape for x in inputs]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), check=True)


def test_a_function_exports_as_a_kernelbench_file_that_runs(finished) -> None:
    folder, document, _ = finished
    check_export(folder, document["id"], "model.two(*inputs)")


def test_constants_and_index_ranges_are_exported_as_the_directive_gave_them(tmp_path: Path) -> None:
    project(tmp_path, GOOD)
    answer = mtmc(tmp_path, "optimize", "model.py::picked", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    check_export(tmp_path, answer.document["id"], "model.picked(*inputs, eps=0.5, scale=2.0)")


MODULE = """\
import torch
from torch import nn


# mtmc: x=f32[4,32] init: width=32
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.softmax(x * self.gain, -1)
"""


def test_a_module_exports_with_its_constructor_arguments(tmp_path: Path) -> None:
    project(tmp_path, MODULE)
    answer = mtmc(tmp_path, "optimize", "model.py::Block", "--arch", "sm_90", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    check_export(tmp_path, answer.document["id"], "model.Block(32)(*inputs)")


def test_apply_writes_the_accepted_steps_keeps_the_old_text_and_leaves_other_bytes_alone(tmp_path: Path) -> None:
    file = project(tmp_path)
    crlf = GOOD.replace("\n", "\r\n").encode()
    file.write_bytes(crlf)
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--arch", "sm_90", "--apply", **NO_GPU)
    assert answer.code == 0, answer.err
    written = file.read_bytes()
    assert b"@triton.jit\r\n" in written
    assert b"\n" not in written.replace(b"\r\n", b"")
    backups = list((tmp_path / ".mtmc" / "backups").iterdir())
    assert [backup.read_bytes() for backup in backups] == [crlf]
    assert f"the text before is in {backups[0].relative_to(tmp_path)}" in answer.out
    subprocess.run([sys.executable, "-c", "import model"], cwd=tmp_path, env=environment(), check=True)


def test_lines_stay_where_they_are_unless_the_kernels_go_above_the_target(tmp_path: Path) -> None:
    file = project(tmp_path, f"{GOOD}\nif __name__ == '__main__':\n    print(two(torch.ones(2, 2)))\n")
    before = file.read_text().splitlines()
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--arch", "sm_90", "--budget", "20", "--apply", **NO_GPU)
    assert answer.code == 0, answer.err
    text = file.read_text()
    lines = text.splitlines()
    start, guard = lines.index("# mtmc: begin two"), lines.index("if __name__ == '__main__':")
    assert start < guard
    dispatch = next(i for i, line in enumerate(lines) if line.endswith("# mtmc: dispatch"))
    n_dispatch = start - before.index("if __name__ == '__main__':")
    assert (
        lines[:dispatch] + lines[dispatch + n_dispatch : start] == before[: before.index("if __name__ == '__main__':")]
    )
    subprocess.run([sys.executable, "model.py"], cwd=tmp_path, env=environment(), check=True)
    again = mtmc(
        tmp_path,
        "optimize",
        "model.py::two",
        "--arch",
        "sm_90",
        "--budget",
        "20",
        "--place",
        "above",
        "--apply",
        **NO_GPU,
    )
    assert again.code == 0, again.err
    moved = file.read_text()
    assert moved.index("# mtmc: begin two") < moved.index("def two(")
    assert "import triton  # mtmc: import" in moved
    assert moved.count("# mtmc: begin two") == 1


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """``mtmc`` going on by itself."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**environment(), **NO_GPU, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return
    raise AssertionError(f"{words!r} was never said:\n{seen}")


def test_a_killed_run_goes_on_with_resume_and_does_not_repeat_its_steps(tmp_path: Path) -> None:
    project(tmp_path, GOOD)
    process = started(tmp_path, "optimize", "model.py::two", "--arch", "sm_90", "--no-diff")
    try:
        wait_for(process, "✓ Step 1")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    record = mtmc(tmp_path, "runs", "--json").document["runs"][0]
    assert record["status"] == "running"
    assert record["steps"] >= 1
    answer = mtmc(tmp_path, "optimize", "--resume", "--arch", "sm_90", **NO_GPU)
    assert answer.code == 0, answer.out + answer.err
    assert "accepted before" in answer.out
    assert answer.out.count("Step 1 ") == 1
    after = mtmc(tmp_path, "runs", "--json").document["runs"]
    assert [(r["id"], r["status"]) for r in after] == [(record["id"], "unmeasured")]


def test_a_run_goes_on_after_edits_around_its_target_but_not_after_edits_of_the_target(tmp_path: Path) -> None:
    file = project(tmp_path, GOOD)
    process = started(tmp_path, "optimize", "model.py::two", "--arch", "sm_90", "--no-diff")
    try:
        wait_for(process, "✓ Step 1")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (target,) = re.findall(r"def two\(.*\n(?: .*\n)+", GOOD)
    file.write_text(GOOD.replace(target, target.replace("\n", "\n    x = x * 1.5\n", 1)))
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--resume", "--json", **NO_GPU)
    assert (answer.code, answer.error["code"]) == (2, "file-changed")
    assert answer.error["message"].startswith("two changed since run ")
    edited = f"# a new first line\n{GOOD}\n\ndef added(y):\n    return y\n"
    file.write_text(edited)
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--resume", "--arch", "sm_90", "--apply", **NO_GPU)
    assert answer.code == 0, answer.out + answer.err
    assert answer.out.count("Step 1 ") == 1
    assert "@triton.jit" in file.read_text()
    assert strip_generated(file.read_bytes(), "two") == edited.encode()


def test_a_file_that_changed_while_it_was_optimised_is_not_overwritten(tmp_path: Path) -> None:
    file = project(tmp_path, GOOD)
    process = started(tmp_path, "optimize", "model.py::two", "--arch", "sm_90", "--no-diff", "--apply")
    wait_for(process, "Step 1")
    file.write_text(GOOD + "\n# typed meanwhile\n")
    rest = process.communicate(timeout=800)[0]
    assert process.returncode == 2
    assert "changed on disk" in rest
    assert file.read_text() == GOOD + "\n# typed meanwhile\n"
    assert not (tmp_path / ".mtmc" / "backups").exists()
