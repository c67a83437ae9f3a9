"""The request that captures a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.workload import ArgumentSpec, Capture, Workload
from mtmc_lsp.process.protocol import Request

NO_BACKWARD = "the kernels get no backward pass, so calls that record gradients run your code: "
"""The beginning of the note on a workload that trains a target whose backward pass is not supported; the reason follows."""


@dataclass(frozen=True)
class CaptureRequest(Request[Capture], command="capture.capture"):
    """Run a target on its workload and export its graph."""

    workload: Workload
    variables: Mapping[int, str]
    """1-based line number to the variable that the line assigns."""
    source: str | None = None
    """Text of the file without generated code of earlier runs; ``None`` reads the file."""


@dataclass(frozen=True)
class LocalValue:
    """A local variable of the target where a statement runs for the first time."""

    name: str
    spec: ArgumentSpec | None = None
    """How to create such a value; ``None`` if it is neither a tensor, nor a constant, nor a container of these."""
    kind: str = ""
    """The name of its class, or of the class of an item, where ``spec`` is ``None``."""


@dataclass(frozen=True)
class LocalValues:
    """The local variables of one call of the target, at each statement that ran."""

    statements: Mapping[int, tuple[LocalValue, ...]]
    """By number of the statement."""
    sizes: Mapping[str, int]
    """Values of the named sizes in the specs: those of the workload, and further ones that vary between calls."""


@dataclass(frozen=True)
class LocalValuesRequest(Request[LocalValues], command="capture.local_values"):
    """Call a target on its workload, and describe its local variables at each statement."""

    workload: Workload
    source: str | None = None
    """As in :class:`CaptureRequest`."""
