"""Precision modes of float32 products: their accuracy, and the order in which the planner tries them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import analyse
from mtmc_lsp.schedule.configs import SPLIT_PRECISION_MODES, MatmulConfig, PrecisionMode
from mtmc_lsp.schedule.matmul_configs import product_config
from mtmc_lsp.schedule.precision_modes import Precisions
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.torch_cost import torch_cost
from tests.codegen.harness import compile_errors, fused, verified
from tests.planning.situations import H200, region_and_program, situation, start

SMALL = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "group_m": 4,
    "warps": 4,
    "stages": 2,
    "precision": "fp16x3-short",
}
LINEAR = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,K]{range} w=f32[N,K]{range} b=f32[N] B={b} K={k} N={n}
def f(x, w, b):
    return F.relu(F.linear(x, w, b))
"""
BATCHED = """import torch
# mtmc: a=f32[B,M,K]@0..1 b=f32[B,K,N]@0..1 B=2 M=34 K=70 N=24
def f(a, b):
    return torch.relu(a @ b) + 1.0
"""
CONSTANT = """import torch
# mtmc: a=f32[M,300]@0..1 b=f32[300,N]@0..1 M=40 N=24
def f(a, b):
    return torch.tanh(a @ b / 100)
"""


def linear(*, range: str = "", b: int = 40, k: int = 72, n: int = 24) -> str:
    return LINEAR.format(range=range, b=b, k=k, n=n)


CASES = {
    "operands of both signs": (linear(), {}),
    "positive operands": (linear(range="@0..1"), {}),
    "positive operands, parts along K": (linear(range="@0..1", k=140), {"split_k": 2}),
    "persistent": (linear(range="@0..1"), {"persist": 2}),
    "batched": (BATCHED, {}),
    "K is a number": (CONSTANT, {}),
    "K is a number, parts along K": (CONSTANT, {"split_k": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_in_short_pieces_is_as_exact_as_the_users_own(name: str, captured) -> None:
    """The verdict compares with a float64 oracle and allows eight times the error of the user's fp32 code."""
    text, config = CASES[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, {**SMALL, **config})
    assert "acc += part" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_a_sum_of_few_terms_is_one_piece_and_longer_ones_stay_exact(captured) -> None:
    """A single accumulator frees registers for a larger tile; the launcher selects the variant by K in each call."""
    text = linear(range="@0..1", b=512, k=192, n=512)
    capture = captured(text, "f")
    config = {**SMALL, "precision": "fp16x3-short"}
    long, short = fused(capture, text, config), fused(capture, text, {**config, "precision": "fp16x3"})
    assert "ONE_PIECE" not in long.source, "K is more than 128"
    assert "ONE_PIECE=k_pad <= 256" in short.source
    assert short.launches[-1].constexprs["ONE_PIECE"] is True
    assert "acc += part" in short.source, "for a longer K"
    # Sizes of K with one piece and with several.
    small = linear(range="@0..1", b=40, k=250)
    capture = captured(small, "f")
    verdict = verified(capture, fused(capture, small, {**config, "precision": "fp16x3"}))
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize(("k", "tile", "stages"), [(64, (128, 128), 3), (256, (128, 256), 5), (512, (128, 128), 5)])
def test_the_tile_of_split_operands_is_as_large_as_their_sums_leave_room_for(
    k: int, tile: tuple[int, int], stages: int, captured
) -> None:
    ir, region = region_and_program(captured(linear(b=8192, k=k, n=8192), "f"))
    config = product_config(ir, region, H200, PrecisionMode.FP16X3)
    assert (config.block_m, config.block_n) == tile
    assert config.stages == stages


def test_pieces_are_added_by_fp32_units(captured) -> None:
    """With a piece of one block, the compiler would fold the addition into the product on tensor cores."""
    text = linear(range="@0..1", b=2048, k=4096, n=2048)
    capture = captured(text, "f")
    config = dict(planned(capture, text)[0].params["config"])
    assert config["tma"]
    candidate = fused(capture, text, {**config, "block_n": 128, "precision": "fp16x3-short"})
    assert re.search(r"if \(start // BLOCK_K \+ 1\) % PIECE == 0:\n +acc \+= part", candidate.source)
    assert candidate.launches[-1].constexprs["PIECE"] == 2
    assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


def precision(action: MacroAction) -> str:
    config = action.params.get("config")
    return str(config.get("precision", "")) if isinstance(config, dict) else ""


def planned(capture: Capture, text: str, history: tuple[Step, ...] = (), **state: bool) -> list[MacroAction]:
    """The planner's actions on an H200 that create a kernel, best first."""
    state = {"strict": False, **state}
    state_with_history = replace(situation(capture, start(capture, text), device=H200, **state), history=history)
    return [
        action for action in proposals(state_with_history) if action.kind in (ActionKind.FUSE, ActionKind.TENSOR_CORE)
    ]


def failed(
    action: MacroAction, error: float, reference_error: float = 8e-7, candidate: Candidate | None = None
) -> Step:
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", error, reference_error, "too inexact")
    return Step(1, action, StepStatus.FAILED, verdict.reason, candidate=candidate, verdict=verdict)


BIG = linear(range="@-1..1", b=2048, k=2048, n=2048)


def test_after_an_accuracy_failure_pieces_get_shorter_and_then_fp32_units_are_used(captured) -> None:
    text = linear(b=8192, k=64, n=2048)
    capture = captured(text, "f")
    history: tuple[Step, ...] = ()
    modes = []
    for _ in range(3):
        action = next(iter(planned(capture, text, history)))
        modes.append(precision(action))
        history = (*history, failed(action, 2.3e-5))
    assert modes == ["fp16x3", "fp16x3-short", "ieee"]
    assert not any(precision(action) for action in planned(capture, text, history))


def test_an_inexact_mode_is_given_up_for_the_product_whatever_is_fused_with_it(captured) -> None:
    capture = captured(BIG, "f")
    first = planned(capture, BIG)[0]
    product = next(name for name in first.region if "linear" in name)
    alone = replace(first, region=(product,))
    modes = {precision(action) for action in planned(capture, BIG, (failed(alone, 2.3e-5),))}
    assert modes == {"fp16x3-short"}


def test_a_slow_kernel_is_not_tried_in_shorter_pieces(captured) -> None:
    """Shorter pieces need more additions and are not faster."""
    capture = captured(BIG, "f")
    first = planned(capture, BIG)[0]
    history = (Step(1, first, StepStatus.REJECTED, "not faster"),)
    assert "fp16x3-short" not in {
        precision(a) for a in planned(capture, BIG, history) if set(a.region) == set(first.region)
    }


def test_an_incorrect_kernel_does_not_change_the_precision_mode(captured) -> None:
    capture = captured(BIG, "f")
    first = planned(capture, BIG)[0]
    modes = [precision(action) for action in planned(capture, BIG, (failed(first, 0.7),))]
    assert modes[0] == "fp16x3", "other nodes are tried together, in the same mode"


AVERAGED = {
    "(x @ y).mean(0)": True,
    "torch.logsumexp((x @ y).clamp(-3, 3), 1)": True,
    "F.batch_norm(x @ y, r, s, None, None, True)": True,
    "(lambda p: p - p.mean(0))(x @ y)": False,
    "(x @ y).max(0).values": False,
    "torch.relu(x @ y)": False,
    "(x @ y).view(512, 4, 2048).sum(1)": False,
}


@pytest.mark.parametrize("text", AVERAGED)
def test_a_long_sum_whose_results_are_averaged_starts_with_short_pieces(text: str, captured) -> None:
    """Truncation errors of tensor cores all have the same sign and do not cancel in a mean."""
    source = f"""import torch
import torch.nn.functional as F
# mtmc: x=f32[2048,2048]@-1..1 y=f32[2048,2048]@-1..1 r=f32[2048] s=f32[2048]@0..1
def f(x, y, r, s):
    return {text}
"""
    ir = lower(captured(source, "f").graph)
    modes = Precisions(ir, H200, False, {}, ()).modes
    assert {left[0] for left in modes.values()} == (
        {PrecisionMode.FP16X3_SHORT} if AVERAGED[text] else {PrecisionMode.FP16X3}
    )


def test_operands_that_are_converted_on_load_need_shared_memory_in_their_original_dtype(captured) -> None:
    """On an H200 such a tile needs 245760 of 232448 bytes; with 2-byte operands in memory it needs 147456."""
    text = """import torch
# mtmc: x=f32[4096,2048] y=f32[2048,4096]
def f(x, y):
    return x.half() @ y.half()
"""
    capture = captured(text, "f")
    action = planned(capture, text)[0]
    config = action.params["config"]
    assert (config["block_m"], config["block_n"], config["block_k"], config["stages"]) == (128, 256, 64, 2)
    assert not compile_errors(capture, BuiltinCoder().write(capture, start(capture, text), action), ("sm_90",))


def test_few_tiles_with_a_long_sum_share_it_and_split_operands_as_they_are_read(captured) -> None:
    """Splitting 256 rows in advance would use 16 program instances and take far longer than the library."""
    text = linear()
    capture = captured(text, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"B": 256, "K": 524288, "N": 256}))
    first = planned(capture, text)[0]
    config = first.params["config"]
    assert (precision(first), config["split_on_load"], config["split_k"]) == ("fp16x3-promoted", "both", 32)
    assert not compile_errors(capture, BuiltinCoder().write(capture, start(capture, text), first), ("sm_90",))
    ir = lower(capture.graph)
    region = analyse(ir, first.region)
    chosen = from_json(MatmulConfig, config)
    before = replace(chosen, precision=PrecisionMode.FP16X3, split_on_load=None)
    library = sum(torch_cost(ir, capture.graph.node(name), H200).us for name in first.region)
    assert kernel_cost(ir, region, chosen, H200).us < library < kernel_cost(ir, region, before, H200).us


def test_strict_runs_use_only_fp32_units(captured) -> None:
    text = linear(range="@0..1", b=2048, k=2048, n=2048)
    capture = captured(text, "f")
    modes = {precision(action) for action in planned(capture, text, strict=True)}
    assert modes and not modes & {mode.value for mode in SPLIT_PRECISION_MODES}


@pytest.mark.parametrize(("drawn", "low"), [("rand", 0.0), ("randn", None)])
def test_the_users_inputs_determine_the_signs(drawn: str, low: float | None, captured) -> None:
    source = f"""import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x @ x
def get_inputs():
    return [torch.{drawn}(40, 40)]
def get_init_inputs():
    return []
"""
    assert captured(source, "Model").arguments[0].low == low


def test_the_signs_of_large_inputs_are_known(captured) -> None:
    """With a GPU, capture replaces large inputs by random ones with the same signs."""
    source = """import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b
def get_inputs():
    return [torch.rand(64, 1 << 20), torch.rand(1 << 20, 1)]
def get_init_inputs():
    return []
"""
    capture = captured(source, "Model")
    assert [argument.low for argument in capture.arguments] == [0.0, 0.0]
