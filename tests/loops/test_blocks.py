"""Loops that combine the elements of a small state become one kernel, with the results of the user's code."""

from __future__ import annotations

import re

import pytest

from tests.codegen.harness import compile_errors, verified
from tests.loops.block_examples import BLOCKS, NAMES
from tests.loops.test_cells import fully_fused, loops_of
from tests.planning.situations import start


@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_one_kernel_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(BLOCKS, name)
    assert len(loops_of(capture.graph)) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    candidate = fully_fused(capture, start(capture, BLOCKS))
    assert verified(capture, candidate).reason == ""
    assert len(re.findall(r"in tl\.range\(0, ", candidate.code.block)) == 1
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []
