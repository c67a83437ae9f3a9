"""Loops that are trained: the backward pass is a loop, too, with the gradients of the user's code."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.workload import Capture
from tests.codegen.harness import compile_errors, verified
from tests.loops.training_examples import NAMES, TRAINED
from tests.planning.situations import act, fully_fused, schedule_of, start


def backward_loop(capture: Capture) -> Loop:
    graph = capture.graph
    (node,) = [node for node in graph.nodes if node.loop is not None and node.name in graph.backward_nodes]
    return node.loop


@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_the_users_code(name: str, captured) -> None:
    capture = captured(TRAINED, name)
    graph = capture.graph
    assert graph.backward is not None and "unrolled" not in " ".join(capture.workload.assumed)
    loops = [node.name in graph.backward_nodes for node in graph.nodes if node.loop is not None]
    assert loops == ([False, False, True, True] if name == "two_layers" else [False, True])
    candidate = fully_fused(capture, start(capture, TRAINED))
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


def test_the_backward_loop_runs_from_the_last_step_to_the_first(captured) -> None:
    loop = backward_loop(captured(TRAINED, "recurrence"))
    assert str(loop.count) == "T"
    assert {(str(item.position.first), item.position.step) for item in loop.inputs if item.position} == {("T - 1", -1)}


def test_products_that_no_step_waits_for_are_outside_of_both_loops(captured) -> None:
    """Each pass has three products. Only one runs in each iteration: that with the state, or with its gradient."""
    graph = captured(TRAINED, "elman").graph
    inside = [[node.word for node in each.loop.nodes].count("mm") for each in graph.nodes if each.loop is not None]
    assert inside == [1, 1]
    gradient = next(ref for ref, name in zip(graph.gradients, graph.backward.gradients, strict=True) if name == "u")
    assert graph.node(gradient.name).word == "mm"


def test_a_sum_over_the_batch_is_behind_the_loop(captured) -> None:
    loop = backward_loop(captured(TRAINED, "leaky"))
    assert "sum" not in {node.word for node in loop.nodes}


def test_both_passes_can_be_parallel_scans(captured) -> None:
    capture = captured(TRAINED, "recurrence")
    candidate = fully_fused(capture, start(capture, TRAINED))
    plans = [plan for plan in schedule_of(candidate).kernels if hasattr(plan.config, "segments")]
    assert len(plans) == 2
    config = {"rows": 1, "block": 8, "warps": 1, "steps": 16, "segments": 1}
    for plan in plans:
        candidate = act(capture, candidate, ActionKind.PARALLEL_SCAN, *plan.nodes, config=config)
    assert candidate.code.block.count("tl.associative_scan(") == 2
    assert verified(capture, candidate).reason == ""


def test_a_table_whose_size_only_the_backward_pass_needs_is_known_there(captured) -> None:
    text = """
import torch.nn.functional as F


# mtmc: tokens=i64[B,T]@0..9 table=f32[V,D] B=3 T=4 D=5 V=10 grad=table
def looked_up(tokens, table):
    return F.embedding(tokens, table) * 2
"""
    capture = captured(text, "looked_up")
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""
