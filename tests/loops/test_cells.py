"""Loops with matrix products in their body become one kernel, with the results of the user's code."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from tests.codegen.harness import compile_errors, verified
from tests.loops.cell_examples import CELLS, NAMES
from tests.planning.situations import H200, proposed, start


def fully_fused(capture, candidate):
    """Apply the fusions that the planner proposes for a GPU until there are none."""
    while actions := proposed(capture, candidate, ActionKind.FUSE, device=H200):
        candidate = BuiltinCoder().write(capture, candidate, actions[0])
    return candidate


def loops_of(graph):
    return [node for node in graph.nodes if node.loop is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_is_one_kernel_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(CELLS, name)
    assert len(loops_of(capture.graph)) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    candidate = fully_fused(capture, start(capture, CELLS))
    assert verified(capture, candidate).reason == ""
    assert len(re.findall(r"in tl\.range\(0, ", candidate.code.block)) == 1
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []
