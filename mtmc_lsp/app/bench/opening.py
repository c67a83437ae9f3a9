"""Opens a suite: a folder, one file, or a suite of this tool's repository; copies files of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

from mtmc_lsp.app.bench.manifest import is_manifest_folder, read_manifests
from mtmc_lsp.app.bench.package_copies import copy_targets, manifest_problems
from mtmc_lsp.app.bench.suite import Problem, find_problems, problems_of_file
from mtmc_lsp.app.interpreter import checked_python, find_python
from mtmc_lsp.app.provenance import PACKAGE
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.process.project_files import FOLDER

SUITES = PACKAGE.parent / "benchmarks"
"""The suites of the repository."""


def named_suite(name: str) -> Path:
    """The folder of a suite of the repository.

    Raises:
        RequestError: there is none.
    """
    if not (SUITES / name).is_dir():
        raise RequestError(
            f"there is no suite {name}",
            remedy="Suites are folders of benchmarks/ in the repository of mtmc-lsp: clone it.",
        )
    return SUITES / name


def suite_problems(place: Path, half: str, out: Path) -> list[Problem]:
    """The problems of a folder or a file: those that its manifests name, or those in its files.

    Args:
        half: ``looking`` or ``reporting``, of a suite of installed packages; empty for both.
        out: the file or folder of results; copies of packages go beside it.

    Raises:
        RequestError: there are none.
    """
    if place.is_dir() and is_manifest_folder(place):
        entries = [entry for entry in read_manifests(place) if half in ("", entry.half)]
        return manifest_problems(entries, out.resolve().parent / FOLDER / "suites" / place.resolve().name)
    if half:
        raise RequestError("--half is for suites of installed packages", remedy="Use --shard 1/2.")
    return problems_of_file(place) if place.is_file() else find_problems(place)


def with_files(problems: list[Problem], place: Path, python: str) -> list[Problem]:
    """The problems whose files exist; those of installed packages are copied first, and a line tells what is skipped."""
    if place.is_file() or not is_manifest_folder(place):
        return problems
    names = {problem.name for problem in problems}
    entries = [entry for entry in read_manifests(place) if entry.name in names]
    copies = copy_targets(entries, place, problems[0].suite, python)
    if copies.skipped:
        print(
            f"{len(copies.skipped)} of {len(problems)} problems are skipped, because their packages are not installed: "
            f"{copies.remedy}",
            file=sys.stderr,
        )
    return [problem for problem in problems if problem.name not in copies.skipped]


def suite_python(place: Path, problem: Problem, settings: Settings, python: str) -> str:
    """The interpreter of the suite's project, unless ``python`` names one."""
    is_manifest = place.is_dir() and is_manifest_folder(place)
    project_file = place.resolve() / "manifest" if is_manifest else problem.path
    return checked_python(python or find_python(project_file, settings))
