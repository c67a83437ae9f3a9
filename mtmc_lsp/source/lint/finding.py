"""Findings of the static checks, and the context of a checked statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tree_sitter import Node

from mtmc_lsp.source.outline import BlockParameter


class Severity(Enum):
    """Severity of a finding."""

    ERROR = "error"
    """The code does not compile or is wrong."""
    WARNING = "warning"
    """The code is wrong for some inputs."""
    HINT = "hint"
    """The code may be slow, or wrong in cases that may not occur here."""


@dataclass(frozen=True)
class Fix:
    """A safe edit that resolves the finding."""

    title: str
    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Finding:
    """One finding; offsets are in bytes, relative to the checked statement."""

    code: str
    severity: Severity
    start: int
    end: int
    message: str
    fix: Fix | None = None


@dataclass(frozen=True)
class Context:
    """Facts about the names in a file."""

    imports: Mapping[str, str]
    """Imported name to its dotted path."""
    kernels: frozenset[str]
    """Names of the ``@triton.jit`` functions."""
    launched: frozenset[str]
    """Names that are launched in the file: ``name[grid](...)``."""
    called: frozenset[str]
    """Names that are called in the file: ``name(...)``, ``other.name(...)``."""
    mentions_layout: bool
    """Whether the file mentions contiguous tensors."""
    blocks: tuple[BlockParameter, ...] = ()
    """The block sizes of the file's kernels."""


def finding_at(code: str, severity: Severity, node: Node, message: str, fix: Fix | None = None) -> Finding:
    """A finding for the source range of a node."""
    return Finding(code, severity, node.start_byte, node.end_byte, message, fix)
