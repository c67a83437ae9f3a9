"""Loops over time steps run as products of chunks of iterations, with the results of the user's code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.loops.chunks import chunk_form
from mtmc_lsp.ir.loops.fusion import fused_loop
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from tests.cli.runner import mtmc, project
from tests.codegen.harness import compile_errors, verified
from tests.loops.chunk_examples import CHUNKS, DELTA_RULES, NAMES, REFUSED
from tests.loops.examples import LOOPS
from tests.planning.situations import H200, act, fully_fused, proposed, schedule_of, situation, start


def chunked(capture, text: str, **config: int):
    candidate = fully_fused(capture, start(capture, text))
    (plan,) = [plan for plan in schedule_of(candidate).kernels if hasattr(plan.config, "segments")]
    changes = {"rows": 1, "block": 16, "warps": 4, "stages": 2, "chunk": 16, **config}
    return act(capture, candidate, ActionKind.CHUNK_PRODUCTS, *plan.nodes, config=changes)


@pytest.mark.parametrize("name", [*NAMES, *DELTA_RULES])
def test_chunks_have_the_results_of_the_users_loop(name: str, captured) -> None:
    capture = captured(CHUNKS, name)
    candidate = chunked(capture, CHUNKS)
    assert "tl.dot(" in candidate.code.block
    assert verified(capture, candidate).reason == ""
    assert compile_errors(capture, candidate, ["sm_90", "gfx942"]) == []


@pytest.mark.parametrize("name", [*NAMES, *DELTA_RULES])
def test_chunks_of_usual_heads_compile(name: str, captured) -> None:
    text = CHUNKS.replace("T=37", "T=512").replace("L=37", "L=512")
    text = re.sub(r"\b([KVPN])=\d+(?=.*\n(?:# mtmc.*\n)*def )", r"\1=64", text)
    capture = captured(text, name)
    candidate = chunked(capture, text, chunk=32, block=32)
    assert compile_errors(capture, candidate, ["sm_80", "sm_90", "gfx942"]) == []


GATES = {
    "plain": "none",
    "retention": "scalar",
    "gated": "scalar",
    "gla": "key",
    "ssd": "scalar",
    "rwkv6": "key",
    "half_until": "scalar",
}


@pytest.mark.parametrize("name", GATES)
def test_the_gate_is_read_from_the_body(name: str, captured) -> None:
    capture = captured(CHUNKS, name)
    (loop,) = [node.name for node in capture.graph.nodes if node.loop is not None]
    chunk = chunk_form(fused_loop(ir_of(capture.graph, Schedule()), [loop]))
    assert [item.gate_kind.value for item in chunk.memories] == [GATES[name]]
    assert [read.is_after for read in chunk.reads] == [name != "rwkv6"]


@pytest.mark.parametrize("name", REFUSED)
def test_another_loop_is_refused_with_the_reason(name: str, captured) -> None:
    capture = captured(CHUNKS, name)
    with pytest.raises(CannotCode, match=re.escape(f"chunk-products: chunk cannot be 16: {REFUSED[name]}")):
        chunked(capture, CHUNKS)
    assert proposed(capture, fully_fused(capture, start(capture, CHUNKS)), ActionKind.CHUNK_PRODUCTS) == []


def test_a_recurrence_without_outer_products_is_refused(captured) -> None:
    capture = captured(LOOPS, "recurrence")
    with pytest.raises(CannotCode, match="an iteration does not read its state by sums over one axis"):
        chunked(capture, LOOPS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"chunk": 8}, "chunk cannot be 8; it must be 1, or 16 to 128"),
        ({"chunk": 256}, "chunk cannot be 256; it must be 1, or 16 to 128"),
        ({"rows": 2}, "rows cannot be 2: a program that computes chunks of iterations has one row"),
        ({"block": 8}, "block cannot be 8: products of chunks have at least 16 columns"),
        (
            {"block": 2048},
            "chunk and block cannot be 16 and 2048: with 16 channels of the key, a tile has more than 8192 elements",
        ),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(config: dict[str, int], message: str, captured) -> None:
    capture = captured(CHUNKS, "gated")
    with pytest.raises(CannotCode, match=re.escape(message)):
        chunked(capture, CHUNKS, **config)


def at_sizes(capture, **sizes: int):
    """A capture of small tensors as one of larger ones: the planner reads nothing else of them."""
    return replace(capture, graph=replace(capture.graph, sizes={**capture.graph.sizes, **sizes}))


def proposals_of(capture):
    return proposed(capture, fully_fused(capture, start(capture, CHUNKS)), ActionKind.CHUNK_PRODUCTS, device=H200)


LARGE = {
    "gated": {"B": 64, "T": 4096, "K": 64, "V": 64},
    "gla": {"B": 4, "H": 16, "T": 4096, "K": 64, "V": 64},
    "ssd": {"B": 1, "H": 24, "L": 4096, "P": 64, "N": 64},
}


def with_tf32(capture):
    """The capture of a program that allows TF32. A setting in the text would stay in the process that all tests share."""
    return replace(capture, graph=replace(capture.graph, fp32_matmul="tf32"))


@pytest.mark.parametrize("name", ["gated", "ssd"])
def test_the_first_step_of_long_loops_of_outer_products_computes_chunks(name: str, captured) -> None:
    capture = with_tf32(at_sizes(captured(CHUNKS, name), **LARGE[name]))
    candidate = start(capture, CHUNKS)
    action = proposals(situation(capture, candidate, device=H200, has_gpu=True))[0]
    assert action.kind is ActionKind.CHUNK_PRODUCTS
    assert action.text.startswith("Compute chunks of the loop by matrix products")
    assert "In one kernel, 4096 iterations add outer products to " in action.rationale
    after = BuiltinCoder().write(capture, candidate, action)
    assert "tl.dot(" in after.code.block
    assert compile_errors(capture, after, ["sm_90"]) == []


@pytest.mark.parametrize("name", LARGE)
def test_products_without_tensor_cores_are_slower_than_iterations(name: str, captured) -> None:
    capture = at_sizes(captured(CHUNKS, name), **LARGE[name])
    assert proposals_of(capture) == []
    first = proposals(situation(capture, start(capture, CHUNKS), device=H200, has_gpu=True))
    assert first and ActionKind.CHUNK_PRODUCTS not in {action.kind for action in first}


@pytest.mark.parametrize("name", LARGE)
def test_long_loops_of_outer_products_are_computed_in_chunks(name: str, captured) -> None:
    capture = with_tf32(at_sizes(captured(CHUNKS, name), **LARGE[name]))
    (action,) = proposals_of(capture)
    assert action.text.startswith("Compute chunks of the kernel for ") and action.text.endswith(" by matrix products")
    assert re.match(r"4096 iterations add outer products to \w+ one after another. ", action.rationale)
    assert action.expected.saved_us > 100
    after = BuiltinCoder().write(capture, fully_fused(capture, start(capture, CHUNKS)), action)
    assert compile_errors(capture, after, ["sm_90"]) == []


def test_loops_that_fill_the_device_and_few_steps_run_one_after_another(captured) -> None:
    capture = captured(CHUNKS, "gated")
    assert proposals_of(at_sizes(capture, B=2048, T=4096, K=64, V=128)) == [], "float32 products limit the chunks"
    assert proposals_of(at_sizes(capture, B=64, T=8, K=64, V=64)) == []


def test_autotune_tries_other_chunks_and_columns(captured) -> None:
    capture = at_sizes(captured(CHUNKS, "gated"), **LARGE["gated"])
    candidate = chunked(capture, CHUNKS, chunk=64, block=32)
    (action,) = proposed(capture, candidate, ActionKind.AUTOTUNE, device=H200, has_gpu=True)
    configs = [variant["config"] for variant in action.params["variants"]]
    assert {config["chunk"] for config in configs if "chunk" in config} >= {16, 32}
    assert {config["block"] for config in configs if "block" in config} >= {16, 64}


def test_the_code_of_chunks_does_not_grow_with_the_sequence(captured) -> None:
    capture = captured(CHUNKS, "gated")
    blocks = [chunked(at_sizes(capture, T=steps), CHUNKS, chunk=32).code.block for steps in (64, 65536)]
    assert blocks[0] == blocks[1]


def test_products_use_tf32_where_the_user_allows_it(captured) -> None:
    block = chunked(with_tf32(captured(CHUNKS, "gated")), CHUNKS).code.block
    assert 'input_precision="tf32"' in block and 'input_precision="ieee"' not in block


def test_a_run_without_tf32_has_no_chunks(tmp_path) -> None:
    text = CHUNKS.replace("B=1 H=2 T=37 K=5 V=6", "B=1 H=64 T=1024 K=16 V=16")
    file = project(tmp_path, text)
    run = mtmc(tmp_path, "optimize", f"{file.name}::gla")
    assert run.code == 0, run.err
    assert "Step 1  Run all iterations of the loop in one kernel" in run.out
    assert "by matrix products" not in run.out
