"""Loops whose iterations are launches: cells with matrices that no program holds, with the results of the user's code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import apply_action, opening
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import NOT_LAUNCHED
from tests.codegen.harness import _checker, compile_errors
from tests.loops.cell_examples import CELLS
from tests.loops.test_cells import loop_node, with_sizes
from tests.planning.situations import H200, act, proposed, schedule_of, situation, start


def stepwise(capture: Capture, text: str, node: str = "", **config: int | str) -> Candidate:
    """The loop with one launch for each iteration."""
    tile = {"kind": "loop", "rows": 1, "block": 16, "warps": 4, "stages": 1, "depth": 16, **config}
    return act(capture, start(capture, text), ActionKind.FUSE, node or loop_node(capture), config=tile)


def differences(capture: Capture, candidate: Candidate, **sizes: int) -> str:
    """Where the candidate differs from the user's code at some sizes; empty if nowhere."""
    (failure,) = _checker().failures(capture, [candidate], Case({**capture.graph.sizes, **sizes}, "normal", 3))
    return failure


@pytest.mark.parametrize(("rows", "block", "depth"), [(1, 4, 32), (2, 16, 16), (8, 8, 16), (16, 16, 16), (32, 32, 32)])
@pytest.mark.parametrize("name", ["elman", "gru"])
def test_every_tile_gives_the_results_of_the_users_code(name: str, rows: int, block: int, depth: int, captured) -> None:
    """The tiles fill neither the rows nor the columns."""
    text = with_sizes(CELLS, H=33, G=99, B=5, T=17)
    capture = captured(text, name)
    candidate = stepwise(capture, text, rows=rows, block=block, depth=depth)
    assert differences(capture, candidate) == ""
    assert differences(capture, candidate, T=0) == NOT_LAUNCHED
    assert ("tl.dot(" in candidate.code.block) == (rows >= 16)
    assert len(re.findall(r"\n    for t in range\(T\):\n        \w+_kernel\[", candidate.code.block)) == 1
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []


@pytest.mark.parametrize("name", ["Vanilla", "LSTM", "GRUCell", "LSTMCell", "heads", "einsums", "half", "double"])
def test_cells_of_all_kinds_give_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(CELLS, name)
    candidate = stepwise(capture, CELLS, rows=2 if name == "double" else 16)
    for sizes in ({}, {"T": 1, "B": 1}, {"T": 18, "B": 19}):
        assert differences(capture, candidate, **sizes) == "", sizes
    assert compile_errors(capture, candidate, ["sm_90"]) == []


def test_rows_with_different_matrices_are_in_different_programs(captured) -> None:
    capture = captured(CELLS, "block_diagonal")
    assert differences(capture, stepwise(capture, CELLS)) == ""


HALTING = """
import torch


# mtmc: x=f32[B,T,H] U=f32[H,H]@-0.4..0.4 stop=bool[B,T] B=5 T=18 H=21
def halting(x, U, stop):
    h = torch.zeros_like(x[:, 0])
    alive = torch.ones(x.shape[0], 1, dtype=torch.bool, device=x.device)
    count = torch.zeros(x.shape[0], 1, dtype=torch.int64, device=x.device)
    for t in range(x.shape[1] - 1, -1, -1):
        alive = alive & ~stop[:, t, None]
        count = count + alive
        h = torch.where(alive, torch.tanh(x[:, t] / (t + 1) + torch.sin(h) @ U), h)
    return h, count
"""


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_states_without_columns_and_the_number_of_the_iteration_are_right(rows: int, captured) -> None:
    capture = captured(HALTING, "halting")
    candidate = stepwise(capture, HALTING, rows=rows)
    assert differences(capture, candidate) == ""
    assert compile_errors(capture, candidate, ["sm_90"]) == []


LARGE = """
import torch
import torch.nn as nn


class Stack(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.first, self.second = nn.LSTMCell(width, hidden), nn.LSTMCell(hidden, hidden)

    # mtmc: x=f32[T,B,X] h=f32[B,H] T=60 B=33 X=16 H=400 init: width=16 hidden=400
    def forward(self, x, h):
        c, g, d, outs = torch.zeros_like(h), h * 0.5, torch.zeros_like(h), []
        for x_t in x:
            h, c = self.first(x_t, (h, c))
            g, d = self.second(h, (g, d))
            outs.append(g)
        return torch.stack(outs), c


# mtmc: x=f32[B,T,H] U=f32[H,H]@-0.05..0.05 V=f32[H,H]@-0.05..0.05 B=4 T=17 H=768
def reset(x, U, V):
    h, outs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        r = torch.sigmoid(h @ U)
        h = torch.tanh(x[:, t] + (r * h) @ V)
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: x=f32[T,B,H] U=f32[H,H]@-0.05..0.05 B=32 T=30 H=1000
def elman(x, U):
    h = torch.zeros_like(x[0])
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        h = torch.tanh(x[t] + (0.9 * h) @ U)
        out[t] = h
    return out
"""
"""Cells with matrices that no program holds; ``reset`` has a product that waits for another one."""


def test_layers_that_no_program_holds_are_one_launch_for_each_iteration(captured) -> None:
    """They are not unrolled although there are few iterations."""
    capture = captured(LARGE, "Stack")
    loops = [node.name for node in capture.graph.nodes if node.loop is not None]
    candidate = start(capture, LARGE)
    while actions := proposed(capture, candidate, ActionKind.FUSE, device=H200):
        candidate = BuiltinCoder().write(capture, candidate, actions[0])
    assert len(loops) == 2
    assert len(re.findall(r"\n    for \w+ in range\(T\):\n        \w+_kernel\[", candidate.code.block)) == 2
    assert differences(capture, candidate, T=3) == ""
    reports = _checker().reports(capture, candidate, ["sm_90"])
    assert [(report.error, report.spills) for report in reports if report.error or report.spills] == []


def test_a_product_that_waits_for_another_one_is_refused_with_the_reason(captured) -> None:
    capture = captured(LARGE.replace("H=768", "H=16"), "reset")
    with pytest.raises(CannotCode, match="depth cannot be 16: a product waits for another one of the same iteration"):
        stepwise(capture, LARGE)
    assert "its matrices are too large for one program instance" in " ".join(captured(LARGE, "reset").workload.assumed)


def test_the_first_step_replays_the_launches_of_all_iterations_as_a_cuda_graph(captured) -> None:
    capture = captured(LARGE, "elman")
    first = start(capture, LARGE)
    action = opening(situation(capture, first, device=H200, has_gpu=True))
    assert action is not None and action.kind is ActionKind.CUDA_GRAPH
    assert action.text == "Run each iteration of the loop as one launch, and replay all launches as one CUDA graph"
    candidate = BuiltinCoder().write(capture, first, action)
    assert "_run_cuda_graph(" in candidate.code.block
    assert re.search(r"\n    for t in range\(T\):\n        \w+_kernel\[", candidate.code.block)
    schedule = schedule_of(candidate)
    assert schedule.cuda_graph and launch_count(ir_of(capture.graph, schedule), schedule) == 30
    assert opening(situation(capture, first, device=H200)) is None
    long = replace(capture, graph=replace(capture.graph, sizes={**capture.graph.sizes, "T": 10_000}))
    assert opening(situation(long, first, device=H200, has_gpu=True)) is None


def test_autotune_proposes_other_tiles_and_one_launch_where_a_program_holds_the_matrices(captured) -> None:
    text = LARGE.replace("H=1000", "H=600")
    capture = captured(text, "elman")
    candidate = start(capture, text)
    (fusion,) = proposed(capture, candidate, ActionKind.FUSE, device=H200)
    config = fusion.params["config"]
    assert config["depth"] > 1
    candidate = BuiltinCoder().write(capture, candidate, fusion)
    (action,) = proposed(capture, candidate, ActionKind.AUTOTUNE, device=H200, has_gpu=True)
    changes = [variant["config"] for variant in action.params["variants"]]
    assert any(change.get("depth") == 1 for change in changes)
    assert {name for change in changes for name in change} >= {"rows", "block", "warps", "depth"}
    for change in changes:
        tuned = {"config": {**config, **change}}
        apply_action(capture.graph, schedule_of(start(capture, text)), replace(fusion, params=tuned))


def test_float32_products_are_exact_unless_the_user_allows_less(captured) -> None:
    capture = captured(CELLS, "elman")
    for setting in ("ieee", "tf32"):
        user = replace(capture, graph=replace(capture.graph, fp32_matmul=setting))
        assert f'input_precision="{setting}"' in stepwise(user, CELLS, rows=16).code.block


def large_cell(captured, rows: int = 20) -> tuple[str, Capture]:
    """An LSTM whose matrices no program holds."""
    text = re.sub(r"hidden=\d+", "hidden=384", with_sizes(CELLS, H=384, X=5, B=rows, T=17))
    return text, captured(text, "LSTMCell")


@pytest.mark.parametrize(
    ("rows", "user", "strict", "vendor", "precision", "tile_rows"),
    [
        (20, "ieee", False, "nvidia", "tf32x3", 16),
        (20, "tf32", False, "nvidia", "tf32x3", 16),
        (20, "ieee", True, "nvidia", "ieee", 16),
        (20, "ieee", False, "amd", "ieee", 16),
        (8, "ieee", False, "nvidia", "tf32x3", 16),
        (8, "ieee", True, "nvidia", "ieee", 8),
        (4, "ieee", False, "nvidia", "ieee", 4),
    ],
)
def test_float32_products_run_on_tensor_cores_unless_rounding_must_not_change(
    rows: int, user: str, strict: bool, vendor: str, precision: str, tile_rows: int, captured
) -> None:
    """From five rows on, a tile of 16 rows on tensor cores is faster than sums, although rows do not fill it."""
    text, capture = large_cell(captured, rows)
    capture = replace(capture, graph=replace(capture.graph, fp32_matmul=user))
    setting = replace(
        situation(capture, start(capture, text), device=replace(H200, vendor=vendor), strict=strict), has_gpu=True
    )
    (fusion,) = setting.search().best([loop_node(capture)])
    assert (fusion.config.precision.value, fusion.config.rows) == (precision, tile_rows)
    if precision == "tf32x3":
        candidate = stepwise(capture, text, rows=16, block=32, depth=64, precision=precision)
        assert f'input_precision="{precision}"' in candidate.code.block
        assert differences(capture, candidate) == ""


def test_three_products_need_a_launch_for_each_iteration(captured) -> None:
    capture = captured(CELLS, "elman")
    with pytest.raises(CannotCode, match="precision cannot be 'tf32x3': one launch runs all iterations"):
        stepwise(capture, CELLS, rows=16, depth=1, precision="tf32x3")
