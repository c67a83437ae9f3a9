"""Every example becomes kernels without a GPU: planned, written, compiled for three architectures and verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from tests.codegen.harness import compile_errors, verified

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ARCHS = ("sm_80", "sm_90", "gfx942")
NAMES = {
    "rmsnorm_residual": "rmsnorm_residual",
    "swiglu_mlp": "SwiGLU",
    "bias_gelu_dropout": "bias_gelu_dropout",
    "label_smoothed_cross_entropy": "label_smoothed_cross_entropy",
    "groupnorm_silu_conv": "ConvBlock",
    "rotary_embedding": "apply_rotary",
    "masked_attention": "masked_attention",
    "temperature_softmax": "temperature_softmax",
    "gemm_epilogue": "Model",
    "two_stage_module": "TwoStage",
}


@pytest.mark.parametrize("file", NAMES)
def test_an_example_goes_through_without_a_gpu(file: str, interpreter_worker: Worker) -> None:
    path = EXAMPLES / f"{file}.py"
    text = path.read_bytes()
    target = find_target(text, str(path), NAMES[file])
    capture = run_capture(find_workload(str(path), text, target), text, interpreter_worker, 120)
    planner, coder = RooflinePlanner(), BuiltinCoder()
    best, steps = coder.start(capture, text.decode()), list[Step]()
    device = planning_model(ARCHS)
    while isinstance(action := planner.propose(State(capture, best, tuple(steps), device, False)), MacroAction):
        best = coder.write(capture, best, action)
        steps.append(Step(len(steps) + 1, action, StepStatus.ACCEPTED, "", candidate=best))
    assert steps
    assert compile_errors(capture, best, ARCHS) == []
    verdict = verified(capture, best)
    assert verdict.is_correct, verdict.reason
