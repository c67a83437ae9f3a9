"""`scripts/host_time.py`: the parts of a call, measured without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = """import torch


# mtmc: x=f32[B,4096] weight=f32[4096] B=64 grad=x,weight
def scaled(x, weight):
    return torch.softmax(x, -1) * weight


# mtmc: x=f32[B,4096] B=64
def halved(x):
    return torch.softmax(x, -1) * 0.5
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaled", "halved"])
def test_the_parts_of_a_call_are_measured_with_its_launches(tmp_path: Path, name: str) -> None:
    file, code = tmp_path / "target.py", tmp_path / "code"
    file.write_text(TEXT)

    def run(script: str, *arguments: object) -> str:
        command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800, check=False
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    run("snapshot_code.py", "capture", tmp_path / "graphs", f"{file}::{name}")
    numbers = json.loads(run("host_time.py", tmp_path / "graphs" / f"target.{name}.json", "--code", code))
    launches = (code / f"target.{name}.py").read_text().count("_kernel[")
    assert numbers["launches"] == launches > 0
    assert ("backward" in numbers) is (name == "scaled")
    assert all(numbers[part] > 0 for part in ("bytecodes", "tensors", "call", "eager", "guard", "forward", "launch"))
