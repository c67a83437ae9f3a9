"""Attention with relative positions: its scores are the sum of two products, so its kernels are planned around both."""

from __future__ import annotations

import pytest

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import CannotFuse, RegionKind, analyse
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from tests.planning.situations import H200, start

TEXT = """import torch
# mtmc: q=f32[B,H,N,16] k=f32[B,H,N,16] v=f32[B,H,N,16] table=f32[9,16] B=2 H=3 N=24
def attend(q, k, v, table):
    positions = torch.arange(q.shape[2], device=q.device)
    distances = (positions[:, None] - positions[None, :]).clamp(-4, 4) + 4
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.25
    scores = scores + torch.einsum("bhid,ijd->bhij", q, table[distances]) * 0.25
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
"""
GATHERED = """import torch
# mtmc: q=f32[B,H,N,16] k=f32[B,H,N,16] v=f32[B,H,N,16] relative=f32[N,N,16] B=2 H=3 N=24
def attend(q, k, v, relative):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("bhid,ijd->bhij", q, relative)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
"""
LARGE = TEXT.replace("B=2 H=3 N=24", "B=4 H=8 N=512")
WIDE = """import torch
# mtmc: q=f32[N,320] k=f32[N,320] v=f32[N,16] N=24
def attend(q, k, v):
    return (q @ k.t()).softmax(-1) @ v
"""


def state(capture: Capture, candidate: Candidate, history: list[Step], has_gpu: bool) -> State:
    return State(capture, candidate, tuple(history), H200, has_gpu)


def behind(graph: Graph, name: str) -> set[str]:
    """The node and all nodes that it is computed from."""
    node = graph.named.get(name)
    return {name}.union(*(behind(graph, ref.name) for ref in node.inputs())) if node is not None else set()


def test_a_product_over_other_rows_is_no_attention_with_the_weighted_sum(captured) -> None:
    """The second product of the scores has a batch of queries, the weighted sum has one of heads."""
    graph = captured(GATHERED, "attend").graph
    ir = ir_of(graph, Schedule())
    scores, relative, weighted = [node.name for node in graph.nodes if node.word in ("bmm", "mm", "matmul")]
    around_relative = {node.name for node in graph.nodes} - behind(graph, scores)
    assert {relative, weighted} <= around_relative
    with pytest.raises(CannotFuse, match="two products of an attention run over different rows or keys"):
        analyse(ir, around_relative)
    around_scores = {node.name for node in graph.nodes} - behind(graph, relative)
    assert analyse(ir, around_scores).kind is RegionKind.ATTENTION


def test_a_head_that_is_too_large_for_one_kernel_is_not_planned_as_one(captured) -> None:
    capture = captured(WIDE, "attend")
    with pytest.raises(CannotFuse, match="head size of 320 is above the supported 256"):
        analyse(ir_of(capture.graph, Schedule()), [node.name for node in capture.graph.nodes])


@pytest.mark.parametrize("has_gpu", [True, False])
def test_every_planned_step_can_be_written(has_gpu: bool, captured) -> None:
    capture = captured(LARGE, "attend")
    candidate, kinds = start(capture, LARGE), []
    planner, history = RooflinePlanner(), list[Step]()
    while len(history) < 8 and isinstance(
        action := planner.propose(state(capture, candidate, history, has_gpu)), MacroAction
    ):
        if "variants" in action.params:
            history.append(Step(len(history) + 1, action, StepStatus.REJECTED, ""))
            continue
        candidate = BuiltinCoder().write(capture, candidate, action)
        history.append(Step(len(history) + 1, action, StepStatus.ACCEPTED, "", candidate=candidate))
        kinds.append(action.kind.value)
    assert {"tensor-core", "fuse"} <= set(kinds), "both a product and the softmax got a kernel"
