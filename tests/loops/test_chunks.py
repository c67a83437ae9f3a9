"""Loops over time steps run as products of chunks of iterations, with the results of the user's code."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from tests.codegen.harness import compile_errors, verified
from tests.loops.chunk_examples import CHUNKS, DELTA_RULES, NAMES
from tests.planning.situations import act, fully_fused, schedule_of, start


def chunked(capture, text: str, **config: int):
    candidate = fully_fused(capture, start(capture, text))
    (plan,) = [plan for plan in schedule_of(candidate).kernels if hasattr(plan.config, "segments")]
    changes = {"rows": 1, "block": 16, "warps": 4, "stages": 2, "chunk": 16, **config}
    return act(capture, candidate, ActionKind.CHUNK_PRODUCTS, *plan.nodes, config=changes)


@pytest.mark.parametrize("name", [*NAMES, *DELTA_RULES])
def test_chunks_have_the_results_of_the_users_loop(name: str, captured) -> None:
    capture = captured(CHUNKS, name)
    candidate = chunked(capture, CHUNKS)
    print(candidate.code.block)
    assert "tl.dot(" in candidate.code.block
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []
