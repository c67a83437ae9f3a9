"""The whole way in a real editor: headless Neovim, no plugin of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from editor import FAKE, REAL

NVIM = shutil.which("nvim")
HERE = Path(__file__).resolve().parent


def version() -> tuple[int, ...]:
    if NVIM is None:
        return ()
    said = subprocess.run([NVIM, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


pytestmark = pytest.mark.skipif(
    version() < (0, 7), reason="Neovim 0.7 or later is not installed: apt-get install neovim"
)

MODEL = """\
# fake f: better better
import torch


# mtmc: x=f32[8,48]
def f(x):
    return torch.softmax(torch.relu(x) + 1, -1)
"""


@pytest.mark.parametrize("command", [FAKE, REAL], ids=["fakes", "real search"])
def test_neovim_optimises_keeps_and_undoes(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.mtmc]\narchs = ["sm_90"]\n')
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    environment = {
        **os.environ,
        "MTMC_SERVER": json.dumps(command),
        "MTMC_FILE": str(file),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    arguments = [NVIM, "--headless", "--clean", "-n", "-c", f"luafile {HERE / 'neovim.lua'}"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert "came to: all" in done.stdout, done.stdout + done.stderr
    assert "@triton.jit" in file.read_text(), "what was kept was saved"
