"""Functions of points with few coordinates: reductions over coordinates are expanded, so that all pairs are one kernel."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.schedule.tile_configs import default_config
from tests.codegen.harness import verified
from tests.planning.situations import H200, fully_fused, proposed, region_and_program, start

TEXT = """
import torch


# mtmc: a=f32[N,4] b=f32[M,4] N=2048 M=3000
def pairwise_iou(a, b):
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    wh = (torch.min(a[:, None, 2:], b[None, :, 2:]) - torch.max(a[:, None, :2], b[None, :, :2])).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    return inter / (area_a[:, None] + area_b[None] - inter)


# mtmc: x=f32[B,N,3] B=8 N=1024
def pair_energy(x):
    d = x[:, :, None] - x[:, None]
    r2 = (d * d).sum(-1) + 1e-3
    s6 = r2**-3
    return (s6 * s6 - s6).sum((1, 2))


# mtmc: q=f32[N,4] v=f32[N,3] N=1000003
def rotate(q, v):
    q = q / q.norm(dim=-1, keepdim=True)
    w, u = q[:, :1], q[:, 1:]
    t = 2 * torch.linalg.cross(u, v)
    return v + w * t + torch.linalg.cross(u, t)


# mtmc: x=f32[N,2,2] N=70
def few(x):
    return x.sum(1), x.amax((1, 2)), x.prod(2), x.amin(1), x.logsumexp(2), x.mean((1, 2))


# mtmc: x=f32[N,5] N=70
def more(x):
    return x.sum(1)
"""


@pytest.mark.parametrize("name", ["pairwise_iou", "pair_energy", "rotate"])
def test_operations_on_coordinates_are_one_kernel(name: str, captured) -> None:
    capture = captured(TEXT, name)
    candidate = start(capture, TEXT)
    # Views do not compute anything.
    working = {node.name for node in capture.graph.nodes if "slice" not in node.op and "squeeze" not in node.op}
    (action,) = proposed(capture, candidate, ActionKind.FUSE, device=H200)
    assert working <= set(action.region)


@pytest.mark.parametrize("name", ["pairwise_iou", "pair_energy", "rotate", "few"])
def test_expanded_coordinates_give_the_same_result(name: str, captured) -> None:
    text = TEXT.replace("N=2048 M=3000", "N=20 M=13").replace("B=8 N=1024", "B=2 N=9").replace("N=1000003", "N=37")
    capture = captured(text, name)
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


@pytest.mark.parametrize(("name", "reductions"), [("few", 0), ("more", 1)])
def test_up_to_four_elements_need_no_reduction(name: str, reductions: int, captured) -> None:
    prims = lower(captured(TEXT, name).graph).prims.values()
    assert sum(prim.op is PrimOp.REDUCE for prim in prims) == reductions


STATEMENT = "    x = torch.sin(x) * 1.01 + 0.1\n"
LONG = f"""
import torch


# mtmc: x=f32[N] N=4096
def long(x):
{STATEMENT * 60}    return x


# mtmc: x=f32[N] N=4096
def short(x):
    return torch.sin(x) * 1.01 + 0.1


# mtmc: x=f32[N,12] N=60000
def narrow(x):
    return x.softmax(-1)
"""


def test_a_long_kernel_of_few_elements_is_spread_over_the_device(captured) -> None:
    """Several program instances per multiprocessor hide the latency of a long dependency chain."""
    programs = {}
    for name in ("long", "short"):
        config = default_config(*region_and_program(captured(LONG, name)), H200)
        programs[name] = 4096 / config.elements
    assert programs["long"] >= 4 * programs["short"]
    assert programs["long"] <= 4096 / 128, "each of a warp's threads has something to do"


def test_programs_take_many_rows_that_are_short(captured) -> None:
    config = default_config(*region_and_program(captured(LONG, "narrow")), H200)
    assert config.elements == 1024
