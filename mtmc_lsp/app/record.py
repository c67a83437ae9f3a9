"""Run a user's command with the recorder, and store the recorded calls in the project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mtmc_lsp.capture.recorder
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.capture.recorded_calls import RECORDS, RecordedTarget, merge_records, store_records
from mtmc_lsp.capture.recorded_launches import LAUNCHES, RecordedKernel, merge_launches, store_launches
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.targets import find_target, find_targets

HOOK = Path(mtmc_lsp.capture.recorder.__file__).parent / "hook"
SHELL_SIGNAL = 128
"""Added to the signal's number in the exit code of a command that a signal ended, as in shells."""


@dataclass(frozen=True)
class Recording:
    """The result of a recorded command."""

    command: tuple[str, ...]
    exit_code: int
    """The exit code of the command; 128 plus the signal's number if a signal ended it."""
    targets: tuple[RecordedTarget, ...]
    """The most frequently called target first."""
    python_seen: bool
    """Whether the recorder ran in any Python process of the command."""
    kernels: tuple[RecordedKernel, ...] = ()
    """Triton kernels of the project that were launched; the most frequently launched one first."""


def record(command: Sequence[str], folder: Path, specs: Sequence[str] = (), *, quiet: bool = False) -> Recording:
    """Run a command to its end, and record how the project's functions are called with tensors, and its kernels launched.

    Args:
        folder: where it runs; the functions of this folder's project are recorded.
        specs: ``FILE::NAME`` of the targets to record; by default all.
        quiet: whether the command's standard output is redirected to standard error.

    Raises:
        RequestError: the command or a target does not exist.
    """
    root = project_root(folder / "any.py")
    requested = _wanted(specs)
    # A process that outlives the command may write while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="mtmc-record-", ignore_cleanup_errors=True) as out:
        settings = {"root": str(root), "out": out, "targets": requested}
        code = _run(command, folder, {**_environment(), "MTMC_RECORD": json.dumps(settings)}, quiet)
        files = sorted(Path(out).glob("*.json"))
        recorded = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        launched = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(out).glob("*.launches"))]
    targets, kernels = _known(merge_records(recorded)), merge_launches(launched)
    paths = [*(target.path for target in targets), *(kernel.path for kernel in kernels)]
    for project in {project_root(Path(path)) for path in paths}:
        # Opening the store creates the folder with its .gitignore.
        with Store(project / FOLDER) as store:
            in_project = [target for target in targets if project_root(Path(target.path)) == project]
            store_records(store.folder / RECORDS, in_project)
            kernels_in_project = [kernel for kernel in kernels if project_root(Path(kernel.path)) == project]
            store_launches(store.folder / LAUNCHES, kernels_in_project)
    return Recording(tuple(command), code, tuple(targets), bool(files), tuple(kernels))


def _wanted(specs: Sequence[str]) -> dict[str, list[str]]:
    requested: dict[str, list[str]] = {}
    for spec in specs:
        file, separator, name = spec.partition("::")
        path = Path(file).resolve()
        if not separator or not name:
            raise RequestError(f"cannot read {spec!r}", remedy="Write --target FILE::NAME.")
        if not path.is_file():
            raise RequestError("no such file", where=Location(file), remedy="Check the path.")
        target = find_target(path.read_bytes(), str(path), name)
        called = f"{target.qualname}.forward" if target.kind is TargetKind.MODULE else target.qualname
        requested.setdefault(str(path), []).append(called)
    return requested


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{HOOK}{os.pathsep}{path}" if path else str(HOOK)}


def _run(command: Sequence[str], folder: Path, environment: dict[str, str], quiet: bool) -> int:
    try:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr if quiet else None)
    except OSError as error:
        raise RequestError(
            f"cannot start {command[0]}: {error.strerror}", remedy="Write mtmc record -- python your_program.py."
        ) from None
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else SHELL_SIGNAL - code
        except KeyboardInterrupt:
            # The terminal interrupts the command too. The command decides how it ends; its records are kept.
            continue


def _known(targets: Sequence[RecordedTarget]) -> list[RecordedTarget]:
    """The targets that can be optimized: the recorder also sees functions that are no targets."""
    offered: dict[str, set[str]] = {}
    for target in targets:
        if target.path not in offered:
            text = Path(target.path).read_bytes()
            offered[target.path] = {item.qualname for item in find_targets(text, target.path)}
    return [target for target in targets if target.qualname in offered[target.path]]
