"""``mtmc doctor`` says what is there, and what to do about what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from runner import mtmc, project


def test_doctor_finds_that_this_environment_works(tmp_path: Path) -> None:
    project(tmp_path)
    answer = mtmc(tmp_path, "doctor", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 0, answer.out
    found = {finding["name"]: finding for finding in answer.document["findings"]}
    for name in ("python", "torch", "triton", "Triton's interpreter", "compiler for sm_90", "store of runs"):
        assert found[name]["ok"], found[name]
    assert "never timed" in found["CUDA GPU"]["detail"]
    isolation = found["isolation of candidates"]
    assert isolation["detail"].startswith(("full", "partial", "none"))
    assert not isolation["required"]


def test_doctor_tells_the_command_that_installs_what_is_missing(tmp_path: Path) -> None:
    project(tmp_path)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    answer = mtmc(tmp_path, "doctor", "--python", str(bare / "bin" / "python"))
    assert answer.code == 3
    assert f"{bare}/bin/python -m pip install 'torch>=2.11'" in answer.out
    assert f"{bare}/bin/python -m pip install 'triton>=3.6'" in answer.out


def test_doctor_says_when_the_interpreter_does_not_run(tmp_path: Path) -> None:
    project(tmp_path)
    answer = mtmc(tmp_path, "doctor", "--python", "/no/python")
    assert answer.code == 3
    assert "cannot start the interpreter /no/python" in answer.out
