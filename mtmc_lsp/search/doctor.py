"""What the tool needs from the machine, and what is there."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.search.session import find_python

PROBE = """
import json, platform
found = {"python": platform.python_version()}
for name in ("torch", "triton", "numpy"):
    try:
        found[name] = __import__(name).__version__
    except ImportError:
        found[name] = ""
if found["torch"]:
    import torch
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
print(json.dumps(found))
"""
LEAST = {"torch": (2, 11), "triton": (3, 6)}


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


def check_environment(python: str = "") -> list[Finding]:
    """Everything the tool needs, in the order in which to mend it."""
    here = Path.cwd()
    interpreter = python or find_python(here / "x.py", read_settings(here))
    found = _probe(interpreter)
    findings = [Finding("python", True, f"{found['python']} at {interpreter}")]
    for name, least in LEAST.items():
        version = str(found.get(name) or "")
        wanted = ".".join(map(str, least))
        ok = bool(version) and _numbers(version) >= least
        remedy = f"{interpreter} -m pip install '{name}>={wanted}'"
        findings.append(Finding(name, ok, version or "not installed", remedy))
    numpy = str(found.get("numpy") or "")
    findings.append(Finding("numpy", bool(numpy), numpy or "not installed", f"{interpreter} -m pip install numpy"))
    gpu = str(found.get("gpu") or "")
    without = "none: steps are verified by Triton's interpreter and compiled, never timed"
    findings.append(Finding("CUDA GPU", bool(gpu), gpu or without, "", required=False))
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "")
    remedy = "Install gcc: Triton builds its launcher with it on a GPU."
    findings.append(Finding("C compiler", bool(compiler), compiler or "none", remedy, required=bool(gpu)))
    return findings


def _probe(interpreter: str) -> dict[str, object]:
    try:
        done = subprocess.run([interpreter, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentNotAble(
            f"cannot run {interpreter}: {error}", remedy="Name an interpreter with --python."
        ) from None
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
