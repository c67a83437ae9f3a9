"""The request that captures a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.workload import Capture, Workload
from mtmc_lsp.process.protocol import Request


@dataclass(frozen=True)
class CaptureRequest(Request[Capture], command="capture.capture"):
    """Run a target on its workload and export its graph."""

    workload: Workload
    variables: Mapping[int, str]
    """1-based line number to the variable that the line assigns."""
    source: str | None = None
    """Text of the file without generated code of earlier runs; ``None`` reads the file."""
