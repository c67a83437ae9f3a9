"""Attention in float32 as two products and a softmax, which tensor cores can take one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.macro.catalogue import proposals
from mtmc_lsp.macro.rewrites import ALGEBRA
from tests.macro.situations import SHEET, fused_as_far_as_it_goes, operations, situation, start, with_algebra
from tests.micro.harness import verified

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
# mtmc: q=f32[B,H,S,1024] k=f32[B,H,S,1024] v=f32[B,H,S,1024] B=1 H=1 S=16
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
"""
RULE = next(rule for rule in ALGEBRA if rule.name == "written-out-attention")


@pytest.mark.parametrize("more", ["", ", scale=0.3"], ids=["usual scale", "scaled"])
def test_it_gives_what_attention_gives(more: str, captured) -> None:
    text = TEXT.replace("{more}", more)
    capture = captured(text, "f")
    candidate = with_algebra(capture, start(capture, text), RULE.name)
    assert operations(capture, candidate) == ["transpose", "matmul", "mul", "softmax", "matmul"]
    verdict = verified(capture, fused_as_far_as_it_goes(capture, candidate))
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_stays_the_librarys(name: str, captured) -> None:
    capture = captured(OTHERS[name][0], "f")
    assert not any(RULE.match(capture.graph, node) for node in capture.graph.nodes)


def test_wide_heads_are_worth_it_and_the_step_says_that_it_rounds(captured) -> None:
    capture = captured(WIDE, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"B": 8, "H": 32, "S": 512}))
    begin = start(capture, WIDE)
    first = proposals(situation(capture, begin, measured=True, strict=False, device=SHEET))[0]
    assert (first.kind, first.params["rule"]) == (ActionKind.ALGEBRA, RULE.name)
    assert first.changes_rounding
    strict = proposals(situation(capture, begin, measured=True, strict=True, device=SHEET))
    assert not any(action.changes_rounding for action in strict)
