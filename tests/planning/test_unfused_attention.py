"""Float32 attention decomposed into two products and a softmax, so that each product can use tensor cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import RegionKind, analyse
from mtmc_lsp.rewrites import ALGEBRA
from mtmc_lsp.rewrites.graph_editing import apply_edit
from tests.codegen.harness import verified
from tests.planning.situations import H200, fully_fused, operations, situation, start, with_algebra

TEXT = """import torch
import torch.nn.functional as F
# mtmc: q=f32[B,2,S,20] k=f32[B,2,T,20] v=f32[B,2,T,12] B=2 S=5 T=7
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v{more})
"""
OTHERS = {
    "a mask": (TEXT.replace("{more}", ", torch.ones(5, 7, dtype=torch.bool)"), "f32"),
    "causal": (TEXT.replace("{more}", ", is_causal=True"), "f32"),
    "fewer heads": (TEXT.replace("k=f32[B,2", "k=f32[B,1").replace("v=f32[B,2", "v=f32[B,1").replace("{more}", ", enable_gqa=True"), "f32"),
    "half precision": (TEXT.replace("f32", "bf16").replace("{more}", ""), "bf16"),
}  # fmt: skip
WIDE = """import torch
import torch.nn.functional as F
# mtmc: q=f32[B,H,S,1024] k=f32[B,H,S,1024] v=f32[B,H,S,1024] B=2 H=3 S=16
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
"""
RULE = next(rule for rule in ALGEBRA if rule.name == "unfused-attention")


@pytest.mark.parametrize("more", ["", ", scale=0.3"], ids=["usual scale", "scaled"])
def test_it_equals_attention(more: str, captured) -> None:
    text = TEXT.replace("{more}", more)
    capture = captured(text, "f")
    candidate = with_algebra(capture, start(capture, text), RULE.name)
    assert operations(capture, candidate) == ["transpose", "matmul", "mul", "softmax", "matmul"]
    verdict = verified(capture, fully_fused(capture, candidate))
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_stays_with_the_library(name: str, captured) -> None:
    capture = captured(OTHERS[name][0], "f")
    assert not any(RULE.match(capture.graph, node) for node in capture.graph.nodes)


def test_the_result_has_the_memory_layout_of_the_librarys_result(captured) -> None:
    """On a GPU, the library's result has the heads of each position adjacent in memory."""
    text = TEXT.replace("{more}", "")
    graph = captured(text, "f").graph
    (node,) = graph.nodes
    _, heads, positions, width = node.type.shape
    library_type = replace(node.type, stride=(positions * heads * width, width, heads * width, Size.of(1)))
    graph = replace(graph, nodes=(replace(node, outputs=(library_type,)),))
    edit = RULE.match(graph, graph.nodes[0])
    assert edit is not None
    after = apply_edit(graph, edit)
    assert [each.op.split(".")[1] for each in after.nodes[-4:]] == ["matmul", "permute", "clone", "permute"]
    assert after.nodes[-1].type == library_type and after.outputs == (edit.result,)
    # One kernel stores it in this layout.
    region = analyse(lower(after), [each.name for each in after.nodes[-4:]])
    assert region.kind is RegionKind.MATMUL
    value = torch.randn(2, 2, 5, 12)
    permuted = value.permute(*after.nodes[-3].args[1]).clone(memory_format=torch.contiguous_format)
    back = permuted.permute(*after.nodes[-1].args[1])
    assert torch.equal(back, value) and back.stride() == (120, 12, 24, 1)


def test_it_is_proposed_for_wide_heads_and_marked_as_rounding(captured) -> None:
    capture = captured(WIDE, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"B": 8, "H": 32, "S": 512}))
    begin = start(capture, WIDE)
    first = proposals(situation(capture, begin, has_gpu=True, strict=False, device=H200))[0]
    assert (first.kind, first.params["rule"]) == (ActionKind.ALGEBRA, RULE.name)
    assert first.changes_rounding
    strict = proposals(situation(capture, begin, has_gpu=True, strict=True, device=H200))
    assert not any(action.changes_rounding for action in strict)
