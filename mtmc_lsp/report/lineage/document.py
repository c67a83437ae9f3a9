"""The lineage of an evolution as a JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.evolve.lineage import Lineage, Setup, Version
from mtmc_lsp.report.documents import document

if TYPE_CHECKING:
    from mtmc_lsp.evolve.run import Evolved


def version_fields(version: Version) -> dict[str, object]:
    """A version without its whole file and its schedule."""
    fields = {name: value for name, value in vars(version).items() if name not in ("candidate", "key")}
    return {**fields, "title": version.title, "gain": version.gain}


def lineage_fields(run: str, setup: Setup, lineage: Lineage) -> dict[str, object]:
    """The fields of a lineage."""
    return {
        "run": run,
        "setup": setup,
        "versions": [version_fields(version) for version in lineage.versions],
        "generations": lineage.generations,
        "best": lineage.best().number,
        "spent": lineage.spent,
        "end_reason": lineage.end_reason,
    }


def lineage_document(run: str, setup: Setup, lineage: Lineage) -> str:
    """What ``mtmc lineage --json`` prints."""
    return document(**lineage_fields(run, setup, lineage))


def evolved_document(evolved: Evolved) -> str:
    """What ``mtmc evolve --json`` prints: the lineage, and the run with its steps as ``mtmc optimize --json`` has it."""
    fields = lineage_fields(evolved.run, evolved.setup, evolved.lineage)
    return document(**fields, result=to_json(evolved.result), learned=evolved.learned)
