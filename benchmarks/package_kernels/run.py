"""``python -m benchmarks.package_kernels.run SITE --out FILE``: `mtmc profile` on kernels of five packages.

SITE is a folder with the packages (``pip install --no-deps --target SITE ...``) and with what their modules import. A kernel
counts as read if its operations are listed and nothing raises; its compilation, and its accesses on example inputs where the
manifest has them, are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.kernels.opening import open_kernel
from mtmc_lsp.app.kernels.profile import profile_kernel, read_profile
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.app.target_file import OpenTarget, open_target, parse_request
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.targets import find_target, find_targets
from mtmc_lsp.source.triton.launch_sites import launch_forms

MANIFEST = Path(__file__).parent / "manifest.json"
MARK = b"triton.jit"


def kernels_of(folder: Path, count: int, other_hardware: str) -> Iterator[tuple[Path, str]]:
    """Kernels of a package, at most one of each file in turn, so that they are of many kinds.

    Helpers of kernels cannot be launched, so they are left out.

    Args:
        other_hardware: a pattern of paths of kernels that are not for NVIDIA GPUs.
    """
    files = [file for file in sorted(folder.rglob("*.py")) if MARK in file.read_bytes()]
    files = [file for file in files if not re.search(other_hardware, file.relative_to(folder).as_posix())]
    named = {file: _launchable(file) for file in files}
    most = max(map(len, named.values()), default=0)
    found = [(file, names[i]) for i in range(most) for file, names in named.items() if i < len(names)]
    step = max(1, len([names for names in named.values() if names]) // count)
    return iter(found[: step * count : step])


def _launchable(file: Path) -> list[str]:
    text, path = file.read_bytes(), str(file)
    forms = launch_forms(Outliner(path).outline(text, parse(text)), path, assumes=True)
    names = {form.launch.kernel for form in forms}
    return [t.qualname for t in find_targets(text, path) if t.kind is TargetKind.KERNEL and t.qualname in names]


def profile_text(file: Path, name: str, worker: Worker) -> dict[str, Any]:
    """Profile one kernel without example inputs."""
    began = time.monotonic()
    record: dict[str, Any] = {"kernel": name, "file": file.name, "read": False}
    try:
        profile = read_profile(open_target(parse_request(f"{file}::{name}", python=sys.executable)), worker)
        record["read"] = bool(profile.readings)
        record["operations"] = sum(len(reading.operations) for reading in profile.readings)
        record["compiled"] = [not report.error for report in profile.reports]
        record["assumed"] = {name: str(value) for name, value in profile.assumed.items()}
        record["compile_error"] = next((report.error[:200] for report in profile.reports if report.error), "")
    except MtmcError as error:
        record["error"] = error.message
    return {**record, "seconds": round(time.monotonic() - began, 1)}


def profile_inputs(file: Path, launcher: str, directive: str) -> dict[str, Any]:
    """Profile the kernels of a launcher with example inputs; the directive is only in memory."""
    began = time.monotonic()
    record: dict[str, Any] = {"launcher": launcher, "file": file.name, "read": False}
    try:
        opened = with_directive(file, launcher, directive)
        with KernelSession(open_kernel(opened)) as session:
            profile = profile_kernel(session)
        record["kernels"] = [reading.name for reading in profile.readings]
        record["accesses"] = len(profile.trace.accesses) if profile.trace is not None else 0
        record["compiled"] = [not report.error for report in profile.reports]
        record["read"] = bool(record["accesses"])
    except MtmcError as error:
        record["error"] = error.message
    return {**record, "seconds": round(time.monotonic() - began, 1)}


def with_directive(file: Path, launcher: str, directive: str) -> OpenTarget:
    """The file with a directive above a launcher."""
    opened = open_target(parse_request(f"{file}::{launcher}", python=sys.executable))
    lines = opened.text.splitlines(keepends=True)
    lines.insert(opened.definition.start_line - 1, f"# mtmc: {directive}\n".encode())
    text = b"".join(lines)
    return replace(opened, text=text, definition=find_target(text, str(file), launcher))


def main() -> None:
    """Profile the kernels of the manifest, and write one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    os.environ.update(manifest["variables"])
    build = current_build()
    counts = {"kernels": 0, "read": 0, "compiled": 0, "launchers": 0, "observed": 0}
    with options.out.open("w", encoding="utf-8") as stream:
        for package in manifest["packages"]:
            folder = (options.site / package["folder"]).resolve()
            with Worker(sys.executable, cwd=str(folder.parent)) as worker:
                for file, name in kernels_of(folder, package["kernels"], manifest["other_hardware"]):
                    record = {"package": package["name"], **profile_text(file, name, worker)}
                    stream.write(json.dumps({**record, "commit": build.commit}) + "\n")
                    stream.flush()
                    counts["kernels"] += 1
                    counts["read"] += record["read"]
                    counts["compiled"] += bool(record.get("compiled")) and all(record["compiled"])
        for item in manifest["observed"]:
            file = (options.site / item["folder"] / item["file"]).resolve()
            record = profile_inputs(file, item["launcher"], item["directive"])
            stream.write(json.dumps({**record, "commit": build.commit}) + "\n")
            counts["launchers"] += 1
            counts["observed"] += record["read"]
    print(", ".join(f"{name} {count}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
