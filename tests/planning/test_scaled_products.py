"""When products that the user's code runs in TF32 are tried on scaled float16 operands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import apply_action, proposals
from mtmc_lsp.actions.product_precision import precision_text
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode
from mtmc_lsp.schedule.precision_modes import Precisions
from tests.codegen.harness import fused
from tests.planning.situations import H200, region_and_program, schedule_of, situation
from tests.planning.test_precisions import planned, precision

LAYER = """import torch
import torch.nn.functional as F

# mtmc: x=f32[B,K] w=f32[N,K] b=f32[N] B={b} K={k} N={n}
def f(x, w, b):
    return F.relu(F.linear(x, w, b))
"""
LARGE = LAYER.format(b=2048, k=2048, n=2048)
FEW_ROWS = LAYER.format(b=32, k=4096, n=4096)


def in_tf32(capture: Capture) -> Capture:
    """A capture of a program that allows TF32. A setting in the text would stay in the process that all tests share."""
    return replace(capture, graph=replace(capture.graph, fp32_matmul="tf32"))


def modes(capture: Capture, text: str, history: tuple[Step, ...] = (), **state: bool) -> list[str]:
    return [mode for action in planned(capture, text, history, **state) if (mode := precision(action))]


def test_large_products_are_tried_on_scaled_operands_and_then_in_tf32(captured) -> None:
    capture = in_tf32(captured(LARGE, "f"))
    first = planned(capture, LARGE)[0]
    assert precision(first) == "fp16-scaled"
    assert first.changes_rounding
    assert first.text == "Fuse all of the target into one kernel on scaled float16 operands"
    slower = Step(1, first, StepStatus.REJECTED, "not faster")
    assert first.region not in [action.region for action in planned(capture, LARGE, (slower,))]
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", 2e-3, 3e-4, "too inexact")
    inexact = Step(1, first, StepStatus.FAILED, verdict.reason, verdict=verdict)
    ir, _ = region_and_program(capture)
    for history, left in (((), ("fp16-scaled", "tf32")), ((inexact,), ("tf32",))):
        (order,) = Precisions.of(ir, H200, history).modes.values()
        assert tuple(mode.value for mode in order) == left


def test_with_few_rows_the_conversion_takes_longer_than_a_product_in_tf32(captured) -> None:
    ir, _ = region_and_program(in_tf32(captured(FEW_ROWS, "f")))
    (order,) = Precisions.of(ir, H200, []).modes.values()
    assert order == (PrecisionMode.TF32, PrecisionMode.FP16_SCALED)


def test_full_precision_and_strict_rounding_exclude_it(captured) -> None:
    capture = captured(LARGE, "f")
    assert "fp16-scaled" not in modes(in_tf32(capture), LARGE, strict=True)
    assert "fp16-scaled" not in modes(capture, LARGE)


@pytest.mark.parametrize(("mode", "other"), [("fp16-scaled", "tf32"), ("tf32", "fp16-scaled")])
def test_tuning_measures_both_modes(mode: str, other: str, captured) -> None:
    capture = in_tf32(captured(LARGE, "f"))
    first = planned(capture, LARGE)[0]
    config = {**first.params["config"], "precision": mode, "block_k": 32, "tma": False}
    candidate = fused(capture, LARGE, config)
    tuning = [
        action
        for strict in (False, True)
        for action in proposals(situation(capture, candidate, device=H200, has_gpu=True, strict=strict))
        if action.kind is ActionKind.AUTOTUNE
    ]
    measured = [{each["config"].get("precision") for each in action.params["variants"]} for action in tuning]
    assert measured[0] == {None, other}
    assert len(measured) == 2
    assert "fp16-scaled" not in measured[1]
    # The version with another mode can be written.
    change = next(each["config"] for each in tuning[0].params["variants"] if each["config"].get("precision") == other)
    schedule = apply_action(capture.graph, schedule_of(candidate), replace(tuning[0], params={"config": change}))
    assert schedule.kernels[0].config.precision.value == other


def test_a_step_says_in_which_precision_its_products_run(captured) -> None:
    text = LARGE.replace("f32", "bf16")
    capture = captured(text, "f")
    assert planned(capture, text)[0].rationale.endswith("Precision of its product: bfloat16 operands, sums in float32.")
    capture = captured(LARGE, "f")
    assert "Precision of its product: float32" in planned(capture, LARGE)[0].rationale
    first = planned(in_tf32(capture), LARGE)[0]
    assert first.rationale.endswith("scaled float16 operands with TF32's significand, sums in float32.")
    ir, region = region_and_program(in_tf32(capture))
    config = MatmulConfig(64, 64, 32, 4, 4, 2, PrecisionMode.TF32)
    assert precision_text(ir, region, config) == " Precision of its product: TF32, as your program allows."


def test_a_step_without_products_says_nothing_of_precision(captured) -> None:
    text = "import torch\n\n# mtmc: x=f32[N] N=4194304\ndef f(x):\n    return torch.exp(x) * 2\n"
    actions = planned(captured(text, "f"), text)
    assert actions and not any("Precision" in action.rationale for action in actions)
