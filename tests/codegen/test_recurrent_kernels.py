"""Recurrent layers in launches of independent steps, for all variants of PyTorch's layers."""

from __future__ import annotations

import ast

import pytest

from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, start, with_kernel

TEXT = """import torch
from torch import nn


# mtmc: {inputs} T=5{batch} init: width=5 hidden={hidden}
class Net(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.layer = nn.{layer}

    def forward(self, {names}):
        {body}
"""
ALL, LAST = "out, (h, c) = self.layer(x)\n        return out, h, c", "return self.layer(x)[0][-1]"
GIVEN = "out, h = self.layer(x, h0)\n        return out[:, -1] * 2.0, h"
FORMS = {
    "three layers": ("LSTM(width, hidden, 3)", ALL, "x=f32[T,B,5]", 20),
    "one layer, last step": ("LSTM(width, hidden)", LAST, "x=f32[T,B,5]", 16),
    "without biases": ("LSTM(width, hidden, 2, bias=False)", ALL, "x=f32[T,B,5]", 16),
    "without a batch": ("LSTM(width, hidden, 2)", ALL, "x=f32[T,5]", 16),
    "cell alone": (
        "LSTM(width, hidden, 2, batch_first=True)",
        "return self.layer(x, (h0, c0))[1][1]",
        "x=f32[B,T,5] h0=f32[2,B,16] c0=f32[2,B,16]",
        16,
    ),
    "both ways": ("LSTM(width, hidden, 2, bidirectional=True)", ALL, "x=f32[T,B,5]", 20),
    "gated": ("GRU(width, hidden, 3, batch_first=True)", GIVEN, "x=f32[B,T,5] h0=f32[3,B,20]", 20),
    "gated both ways": (
        "GRU(width, hidden, 2, True, True, 0.5, True)",
        GIVEN,
        "x=f32[B,T,5] h0=f32[4,B,16]",
        16,
    ),
    "gated state alone": ("GRU(width, hidden, 2, bias=False)", "return self.layer(x)[1]", "x=f32[T,B,5]", 40),
    "plain": ("RNN(width, hidden, 2)", "return self.layer(x)[0]", "x=f32[T,B,5]", 20),
    "rectified both ways": (
        "RNN(width, hidden, 2, nonlinearity='relu', bidirectional=True, bias=False)",
        "return self.layer(x)[1]",
        "x=f32[T,B,5]",
        16,
    ),
    "half precision": ("LSTM(width, hidden, 2).half()", LAST, "x=f16[T,B,5]", 16),
    "double precision": ("GRU(width, hidden, 2).double()", LAST, "x=f64[T,B,5]", 16),
}
SIZES = {"the workload's": {}, "fewer steps than layers": {"T": 2}, "one step": {"T": 1, "B": 2}, "alone": {"B": 1}}
CONFIG = {"block_m": 16, "block_n": 16, "block_k": 16, "warps": 4, "stages": 2, "precision": "tf32x3"}


def text_of(layer: str, body: str, inputs: str, hidden: int) -> str:
    names = ", ".join(item.partition("=")[0] for item in inputs.split())
    batch = " B=3" if "B" in inputs else ""
    return TEXT.format(layer=layer, body=body, inputs=inputs, hidden=hidden, names=names, batch=batch)


def with_layers(capture: Capture, config: dict[str, object]) -> Candidate:
    """Fuse only the recurrent layers into a kernel."""
    names = [node.name for node in capture.graph.nodes if len(node.outputs) > 1]
    return with_kernel(capture, start(capture), names, config)


@pytest.mark.parametrize("name", FORMS)
def test_layers_equal_those_of_pytorch(checker: Checker, name: str) -> None:
    """Several diagonals, fewer steps than layers, one step, a batch of one, and partially filled blocks of units."""
    capture = checker.capture(text_of(*FORMS[name]), "Net")
    candidate = with_layers(capture, CONFIG)
    assert len(candidate.launches) == 1
    for label, changed in SIZES.items():
        sizes = {**capture.graph.sizes, **{n: v for n, v in changed.items() if n in capture.graph.sizes}}
        assert checker.failures(capture, [candidate], Case(sizes, "normal", 3)) == [""], label


@pytest.mark.parametrize("name", ["three layers", "gated both ways", "plain"])
def test_extreme_values_and_other_tiles_are_correct(checker: Checker, name: str) -> None:
    """Large values saturate every gate; tile sizes must not change results."""
    capture = checker.capture(text_of(*FORMS[name]), "Net")
    tiles = [{**CONFIG, "block_m": 32, "block_n": 64, "block_k": 64}, {**CONFIG, "block_k": 32, "precision": "ieee"}]
    for distribution in ("large", "mixed"):
        case = Case(capture.graph.sizes, distribution, 5)
        assert checker.failures(capture, [with_layers(capture, config) for config in tiles], case) == ["", ""]


@pytest.mark.parametrize("name", ["three layers", "both ways", "gated", "half precision"])
def test_kernels_compile_for_gpus(checker: Checker, name: str) -> None:
    capture = checker.capture(text_of(*FORMS[name]), "Net")
    for precision, archs in (("tf32x3", ("sm_80", "sm_90")), ("ieee", ("sm_90", "gfx942"))):
        candidate = with_layers(capture, {**CONFIG, "precision": precision})
        assert checker.compile_errors(capture, candidate, archs) == []


def test_a_launch_holds_all_layers_of_a_diagonal(checker: Checker) -> None:
    """One loop covers steps and layers, all layers are in the grid, and all launches share one compilation."""
    capture = checker.capture(text_of(*FORMS["three layers"]), "Net")
    source = with_layers(capture, CONFIG).source
    assert 'do_not_specialize=["diagonal"]' in source
    launcher = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "net_launch")
    loop = next(node for node in ast.walk(launcher) if isinstance(node, ast.For))
    assert ast.unparse(loop.iter) == "range(T + 2)"
    assert ast.unparse(loop.body[0].value.func.slice) == "(5, 3, (B + 15) // 16)"  # type: ignore[attr-defined]
