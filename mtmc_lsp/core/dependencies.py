"""Dependencies of a version beyond the target's text: globals, helper functions, class attributes, environment variables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DependencyKind(Enum):
    """How a change of a dependency is detected."""

    VALUE = "value"
    """A plain Python value, compared by type and value."""
    CODE = "code"
    """A function, compared by its syntax tree."""
    ENVIRONMENT = "environment"
    """An environment variable, compared by its text."""
    DEFINITION = "definition"
    """Any other object: only its defining source is compared, and only by the editor."""


@dataclass(frozen=True)
class Dependency:
    """A value or function that the graph depends on and that is not an argument of the target."""

    name: str
    """Name shown to the user: ``K``, ``cfg.SCALE``, ``Block.forward``, ``$MODE``."""
    kind: DependencyKind
    access: str = ""
    """Python expression for it in the target's module; empty if the guard does not check it."""
    value: str = ""
    """``repr`` of a value, or the text of an environment variable."""
    type: str = ""
    """Class name of a value; empty for an unset environment variable."""
    digest: str = ""
    """:func:`mtmc_lsp.core.source_digest.source_digest` of a function."""
    path: str = ""
    """Absolute path of the file that defines it; empty if none does."""
    qualname: str = ""
    """Name of the definition in that file: ``K``, ``Block.forward``."""
    line: int = 0
    """1-based line of the definition when it was recorded; 0 if unknown."""
    definition: str = ""
    """Digest of the defining statements; the editor compares it without running code."""
