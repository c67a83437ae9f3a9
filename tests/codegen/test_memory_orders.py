"""Kernels that read or write along an axis other than their columns use tiles of both axes, for all sizes."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.codegen.kernel.snippets import blocks_text
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.memory_order import transposed_axis
from mtmc_lsp.schedule.tile_configs import default_config, variants
from tests.codegen.harness import fused, verified
from tests.planning.situations import region_and_program

H200 = default_model()

BACK = """import torch
# mtmc: x=f32[N,H,W,C] b=f32[C] N=2 C=20 H=7 W=9
def f(x, b):
    return (x + b).permute(0, 3, 1, 2).contiguous() * 2.0
"""
POOLED = """import torch
import torch.nn.functional as F
# mtmc: x=f32[N,12,10,C] C=20 N=2
def f(x):
    return F.max_pool2d(x.permute(0, 3, 1, 2), 2).contiguous() + 1.0
"""
BESIDE = """import torch
# mtmc: x=f32[N,C,H,W] y=f32[N,H,W,C] N=3 C=8 H=6 W=5
def f(x, y):
    return x.permute(0, 2, 3, 1) * y
"""
NORM = """import torch
# mtmc: x=f32[N,C,H,W] N=3 C=20 H=9 W=8
def f(x):
    return x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-5)
"""
SOFTMAX = """import torch
# mtmc: x=f32[N,C,S] N=3 C=300 S=70
def f(x):
    return torch.softmax(x, 1)
"""
SCAN = """import torch
# mtmc: x=f32[N,C,S] N=2 C=40 S=70
def f(x):
    return torch.cumsum(x, 1)
"""
CONFIGS = (
    {},
    {"rows": 16, "block": 8},
    {"rows": 4, "block": 32, "persist": 3},
    {"rows": 8, "block": 16, "order": "columns"},
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("source", [BACK, POOLED, BESIDE], ids=["back", "pooled", "beside"])
def test_memory_orders_are_converted(source: str, config: dict[str, int], captured) -> None:
    capture = captured(source, "f")
    ir, region = region_and_program(capture)
    assert transposed_axis(ir, region) is not None
    candidate = fused(capture, source, {**to_json(default_config(ir, region, H200)), **config})
    assert "outer" in candidate.source, "rows are neighbours along one axis alone"
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("changes", [{}, {"rows": 16, "warps": 2}, {"persist": 3}], ids=str)
@pytest.mark.parametrize("source", [NORM, SOFTMAX, SCAN], ids=["norm", "softmax", "scan"])
def test_reductions_over_a_strided_axis_are_correct(source: str, changes: dict[str, int], captured) -> None:
    capture = captured(source, "f")
    ir, region = region_and_program(capture)
    candidate = fused(capture, source, {**to_json(default_config(ir, region, H200)), **changes})
    assert re.search(r"outer = piece // ", candidate.source)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_few_columns_are_held_at_once_and_many_use_a_loop(captured) -> None:
    few, many = (region_and_program(captured(source, "f")) for source in (NORM, SOFTMAX))
    assert not default_config(*few, H200).loop
    assert default_config(*many, H200).loop
    choices = variants(*many, default_config(*many, H200), H200)
    assert {choice.loop for choice in choices} == {True, False}


def test_tiles_are_at_most_as_large_as_the_axes(captured) -> None:
    ir, region = region_and_program(captured(BACK, "f"))
    for config in (default_config(ir, region, H200), *variants(ir, region, default_config(ir, region, H200), H200)):
        assert config.rows <= 32
        assert config.block <= 64, "seven by nine places"


@pytest.mark.parametrize(("rows", "outer"), [(1, 1), (228, 55), (64, 3), (65, 7)])
def test_a_launch_has_a_program_for_each_block_of_each_group(rows: int, outer: int) -> None:
    for block in (1, 2, 64):
        programs = eval(f"{blocks_text('n_rows', block)} * n_outer", {"n_rows": rows, "n_outer": outer})
        assert programs == outer * -(-rows // block)
