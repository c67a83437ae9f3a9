"""Attention with the biases, masks and limits of models in use: one kernel computes them on each tile of the scores."""

from __future__ import annotations

import pytest

from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import VIEW_OPS, PrimOp
from mtmc_lsp.ir.regions import CannotFuse, RegionKind, analyse
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, some_cases
from tests.planning.situations import H200

CONFIG = {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}
TEXT = """import torch
import torch.nn.functional as F


# mtmc: q=f16[B,4,T,16] k=f16[B,{heads},T,16] v=f16[B,{heads},T,16] {arguments} B=2 T=50
def f(q, k, v{names}):
    t = q.shape[-2]
    i = torch.arange(t, device=q.device)
{body}
"""


def attention(body: str, heads: int = 4, **shapes: str) -> str:
    arguments = " ".join(f"{name}={shape}" for name, shape in shapes.items())
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return TEXT.format(heads=heads, arguments=arguments, names="".join(f", {name}" for name in shapes), body=lines)


FEATURES = {
    "a table of relative positions": attention(
        "bias = table[i[:, None] - i[None, :] + t - 1].permute(2, 0, 1)\n"
        "return ((q * 0.25) @ k.mT + bias[None]).softmax(-1) @ v",
        table="f16[2*T-1,4]",
    ),
    "a table and its index": attention(
        "bias = table[index.view(-1)].view(t, t, 4).permute(2, 0, 1).contiguous()\n"
        "return torch.softmax(q @ k.mT * 0.25 + bias.unsqueeze(0), -1).to(q.dtype) @ v",
        table="f32[31,4]", index="i64[T,T]@0..30",
    ),
    "an embedding of distances": attention(
        "distance = (i[None, :] - i[:, None]).clamp(-8, 7) + 8\n"
        "bias = F.embedding(distance, table).permute(2, 0, 1)[None]\n"
        "return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)",
        table="f16[16,4]",
    ),
    "a part of a larger bias": attention(
        "return (q @ k.mT * 0.25 + bias[:, :, :t, :t]).softmax(-1) @ v", bias="f16[1,4,64,64]",
    ),
    "ALiBi": attention(
        "bias = -(i[:, None] - i[None, :]).abs() * slopes[:, None, None]\n"
        "return torch.softmax((q @ k.mT * 0.25 + bias).float(), -1).to(q.dtype) @ v",
        slopes="f32[4]@0..1",
    ),
    "a soft cap": attention(
        "s = torch.tanh(q @ k.mT * 0.25 / cap) * cap\n"
        "s = s.masked_fill(i[None, :] > i[:, None], float('-inf'))\n"
        "return F.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v",
        cap="f16[]@20..50",
    ),
    "packed sequences": attention(
        "segment = (i[:, None] >= starts[None, 1:]).sum(-1)\n"
        "allowed = (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])\n"
        "return (q @ k.mT * 0.25).masked_fill(~allowed, float('-inf')).softmax(-1) @ v",
        starts="i32[4]@0..50",
    ),
    "grouped heads and a window": attention(
        "k, v = (x[:, :, None].expand(-1, 2, 2, t, 16).reshape(-1, 4, t, 16) for x in (k, v))\n"
        "far = (i[None, :] > i[:, None]) | (i[:, None] - i[None, :] >= 9)\n"
        "return (q @ k.mT * scale).masked_fill(far, float('-inf')).softmax(-1) @ v",
        heads=2, scale="f16[]@0.1..0.5",
    ),
    "a window for the library": attention(
        "mask = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < 9)\n"
        "return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
    ),
    "a sink that is concatenated": attention(
        "s = (q @ k.mT * 0.25).masked_fill(i[None, :] > i[:, None], float('-inf'))\n"
        "s = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, t, 1)], dim=-1)\n"
        "return F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)[..., :-1] @ v",
        sinks="f16[4]",
    ),
    "a sink, shifted by the maximum": attention(
        "k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)\n"
        "s = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.25 / 5) * 5\n"
        "s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(q.shape[0], 4, t, 1)], dim=-1)\n"
        "s = s - s.max(dim=-1, keepdim=True).values\n"
        "return torch.matmul(s.softmax(-1)[..., :-1], v)",
        heads=2, sinks="f16[4]",
    ),
    "a sink in the sum": attention(
        "s = (q @ k.mT).float() * 0.25\n"
        "sink = sinks.float()[:, None, None]\n"
        "m = torch.maximum(s.amax(-1, keepdim=True), sink)\n"
        "e = torch.exp(s - m)\n"
        "return (e / (e.sum(-1, keepdim=True) + torch.exp(sink - m))).to(q.dtype) @ v",
        sinks="f16[4]",
    ),
    "segments and positions": attention(
        "mask = (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])\n"
        "return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
        segment="i64[T]@0..2",
    ),
}  # fmt: skip
BOUNDED = {
    "a sink that is concatenated": ("end_key",),
    "a soft cap": ("end_key",),
    "packed sequences": ("end_key",),
    "grouped heads and a window": ("first_key", "end_key"),
    "a window for the library": ("first_key", "end_key"),
    "segments and positions": ("end_key",),
}
"""The limits of the loops over keys, where the mask compares views of one tensor of positions."""


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_attention_are_part_of_its_kernel(checker: Checker, name: str) -> None:
    capture = checker.capture(FEATURES[name])
    ir = lower(capture.graph)
    fusions = FusionSearch(ir, Schedule(), H200).best()
    (region,) = (fusion.region for fusion in fusions if fusion.region.kind is RegionKind.ATTENTION)
    written = {node.word for node in capture.graph.nodes if node.name not in region.nodes}
    assert written <= {"arange", "unsqueeze", "slice", "ge", "sum"}
    candidate = fused(capture, FEATURES[name], CONFIG, region.nodes)
    assert tuple(limit for limit in ("first_key", "end_key") if limit in candidate.source) == BOUNDED.get(name, ())
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""


def test_positions_of_a_mask_are_not_read_from_memory(checker: Checker) -> None:
    capture = checker.capture(FEATURES["packed sequences"])
    ir = lower(capture.graph)
    (attended,) = (f.region for f in FusionSearch(ir, Schedule(), H200).best() if f.region.kind is RegionKind.ATTENTION)
    sources = [ir.prims[name] for name in attended.inputs]
    while views := [prim for prim in sources if prim.op in VIEW_OPS]:
        sources = [prim for prim in sources if prim not in views] + [ir.prims[prim.inputs[0]] for prim in views]
    assert len(sources) > 3 and all(prim.op is not PrimOp.IOTA for prim in sources)


def test_scores_that_are_read_by_index_are_no_attention_of_one_kernel(checker: Checker) -> None:
    text = attention("return (q @ k.mT)[..., order].softmax(-1) @ v", order="i64[T]@0..49")
    capture = checker.capture(text)
    with pytest.raises(CannotFuse):
        analyse(lower(capture.graph), [node.name for node in capture.graph.nodes if node.word != "arange"])
