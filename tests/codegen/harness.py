"""Renders a captured graph with a schedule and runs it under Triton's interpreter, in worker processes that all tests share."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch

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
"""Number of leading verification cases that vary sizes: the workload's, odd ones and two small ones."""


@lru_cache
def _checker() -> Checker:
    checker = Checker(Path(tempfile.mkdtemp(prefix="mtmc-tests-")))
    atexit.register(checker.close)
    return checker


def fused(
    capture: Capture, source: str, config: KernelConfig | Mapping[str, object] | None = None, nodes=None
) -> Candidate:
    """Fuse all nodes (or ``nodes``) into one kernel."""
    coder = BuiltinCoder()
    region = tuple(nodes or (node.name for node in capture.graph.nodes))
    action = MacroAction(ActionKind.FUSE, region, (0, 0), {"config": to_json(config or {})})
    return coder.write(capture, coder.start(capture, source), action)


def some_cases(capture: Capture) -> list[Case]:
    """The size cases and the hardest value distributions. Other checks of verification have their own tests."""
    cases = verification_cases(capture, interpreted=True, seed=7)
    forward_cases = [case for case in cases if case.kind not in (AUTOGRAD, FLOAT64) and all(case.sizes.values())]
    return [
        *forward_cases[:SIZES],
        *(case for case in forward_cases[SIZES:] if case.distribution in ("mixed", "constant")),
    ]


def verified(capture: Capture, candidate: Candidate) -> Verdict:
    """The candidate's verdict under the interpreter."""
    failure = _checker().first_failure(capture, candidate, some_cases(capture))
    return Verdict(VerdictStatus.INCORRECT if failure else VerdictStatus.CORRECT, (), "interpreter", reason=failure)


def compile_errors(capture: Capture, candidate: Candidate, archs: Sequence[str]) -> list[str]:
    """Compiler errors of the candidate's kernels for some architectures."""
    return _checker().compile_errors(capture, candidate, archs)


def results(capture: Capture, candidate: Candidate, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The candidate's results on these inputs under the interpreter."""
    return _checker().results(capture, candidate, inputs)
