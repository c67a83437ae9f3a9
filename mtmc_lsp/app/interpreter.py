"""Finds the interpreter that runs the user's code, and checks its packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.process.isolation import LEAVE_WORKING_FOLDER

LEAST = {"torch": (2, 11), "triton": (3, 6)}
"""The oldest versions that are supported."""
PROBE_SECONDS = 60.0
# Versions are read from the packages' metadata: importing torch takes seconds.
PROBE = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
found = {name: version(name) for name in ("torch", "triton", "numpy")}
found["triton"] = found["triton"] or version("pytorch-triton") or version("pytorch-triton-rocm")
found["python"] = "%d.%d.%d" % sys.version_info[:3]
print(json.dumps(found))
"""
# Looks for a GPU as torch does, without importing torch: the CUDA version of torch, and the devices of the driver.
GPU_PROBE = """
import ctypes, importlib.util, json, pathlib, re
def gpu(built_for):
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    supported, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDriverGetVersion(ctypes.byref(supported))
    if supported.value // 1000 < built_for or driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return ""
    return "" if driver.cuDeviceGetName(name, 256, device) else name.value.decode()
torch = importlib.util.find_spec("torch")
text = pathlib.Path(torch.origin).with_name("version.py").read_text() if torch and torch.origin else ""
cuda, hip = (re.search(rf"^{kind}\\b.*= '(\\d+)", text, re.MULTILINE) for kind in ("cuda", "hip"))
print(json.dumps(None if hip or not text else gpu(int(cuda[1])) if cuda else ""))
"""


def find_python(path: Path, settings: Settings) -> str:
    """The user's interpreter: the setting, the active environment, the project's ``.venv``, else the one of this tool."""
    if settings.python:
        return settings.python
    folders = [Path(os.environ["VIRTUAL_ENV"])] if os.environ.get("VIRTUAL_ENV") else []
    folders += [project_root(path) / name for name in (".venv", "venv")]
    for folder in folders:
        candidate = folder / "bin" / "python"
        if candidate.exists():
            return str(candidate)
    return sys.executable


def _last_line(python: str, script: str) -> str:
    """The last line that a script prints under ``python``; raises as ``subprocess.run`` does if the script fails."""
    done = subprocess.run(
        [python, "-c", f"{LEAVE_WORKING_FOLDER}{script}"],
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip().splitlines()[-1]


def versions(python: str) -> dict[str, str]:
    """Versions of ``python`` itself, torch, triton and numpy; empty for a package that is not installed.

    Raises:
        EnvironmentNotAble: the interpreter does not run.
    """
    try:
        answer = _last_line(python, PROBE)
    except OSError as error:
        raise EnvironmentNotAble(
            f"cannot start the interpreter {python}: {error.strerror}", remedy="Name one with --python."
        ) from None
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        raise EnvironmentNotAble(
            f"the interpreter {python} does not work: {''.join(lines)}", remedy="Name another with --python."
        ) from None
    installed: dict[str, str] = json.loads(answer)
    return installed


def gpu_of(python: str) -> str | None:
    """The GPU that torch would use under ``python``; empty if it would use none, None if that is unknown."""
    try:
        gpu = json.loads(_last_line(python, GPU_PROBE))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return gpu if isinstance(gpu, str) else None


def is_recent(name: str, version: str) -> bool:
    """Whether that version of torch or triton is supported."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    return bool(version) and numbers >= LEAST[name]


def install_command(python: str, name: str) -> str:
    """The command that installs torch or triton for that interpreter."""
    return f"{python} -m pip install '{name}>={'.'.join(map(str, LEAST[name]))}'"


def checked_python(python: str) -> str:
    """``python`` as an absolute path, after a check of its packages.

    Raises:
        EnvironmentNotAble: it does not run, or lacks torch or triton; the remedy is the command that installs them.
    """
    located = shutil.which(python) or python
    installed = versions(located)
    for name in LEAST:
        if not is_recent(name, installed[name]):
            state = f"has {name} {installed[name]}, which is too old" if installed[name] else f"does not have {name}"
            raise EnvironmentNotAble(
                f"the interpreter {located} {state}", remedy=f"Run: {install_command(located, name)}"
            )
    return str(Path(located).absolute())


def query_gpus(fields: str) -> list[str]:
    """Fields of each GPU by ``nvidia-smi``, such as ``name,driver_version``; empty without a GPU or driver."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
