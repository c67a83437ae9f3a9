"""The documented snippet in a real Emacs with Eglot, in batch mode."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from documented import project, quoted_command, snippet

EMACS = shutil.which("emacs")
HERE = Path(__file__).resolve().parent


def has_eglot() -> bool:
    if EMACS is None:
        return False
    code = "(progn (package-initialize) (require 'eglot))"
    return subprocess.run([EMACS, "--batch", "--eval", code], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(
    not has_eglot(), reason="Emacs with Eglot is not installed, for example from emacs-nox and elpa-eglot"
)
def test_the_documented_snippet_optimises_and_keeps_a_step(tmp_path: Path) -> None:
    file = project(tmp_path / "user")
    (tmp_path / "init.el").write_text("(package-initialize)\n" + snippet("Emacs", quoted_command()))
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path), "MTMC_FILE": str(file)}
    command = [str(EMACS), "--batch", "-l", str(tmp_path / "init.el"), "-l", str(HERE / "emacs.el")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert "came to: all" in done.stdout, done.stdout + done.stderr
    assert "@triton.jit" in file.read_text()
