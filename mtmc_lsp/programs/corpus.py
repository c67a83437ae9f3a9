"""Files of programs to explore, with their families: generated ones, and the public suite's looking half.

The reporting half is never read here, nor are ``benchmarks/everyday``, ``benchmarks/unseen``, ``examples`` and KernelBench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.app.bench.manifest import read_manifests
from mtmc_lsp.app.bench.package_copies import copy_targets, manifest_problems
from mtmc_lsp.app.bench.suite import Problem, find_problems
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.process.project_files import make_folder, replace_bytes
from mtmc_lsp.programs.generator import GeneratedProgram

HALF = "looking"
GENERATED, PUBLIC = "generated", "public"
PROJECT_FILE = "pyproject.toml"
PROJECT = "[project]\nname = 'mtmc-programs'\nversion = '0'\n"


@dataclass(frozen=True)
class ProgramFile:
    """A target of the corpus."""

    problem: Problem
    family: str
    origin: str
    """``generated`` or ``public``."""
    source: str
    """The text of a generated file; empty for the code of others."""


def write_programs(programs: Sequence[GeneratedProgram], folder: Path) -> None:
    """Write the files, one folder per family. The folder becomes a project: settings and modules around it do not apply.

    Raises:
        RequestError: the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError("is not an empty folder", where=Location(str(folder)), remedy="Name a new folder.")
    make_folder(folder)
    replace_bytes(folder / PROJECT_FILE, PROJECT.encode())
    for program in programs:
        path = folder / program.file
        make_folder(path.parent)
        replace_bytes(path, program.source.encode())


def generated_programs(folder: Path) -> list[ProgramFile]:
    """The programs in a folder that :func:`write_programs` wrote.

    Raises:
        RequestError: there is no such folder, or it contains no program.
    """
    problems = [replace(item, target=item.target.removesuffix(".forward")) for item in find_problems(folder)]
    return [
        ProgramFile(item, item.path.parent.name, GENERATED, item.path.read_text(encoding="utf-8")) for item in problems
    ]


def public_programs(suite: Path, work: Path, python: str) -> list[ProgramFile]:
    """The looking half of a suite of installed packages; a package is a family.

    Args:
        suite: the folder with the manifests.
        work: the folder of the copies.
        python: the interpreter that has the packages. Targets of other packages are left out.

    Raises:
        EnvironmentNotAble: an installed package has another version.
    """
    entries = [entry for entry in read_manifests(suite) if entry.half == HALF]
    copies = copy_targets(entries, suite, work, python)
    pairs = zip(entries, manifest_problems(entries, work), strict=True)
    return [ProgramFile(item, entry.package, PUBLIC, "") for entry, item in pairs if item.name not in copies.skipped]
