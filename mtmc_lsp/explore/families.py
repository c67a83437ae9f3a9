"""The family and the origin of each program of a suite.

Programs of our generator are in a folder whose ``pyproject.toml`` names the project ``mtmc-programs``, one folder for each
family. Only they are stored with their source. In any other suite a family is the package of an installed program, the folder in
the suite, or the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtmc_lsp.app.bench.manifest import is_manifest_folder, read_manifests
from mtmc_lsp.app.bench.suite import Problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT_FILE, GENERATED_PROJECT = "pyproject.toml", "mtmc-programs"
GENERATED = "generated"
"""The origin of programs of our generator."""


@dataclass(frozen=True)
class Families:
    """Says where the programs of a suite come from."""

    origin: str
    """:data:`GENERATED`, or the name of the suite."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Names of packages by the names of their programs."""

    @property
    def stores_source(self) -> bool:
        """Whether we generated the programs, so that their text may be stored."""
        return self.origin == GENERATED

    def family(self, problem: Problem) -> str:
        """The family of a program."""
        return self.packages.get(problem.name) or problem.name.partition("::")[0].partition("/")[0]


def families_of(place: Path) -> Families:
    """The families of a suite: its folder, or its only file."""
    folder = place.resolve()
    if folder.is_dir() and _project(folder) == GENERATED_PROJECT:
        return Families(GENERATED)
    if folder.is_dir() and is_manifest_folder(folder):
        return Families(folder.name, {entry.name: entry.package for entry in read_manifests(folder)})
    return Families(folder.stem)


def _project(folder: Path) -> str:
    """The name of the project in a folder; empty if none is named."""
    try:
        table = tomllib.loads((folder / PROJECT_FILE).read_text(encoding="utf-8"))
        return str(table["project"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
