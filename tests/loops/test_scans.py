"""Loops over time steps run as associative scans with the results of the user's code."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from tests.codegen.harness import compile_errors, verified
from tests.loops.examples import LOOPS
from tests.loops.scans import NAMES, SCANS
from tests.planning.situations import act, fully_fused, schedule_of, start

OTHERS = "recurrence advantages from_the_end moving_average selective_scan in_place two_back products counted half seen_so_far".split()
CASES = [(SCANS, name) for name in NAMES] + [(LOOPS, name) for name in OTHERS]


def scanned(capture, text: str, **config: int):
    candidate = fully_fused(capture, start(capture, text))
    (plan,) = [plan for plan in schedule_of(candidate).kernels if hasattr(plan.config, "segments")]
    changes = {"rows": 1, "block": max(8, plan.config.block if plan.config.block < 32 else 8), "warps": 1, **config}
    return act(capture, candidate, ActionKind.PARALLEL_SCAN, *plan.nodes, config=changes)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize(("text", "name"), CASES, ids=[name for _, name in CASES])
def test_a_scan_has_the_results_of_the_users_loop(text: str, name: str, segments: int, captured) -> None:
    capture = captured(text, name)
    candidate = scanned(capture, text, steps=16, segments=segments)
    assert "tl.associative_scan(" in candidate.code.block
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []
