"""What a check finds, and what it knows of the file around a statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tree_sitter import Node


class Severity(Enum):
    """How bad it is."""

    ERROR = "error"
    """It does not compile, or is wrong."""
    WARNING = "warning"
    """It is wrong for some inputs."""
    HINT = "hint"
    """It may be slow, or wrong in cases that may not occur here."""


@dataclass(frozen=True)
class Fix:
    """A change that is safe to make."""

    title: str
    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Finding:
    """One report; offsets are bytes of the statement that was checked."""

    code: str
    severity: Severity
    start: int
    end: int
    message: str
    fix: Fix | None = None


@dataclass(frozen=True)
class Context:
    """What a file says of its names."""

    imports: Mapping[str, str]
    """Imported name to the dotted path behind it."""
    kernels: frozenset[str]
    """Names of its ``@triton.jit`` functions."""
    launched: frozenset[str]
    """Names that are launched somewhere in it: ``name[grid](...)``."""
    called: frozenset[str]
    """Names that are called somewhere in it: ``name(...)``, ``other.name(...)``."""
    minds_layout: bool
    """Whether it speaks of contiguous tensors anywhere."""


def found(code: str, severity: Severity, node: Node, message: str, fix: Fix | None = None) -> Finding:
    """A finding about a node."""
    return Finding(code, severity, node.start_byte, node.end_byte, message, fix)
