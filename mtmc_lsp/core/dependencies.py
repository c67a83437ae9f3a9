"""What a version depends on beside the target's own text: globals, helper functions, class attributes, environment variables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DependencyKind(Enum):
    """What is compared to see whether a dependency changed."""

    VALUE = "value"
    """A plain Python value, compared by type and value."""
    CODE = "code"
    """A function, compared by its syntax tree."""
    ENVIRONMENT = "environment"
    """An environment variable, compared by its text."""
    DEFINITION = "definition"
    """Any other object: only the source that defines it is compared, by the editor."""


@dataclass(frozen=True)
class Dependency:
    """Something outside the target's arguments that the graph was built from."""

    name: str
    """As users read it: ``K``, ``cfg.SCALE``, ``Block.forward``, ``$MODE``."""
    kind: DependencyKind
    access: str = ""
    """Python expression for it in the target's module; empty where the guard cannot check it or need not."""
    value: str = ""
    """``repr`` of a value, the text of an environment variable."""
    type: str = ""
    """Class name of a value; empty for an environment variable that is not set."""
    digest: str = ""
    """:func:`mtmc_lsp.core.source_digest.source_digest` of a function."""
    path: str = ""
    """Absolute path of the file that defines it; empty where no file does."""
    qualname: str = ""
    """Name of the definition in that file: ``K``, ``Block.forward``."""
    line: int = 0
    """1-based line of the definition when it was recorded, 0 where it is unknown."""
    definition: str = ""
    """Digest of the defining statements' text; the editor compares it without running any code."""
