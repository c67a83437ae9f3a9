"""Loops with matrix products in their body become one kernel, with the results of the user's code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.fusion import fused_loop
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.cell_configs import cell_config, keeps_columns
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import NOT_LAUNCHED
from tests.codegen.harness import _checker, compile_errors, verified
from tests.loops.cell_examples import CELLS, NAMES
from tests.planning.situations import H200, act, proposed, start


def fully_fused(capture, candidate):
    """Apply the fusions that the planner proposes for a GPU until there are none."""
    while actions := proposed(capture, candidate, ActionKind.FUSE, device=H200):
        candidate = BuiltinCoder().write(capture, candidate, actions[0])
    return candidate


def loops_of(graph):
    return [node for node in graph.nodes if node.loop is not None]


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_of_a_cell_is_one_kernel_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(CELLS, name)
    layers = 2 if name == "Stacked" else 1
    assert len(loops_of(capture.graph)) == layers
    assert "unrolled" not in " ".join(capture.workload.assumed)
    candidate = fully_fused(capture, start(capture, CELLS))
    assert verified(capture, candidate).reason == ""
    assert len(re.findall(r"in tl\.range\(0, ", candidate.code.block)) == layers
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []


def with_sizes(text: str, **sizes: int) -> str:
    """The examples with other sizes of the workloads."""
    for name, size in sizes.items():
        text = re.sub(rf"\b{name}=\d+", f"{name}={size}", text)
    return text


def loop_node(capture: Capture) -> str:
    return loops_of(capture.graph)[0].name


def fused_with(capture: Capture, text: str, rows: int, block: int, warps: int = 4, stages: int = 1) -> Candidate:
    """The loop as one kernel with a tile."""
    config = {"kind": "loop", "rows": rows, "block": block, "warps": warps, "stages": stages}
    return act(capture, start(capture, text), ActionKind.FUSE, loop_node(capture), config=config)


@pytest.mark.parametrize("hidden", [1, 3, 16, 33, 64])
@pytest.mark.parametrize("name", ["elman", "gru", "double"])
def test_a_cell_is_right_for_every_number_of_steps_and_rows(name: str, hidden: int, captured) -> None:
    """Without steps, the guard refuses and the user's code runs."""
    text = with_sizes(CELLS, H=hidden, G=3 * hidden)
    capture = captured(text, name)
    candidate = fully_fused(capture, start(capture, text))
    assert candidate.code.block.count("_kernel[") == 1
    for steps in (0, 1, 16, 17, 100):
        for batch in (1, 5):
            case = Case({**capture.graph.sizes, "T": steps, "B": batch}, "normal", 3)
            (failure,) = _checker().failures(capture, [candidate], case)
            assert failure == ("" if steps else NOT_LAUNCHED), case


@pytest.mark.parametrize(("rows", "block"), [(1, 16), (2, 16), (4, 32), (8, 16), (16, 16), (32, 64)])
@pytest.mark.parametrize("name", ["elman", "gru"])
def test_every_tile_gives_the_same_results(name: str, rows: int, block: int, captured) -> None:
    """One or several rows per program, and blocks of columns that the hidden size does not fill."""
    text = with_sizes(CELLS, H=33, G=99, B=5)
    capture = captured(text, name)
    candidate = fused_with(capture, text, rows, block)
    case = Case(dict(capture.graph.sizes), "normal", 3)
    assert _checker().failures(capture, [candidate], case) == [""]
    assert ("tl.dot(" in candidate.code.block) == (rows >= 16)
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []


@pytest.mark.parametrize("name", ["elman", "gru"])
def test_a_part_of_larger_matrices_stays_in_registers(name: str, captured) -> None:
    """The loop over time loads the other tiles; terms of all tiles along a sum are added before it."""
    text = with_sizes(CELLS, H=136, G=408, T=17)
    capture = captured(text, name)
    block = (candidate := fused_with(capture, text, 1, 64)).code.block
    before, _, inside = block[block.index("_out_") :].partition("in tl.range(0, T")
    tiles = {"elman": 9, "gru": 27}[name]
    assert len(re.findall(r"= tl\.load\(U_ptr", before)) == 4
    assert len(re.findall(r"= tl\.load\(U_ptr", inside)) == tiles - 4
    assert len(re.findall(r"= tl\.sum\(terms", inside)) == tiles // 3
    case = Case(dict(capture.graph.sizes), "normal", 3)
    assert _checker().failures(capture, [candidate], case) == [""]


@pytest.mark.parametrize(("name", "copy"), [("gru", ""), ("GRUCell", ".mT.contiguous()"), ("LSTM", ".contiguous()")])
def test_threads_hold_columns_of_matrices_that_fit_into_registers(name: str, copy: str, captured) -> None:
    """Neighbouring threads load neighbouring elements of a row; the launcher copies matrices whose columns are contiguous."""
    text = re.sub(r"hidden=\d+", "hidden=64", with_sizes(CELLS, H=64, G=192, T=17))
    capture = captured(text, name)
    candidate = fully_fused(capture, start(capture, text))
    kernel, _, launcher = candidate.code.block.partition("_launch(")
    before, _, inside = kernel[kernel.index("_out_") :].partition("in tl.range(0, ")
    assert len(re.findall(r"= tl\.load\(tl\.multiple_of\(", before)) == {"LSTM": 4}.get(name, 3)
    assert "multiple_of" not in inside
    assert f"_sums_of_{'4' if name == 'LSTM' else '3'}" in inside and "tl.sum(" not in inside
    assert "tl.load(" not in inside[inside.index("tl.reduce(") :]
    assert copy in launcher and (copy or ".contiguous()" not in launcher)
    for steps in (1, 17):
        case = Case({**capture.graph.sizes, "T": steps}, "normal", 3)
        assert _checker().failures(capture, [candidate], case) == [""]


def test_rows_with_different_matrices_are_in_different_programs(captured) -> None:
    capture = captured(CELLS, "block_diagonal")
    with pytest.raises(CannotCode, match="rows cannot be 2: rows of this loop have different matrices"):
        fused_with(capture, CELLS, 2, 8)


def test_a_block_is_not_so_small_that_the_kernel_becomes_very_long(captured) -> None:
    text = with_sizes(CELLS, H=64)
    with pytest.raises(CannotCode, match="block cannot be 4: each iteration would multiply too many tiles"):
        fused_with(captured(text, "elman"), text, 1, 4)


def test_products_of_the_inputs_and_of_the_results_leave_the_loop(captured) -> None:
    capture = captured(CELLS, "Vanilla")
    (loop,) = (node.loop for node in loops_of(capture.graph))
    assert [node.word for node in loop.nodes if node.word == "linear"] == ["linear"]
    outside = [node.word for node in capture.graph.nodes]
    assert outside.count("linear") == 2
    assert outside.index("linear") < outside.index("loop") < len(outside) - 1 - outside[::-1].index("linear")


def test_float32_products_are_exact_unless_the_user_allows_less(captured) -> None:
    text = with_sizes(CELLS, H=33, B=20)
    capture = captured(text, "elman")
    for setting in ("ieee", "tf32"):
        user = replace(capture, graph=replace(capture.graph, fp32_matmul=setting))
        assert f'input_precision="{setting}"' in fused_with(user, text, 16, 64).code.block


def test_capture_and_generated_code_do_not_grow_with_the_number_of_steps(captured) -> None:
    short = captured(CELLS, "GRUCell")
    # On a busy machine, threads that wait for each other would take most of the time of small products.
    text = with_sizes(CELLS, T=4096).replace("import torch\n", "import torch; torch.set_num_threads(1)\n", 1)
    long = captured(text, "GRUCell")
    assert long.graph.nodes == short.graph.nodes
    blocks = [
        fully_fused(capture, start(capture, source)).code.block for capture, source in ((short, CELLS), (long, text))
    ]
    assert len(blocks[0].splitlines()) == len(blocks[1].splitlines()) < 320


LARGE = """
import torch


# mtmc: x=f32[B,T,H] U=f32[H,G]@-0.01..0.01 B=2 T=260 H=512 G=2048
def large(x, U):
    h, c = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        i, f, g, o = (h.softmax(1) @ U).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g + x[:, t])
        h = torch.sigmoid(o) * torch.tanh(c)
    return h * 2
"""


def test_a_product_that_no_program_holds_stays_a_loop_of_torch_calls(captured) -> None:
    """An iteration reduces its rows, so it is no launch. Other operations are in a kernel."""
    capture = captured(LARGE, "large")
    assert len(loops_of(capture.graph)) == 1
    last = capture.graph.nodes[-1].name
    candidate = act(capture, start(capture, LARGE), ActionKind.FUSE, last, config={})
    case = Case(dict(capture.graph.sizes), "normal", 3)
    assert _checker().failures(capture, [candidate], case) == [""]
    assert re.search(r"\n    for step in range\(", candidate.code.block)
    assert all(loop_node(capture) not in action.region for action in proposed(capture, candidate, ActionKind.FUSE))


def test_the_action_says_where_the_matrices_are(captured) -> None:
    for hidden, where in ((256, "stay in registers"), (260, "are read from a cache in each iteration")):
        text = with_sizes(CELLS, H=hidden)
        capture = captured(text, "elman")
        actions = proposed(capture, start(capture, text), ActionKind.FUSE, device=H200)
        (action,) = [action for action in actions if loop_node(capture) in action.region]
        assert action.text.startswith("Run all iterations of the loop in one kernel")
        assert f"the matrices {where}" in action.rationale


def test_autotune_proposes_other_rows_and_blocks(captured) -> None:
    text = with_sizes(CELLS, B=64, H=64)
    capture = captured(text, "elman")
    candidate = fully_fused(capture, start(capture, text))
    actions = proposed(capture, candidate, ActionKind.AUTOTUNE, device=H200, has_gpu=True)
    configs = [variant["config"] for action in actions for variant in action.params["variants"]]
    assert {config["rows"] for config in configs if "rows" in config} >= {2, 4, 8, 16}
    assert 32 in {config["block"] for config in configs if "block" in config}


@pytest.mark.parametrize(
    ("hidden", "rows", "form"),
    [
        (64, 1024, "columns"),
        (64, 4096, "rows"),
        (128, 512, "columns"),
        (128, 4096, "launches"),
        (160, 8, "rows"),
        (192, 8, "launches"),
    ],
)
def test_the_first_form_depends_on_rows_and_registers(hidden: int, rows: int, form: str, captured) -> None:
    """Programs that hold columns run a few times one after another; more rows share programs, or launches."""
    text = with_sizes(CELLS, H=hidden, G=3 * hidden, B=rows, T=17)
    capture = captured(text, "gru")
    cell = fused_loop(ir_of(capture.graph, Schedule()), [loop_node(capture)])
    assert isinstance(cell, CellForm)
    config = cell_config(cell, H200)
    assert form == ("launches" if config.is_stepwise else "columns" if keeps_columns(cell, config) else "rows")
