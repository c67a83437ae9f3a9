"""Lambda expressions of the file, and functions inside functions, as targets."""

from __future__ import annotations

from pathlib import Path

import torch

from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.harness import verified
from tests.codegen.test_class_methods import _loaded
from tests.planning.situations import fully_fused, start

LAMBDA = """import torch

factor = 2.0
# mtmc: x=f32[B,16] B=8
act = lambda x, *, shift=0.5: torch.softmax(x, -1) * factor + shift
TABLE = {"act": act}
"""

NESTED = """import torch


def outer(x, k):
    # mtmc: t=f32[B,16] B=8
    def inner(t, scale=2.0, *, shift=0.5):
        return torch.softmax(t, -1) * scale + shift

    return inner(x) * k


class Net(torch.nn.Module):
    def forward(self, x):
        # mtmc: t=f32[B,16] B=8
        def gate(t):
            return torch.sigmoid(t) * t

        return gate(x)
"""


def test_a_lambda_expression_is_verified(captured) -> None:
    capture = captured(LAMBDA, "act")
    candidate = fully_fused(capture, start(capture, LAMBDA))
    assert verified(capture, candidate).reason == ""


def test_kernels_of_a_lambda_run_until_what_it_was_made_from_changes(captured, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    capture = captured(LAMBDA, "act")
    text = on_cpu(fully_fused(capture, start(capture, LAMBDA)).source, LAMBDA)
    module = _loaded(text, tmp_path, "lambdas")
    module.act_launch = lambda x, *numbers: torch.zeros_like(x)
    x = torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(module.TABLE["act"](x), torch.zeros_like(x))
        module.factor = 3.0
        assert torch.equal(module.act(x), torch.softmax(x, -1) * 3.0 + 0.5)
        edited = _loaded(text.replace("torch.softmax(x, -1)", "torch.relu(x)", 1), tmp_path, "edited_lambdas")
        edited.act_launch = module.act_launch
        assert torch.equal(edited.act(x), torch.relu(x) * 2.0 + 0.5)


def test_functions_inside_functions_and_methods_are_verified(captured) -> None:
    for name in ("outer.inner", "Net.forward.gate"):
        capture = captured(NESTED, name)
        assert verified(capture, fully_fused(capture, start(capture, NESTED))).reason == ""


def test_a_call_of_the_outer_function_runs_the_kernels_of_the_inner_one(captured, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    capture = captured(NESTED, "outer.inner")
    candidate = fully_fused(capture, start(capture, NESTED))
    module = _loaded(on_cpu(candidate.source, NESTED), tmp_path, "nested_functions")
    x = torch.randn(8, 16)
    with torch.no_grad():
        module.outer_inner_launch = lambda t, *numbers: torch.ones_like(t)
        assert torch.equal(module.outer(x, 3), torch.full_like(x, 3.0))
