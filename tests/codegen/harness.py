"""Renders a captured graph by a schedule and runs it under Triton's interpreter, in workers that all tests share."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.schedule.configs import KernelConfig
from mtmc_lsp.verify.cases import AUTOGRAD, FLOAT64, Case, verification_cases
from tests.codegen.checker import Checker

SIZES = 4
"""Verification begins with the workload's sizes, odd ones, and two small ones; then come the distributions of values."""


@lru_cache
def _checker() -> Checker:
    made = Checker(Path(tempfile.mkdtemp(prefix="mtmc-tests-")))
    atexit.register(made.close)
    return made


def fused(
    capture: Capture, source: str, config: KernelConfig | Mapping[str, object] | None = None, nodes=None
) -> Candidate:
    """All nodes (or those named) as one kernel."""
    coder = BuiltinCoder()
    region = tuple(nodes or (node.name for node in capture.graph.nodes))
    action = MacroAction(ActionKind.FUSE, region, (0, 0), {"config": to_json(config or {})})
    return coder.write(capture, coder.start(capture, source), action)


def some_cases(capture: Capture) -> list[Case]:
    """The different sizes, and the hardest values; what verification does beside that has tests of its own."""
    own = verification_cases(capture, interpreted=True, seed=7)
    inside = [case for case in own if case.kind not in (AUTOGRAD, FLOAT64) and all(case.sizes.values())]
    return [*inside[:SIZES], *(case for case in inside[SIZES:] if case.distribution in ("mixed", "constant"))]


def verified(capture: Capture, candidate: Candidate) -> Verdict:
    """The candidate's verdict by the interpreter."""
    wrong = _checker().first_wrong(capture, candidate, some_cases(capture))
    return Verdict(VerdictStatus.INCORRECT if wrong else VerdictStatus.CORRECT, (), "interpreter", reason=wrong)


def compile_errors(capture: Capture, candidate: Candidate, archs: Sequence[str]) -> list[str]:
    """What the compiler says against the candidate's kernels for some architectures."""
    return _checker().compile_errors(capture, candidate, archs)
