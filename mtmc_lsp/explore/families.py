"""The family and the origin of each program of a suite.

A folder of generated programs holds ``programs.json``, which its generator writes::

    {"origin": "generated", "families": {"norm_17": "norm", "attention_3::attend": "attention"}}

The keys are names of programs as ``mtmc bench`` shows them, or their part before ``::``. Only programs of such a folder are
stored with their source. In any other suite, a family is the package of an installed program, the folder in the suite, or the
file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.core.errors import Location, RequestError

GENERATED_FILE = "programs.json"
GENERATED = "generated"


@dataclass(frozen=True)
class Families:
    """Says where the programs of a suite come from."""

    origin: str
    """``generated``, or the name of the suite."""
    by_name: Mapping[str, str] = field(default_factory=dict)
    """Families by the name of the program."""
    are_packages: bool = False
    """Whether the programs are those of installed packages."""

    @property
    def stores_source(self) -> bool:
        """Whether we generated the programs, so that their text may be stored."""
        return self.origin == GENERATED

    def family(self, problem: Problem) -> str:
        """The family of a program."""
        file = problem.name.partition("::")[0]
        known = self.by_name.get(problem.name) or self.by_name.get(file)
        if known:
            return known
        return file.partition(".")[0] if self.are_packages else file.partition("/")[0]


def families_of(place: Path, *, are_packages: bool = False) -> Families:
    """The families of a suite.

    Args:
        place: the suite's folder, or its only file.

    Raises:
        RequestError: the file of a generator is damaged.
    """
    folder = place if place.is_dir() else place.parent
    file = folder / GENERATED_FILE
    if not file.is_file():
        return Families(place.resolve().stem if place.is_file() else place.resolve().name, are_packages=are_packages)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        families = {str(name): str(family) for name, family in data["families"].items()}
        origin = str(data["origin"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        remedy = "Generate the programs again, or remove the file."
        raise RequestError("does not list families of programs", where=Location(str(file)), remedy=remedy) from None
    return Families(origin, families)
