"""Renders a captured graph by a schedule and runs it under Triton's interpreter, in a worker of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.local import LocalMeasurer
from mtmc_lsp.micro.builtin.coder import BuiltinCoder


def fused(capture: Capture, source: str, config: Mapping[str, object] | None = None, nodes=None) -> Candidate:
    """All nodes (or those named) as one kernel."""
    coder = BuiltinCoder()
    region = tuple(nodes or (node.name for node in capture.graph.nodes))
    action = MacroAction(ActionKind.FUSE, region, (0, 0), {"config": dict(config or {})})
    return coder.write(capture, coder.start(capture, source), action)


def verified(capture: Capture, candidate: Candidate) -> Verdict:
    """The candidate's verdict by the interpreter."""
    measurer = LocalMeasurer(capture, sys.executable, archs=("sm_90",), seed=7)
    try:
        return measurer.verify(candidate)
    finally:
        measurer.close()
