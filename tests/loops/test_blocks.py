"""Loops that combine the elements of a small state become one kernel, with the results of the user's code."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import NOT_LAUNCHED
from tests.codegen.harness import _checker, compile_errors, verified
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


@pytest.mark.parametrize(("name", "width"), [("viterbi", "N"), ("ctc", "S"), ("running", "C")])
def test_a_block_is_right_for_other_sizes_up_to_its_width(name: str, width: str, captured) -> None:
    """Wider states do not fit in the block, so the guard refuses and the user's code runs."""
    capture = captured(BLOCKS, name)
    candidate = fully_fused(capture, start(capture, BLOCKS))
    block = 1 << (capture.graph.sizes[width] - 1).bit_length()
    for size in (block - 1, block, block + 1):
        for steps in (2, 33):
            case = Case({**capture.graph.sizes, width: size, "T": steps}, "normal", 3)
            (failure,) = _checker().failures(capture, [candidate], case)
            assert failure == (NOT_LAUNCHED if size > block else ""), case


@pytest.mark.parametrize("name", ["viterbi", "log_partition", "sinkhorn"])
def test_a_block_propagates_infinities_and_nan_as_the_users_code(name: str, captured) -> None:
    capture = captured(BLOCKS, name)
    candidate = fully_fused(capture, start(capture, BLOCKS))
    for distribution in ("mixed", "constant", "large"):
        (failure,) = _checker().failures(capture, [candidate], Case(dict(capture.graph.sizes), distribution, 5))
        assert failure == ""
