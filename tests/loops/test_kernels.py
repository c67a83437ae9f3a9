"""Loops over time steps become one node, and then one kernel with the results of the user's code."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.codegen.loop.iterations import with_states_in_place
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json, to_json
from tests.cli.runner import mtmc, project
from tests.codegen.harness import compile_errors, verified
from tests.loops.examples import LOOPS, NAMES
from tests.planning.situations import H200, act, fully_fused, proposed, start


@pytest.mark.parametrize(
    ("lines", "result"),
    [
        (["h_2 = a * h", "tl.store(p, h_2)", "h = h_2"], ["h = a * h", "tl.store(p, h)"]),
        # The names of functions and of their arguments stay.
        (["where = tl.where(m, h, 0.0)", "f(where=where)", "h = where"], ["h = tl.where(m, h, 0.0)", "f(where=h)"]),
        # A later statement reads the state as it was before.
        (["h_2 = a * h", "tl.store(p, h)", "h = h_2"], None),
        # The other state takes the value before the iteration.
        (["h_2 = a * h", "before = h", "h = h_2"], None),
        # The value is computed in a branch, or before the loop.
        (["if m:", "    h_2 = a", "h = h_2"], None),
        (["tl.store(p, c)", "h = c"], None),
        (["h_2 = a", "h_2 += b", "h = h_2"], None),
    ],
)
def test_a_state_is_changed_in_place_where_nothing_reads_it_later(lines: list[str], result: list[str] | None) -> None:
    assert with_states_in_place(lines) == (result or lines)


UNROLLED_LOOP = """

# mtmc: x=f32[B,T,D] B=2 T=17 D=4
def running_sums(x):
    h = torch.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        h = torch.tanh(h + torch.logcumsumexp(h + x[:, step], 1))
    return h
"""


def loops_of(graph: Graph):
    return [node for node in graph.nodes if node.loop is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_is_one_node_and_one_kernel_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(LOOPS, name)
    assert len(loops_of(capture.graph)) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    assert from_json(Graph, to_json(capture.graph)) == capture.graph
    candidate = fully_fused(capture, start(capture, LOOPS))
    assert verified(capture, candidate).reason == ""
    assert len(re.findall(r"in tl\.range\(0, ", candidate.code.block)) == 1
    assert compile_errors(capture, candidate, ["sm_90"]) == []


@pytest.mark.parametrize("name", ["advantages", "selective_scan", "masked", "in_place", "gated"])
def test_a_loop_in_no_kernel_stays_a_loop_of_torch_calls(name: str, captured) -> None:
    """Only an operation after the loop is in a kernel."""
    text = LOOPS.replace("return h\n", "return h * 1.5\n").replace("(h, c)\n", "(h * 1.5, c)\n")
    text = text.replace("dim=1), h\n", "dim=1), h * 1.5\n")
    capture = captured(text, name)
    last = next(node.name for node in reversed(capture.graph.nodes) if node.word in ("mul", "add"))
    candidate = act(capture, start(capture, text), ActionKind.FUSE, last, config={})
    assert verified(capture, candidate).reason == ""
    assert re.search(r"\n    for step in range\(", candidate.code.block)


def test_a_selective_scan_never_writes_its_products_to_memory(captured) -> None:
    """The sequences of B * L * D * N elements exist in registers alone."""
    capture = captured(LOOPS, "selective_scan")
    candidate = fully_fused(capture, start(capture, LOOPS))
    launcher = candidate.code.block.partition("def selective_scan_launch")[2].partition("@triton_op")[0]
    assert launcher.count("_kernel[") == 1
    assert "exp" not in launcher and "mul" not in launcher


def test_generated_code_does_not_grow_with_the_number_of_steps(captured) -> None:
    short = captured(LOOPS, "selective_scan")
    long_text = LOOPS.replace("L=20", "L=4096")
    long = captured(long_text, "selective_scan")
    assert long.graph.nodes == short.graph.nodes
    assert long.graph.sizes == {**short.graph.sizes, "L": 4096}
    lengths = [
        len(fully_fused(capture, start(capture, text)).code.block.splitlines())
        for capture, text in ((short, LOOPS), (long, long_text))
    ]
    assert lengths[0] == lengths[1] < 300


def test_the_number_of_steps_is_an_argument_of_the_kernel(captured) -> None:
    """The kernel for 20 steps is valid for other numbers of steps; the guard does not check it."""
    capture = captured(LOOPS, "recurrence")
    assert loops_of(capture.graph)[0].loop.count.is_symbol
    assert capture.graph.conditions == ()
    block = fully_fused(capture, start(capture, LOOPS)).code.block
    assert re.search(r"def recurrence_kernel\([^)]*\bT\b,", block)
    assert "a.shape[1] ==" not in block


def test_a_run_shows_the_loop_as_a_step_and_says_which_loop_it_unrolls(tmp_path) -> None:
    file = project(tmp_path, LOOPS.replace("return out, out + values", "return out") + UNROLLED_LOOP)
    kept = mtmc(tmp_path, "optimize", f"{file.name}::recurrence")
    assert kept.code == 0, kept.err
    assert "Step 1  Run all iterations of the loop in one kernel for the result" in kept.out
    assert "same results as your code" in kept.out
    unrolled = mtmc(tmp_path, "plan", f"{file.name}::running_sums")
    line = file.read_text().splitlines().index("    for step in range(x.shape[1]):") + 1
    assert f"the loop of line {line} is unrolled, because its body contains" in unrolled.out


def test_the_action_states_what_the_loop_costs_in_eager_mode(captured) -> None:
    capture = captured(LOOPS, "recurrence")
    (action,) = proposed(capture, start(capture, LOOPS), ActionKind.FUSE, device=H200)
    assert action.text == "Run all iterations of the loop in one kernel for the result"
    assert action.rationale.startswith("Eager mode runs 2 operations in each of 20 iterations")
    assert action.expected.saved_us > 20 * H200.launch_us


def test_autotune_proposes_other_tiles_and_stages(captured) -> None:
    capture = captured(LOOPS.replace("B=3 T=20 D=5", "B=64 T=1024 D=2048"), "recurrence")
    candidate = fully_fused(capture, start(capture, LOOPS))
    actions = proposed(capture, candidate, ActionKind.AUTOTUNE, device=H200, has_gpu=True)
    configs = [variant["config"] for action in actions for variant in action.params["variants"]]
    assert len({config["block"] for config in configs if "block" in config}) > 1
    assert {config["stages"] for config in configs if "stages" in config} >= {1, 8}
