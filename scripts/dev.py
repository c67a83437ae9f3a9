"""Set up a fresh machine and run the demo or the tests. Standard library only; Python 3.10 or later.

    python3 scripts/dev.py setup | demo | test

Makes ``.venv`` beside this checkout, without sudo. Where there is no CUDA GPU, a CPU build of torch is preferred if pip can
already find one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv"
PYTHON = FOLDER / "bin" / "python"
CPU_TORCH = ("torch==2.13.0", "torch==2.12.0", "torch==2.11.0")
"""Versions looked for as CPU builds, newest first."""
SMALL_WHEEL = 400 << 20
"""A torch wheel below this many bytes holds no CUDA code."""


def main() -> int:
    """Do what the first argument says."""
    command = sys.argv[1] if len(sys.argv) > 1 else "setup"
    if sys.version_info < (3, 10):
        print("mtmc-lsp needs Python 3.10 or later", file=sys.stderr)
        return 3
    set_up()
    if command == "demo":
        return run(PYTHON, "-m", "mtmc_lsp", "optimize", "examples/rmsnorm_residual.py::rmsnorm_residual")
    if command == "test":
        return test()
    return 0


def test() -> int:
    """Lint, types, tests; all run, the first failure gives the exit code."""
    codes = [
        run(PYTHON, "-m", "ruff", "check", "."),
        run(PYTHON, "-m", "ruff", "format", "--check", "."),
        run(PYTHON, "-m", "mypy"),
        run(PYTHON, "-m", "pytest", "-n", "2", "-m", "not gpu"),
    ]
    return next((code for code in codes if code), 0)


def run(*command: object) -> int:
    """Run a command in the checkout; gives its exit code."""
    return subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode


def set_up() -> None:
    """Make the environment, unless it is already there for this pyproject.toml."""
    stamp = FOLDER / "mtmc-stamp"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not PYTHON.exists():
        venv.create(FOLDER, with_pip=False, symlinks=True)
    install_pip()
    if not has("torch"):
        install_torch()
    pip("install", "-e", ".[dev]", "numpy>=1.26", "triton>=3.6")
    stamp.write_text(wanted)


def has(module: str) -> bool:
    """Whether the environment can import a module."""
    done = subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True, check=False)
    return done.returncode == 0


def pip(*arguments: str) -> None:
    """Run the environment's pip; end where it fails."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"failed: {' '.join(command)}")


def install_pip() -> None:
    """pip in the environment: bundled with Python, or of another Python here, or fetched as a wheel.

    Debian's python3 comes without ensurepip unless python3-venv is installed.
    """
    if has("pip"):
        return
    if subprocess.run([PYTHON, "-m", "ensurepip", "--default-pip"], capture_output=True, check=False).returncode == 0:
        return
    if shutil.which("pip3") and run("pip3", "--python", PYTHON, "install", "pip") == 0:
        return
    with urllib.request.urlopen("https://pypi.org/pypi/pip/json", timeout=60) as answer:
        files = json.load(answer)["urls"]
    wheel = next(file for file in files if file["filename"].endswith(".whl"))
    path = FOLDER / wheel["filename"]
    with urllib.request.urlopen(wheel["url"], timeout=120) as answer:
        path.write_bytes(answer.read())
    if hashlib.sha256(path.read_bytes()).hexdigest() != wheel["digests"]["sha256"]:
        sys.exit("the downloaded pip wheel is damaged; try again")
    # A wheel is a zip file, which Python can run.
    if run(PYTHON, path / "pip", "install", str(path)):
        sys.exit("could not install pip into .venv")
    path.unlink()


def install_torch() -> None:
    """torch first and alone: a plain requirement may bring gigabytes of CUDA packages to a machine without a GPU."""
    if not has_gpu():
        for requirement in CPU_TORCH:
            if is_cpu_build(requirement):
                pip("install", requirement)
                return
        if pip_finds("torch", "--index-url", "https://download.pytorch.org/whl/cpu"):
            pip("install", "torch", "--index-url", "https://download.pytorch.org/whl/cpu")
            return
    pip("install", "torch>=2.11")


def has_gpu() -> bool:
    """Whether an NVIDIA driver is there."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def pip_finds(*arguments: str) -> str:
    """What pip would install, as its JSON report; empty where it finds nothing."""
    command = [PYTHON, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", "--report", "-", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def is_cpu_build(requirement: str) -> bool:
    """Whether pip, as it is configured, finds this torch as a build without CUDA."""
    if os.environ.get("MTMC_ANY_TORCH"):
        return False
    report = pip_finds(requirement, "--no-index") or ""
    if not report:
        return False
    items = json.loads(report)["install"]
    url = items[0]["download_info"]["url"] if items else ""
    local = Path(url.removeprefix("file://"))
    return "+cpu" in url or (url.startswith("file://") and local.exists() and local.stat().st_size < SMALL_WHEEL)


if __name__ == "__main__":
    sys.exit(main())
