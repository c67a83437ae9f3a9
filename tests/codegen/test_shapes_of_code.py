"""Targets as people write them that once were not written, or not right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.codegen.kernel.formulas import render
from mtmc_lsp.codegen.kernel.snippets import LINE, PRODUCT, Code, call_text
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import analyse
from mtmc_lsp.schedule.configs import PrecisionMode
from mtmc_lsp.schedule.matmul_configs import product_config
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

H200 = default_model()

HEADS = """
import torch


# mtmc: x=f32[B,T,192] B=2 T=12
def f(x):
    B, T, C = x.shape
    q, k, v = (part.view(B, T, 4, 16).transpose(1, 2) for part in x.split(64, dim=2))
    return (q @ k.transpose(-2, -1) * 0.25).softmax(-1) @ v


# mtmc: ä=f32[N] λ=f32[N] N=70
def größe(ä, λ):
    ö = ä * λ + 1
    return ö.tanh()


# mtmc: x=f32[N,K] w=f32[M,K] N=16 K=64 M=32
def few_rows(x, w):
    return torch.relu(x @ w.t())
"""


def test_heads_split_from_one_projection_are_one_attention(checker: Checker) -> None:
    """Keys are read along the axis of the queries' rows and along their own, both through the same view."""
    capture = checker.capture(HEADS)
    candidate = fused(capture, HEADS)
    assert checker.wrong(capture, [candidate], Case(capture.graph.sizes, "normal", 3)) == [""]


def test_letters_beyond_ascii_are_spelled_out_in_kernels(checker: Checker) -> None:
    """Triton's compiler cuts their bytes apart; the user's own names stay in the guard."""
    capture = checker.capture(HEADS, "größe")
    candidate = fused(capture, HEADS)
    kernel = candidate.source[
        candidate.source.index("def grose_kernel") : candidate.source.index("def grose_fits(ä, λ)")
    ]
    assert "a * lamda" in kernel
    assert checker.compile_errors(capture, candidate) == []


def test_kernels_whose_limits_exclude_the_workload_are_not_written(checker: Checker) -> None:
    """They would never run; the planner takes another precision where there are too few rows to split."""
    capture = checker.capture(HEADS, "few_rows")
    ir = lower(capture.graph)
    region = analyse(ir, [node.name for node in capture.graph.nodes])
    config = product_config(ir, region, H200, PrecisionMode.FP16X3)
    assert config.precision is PrecisionMode.IEEE
    with pytest.raises(CannotCode, match="hold for N >= 32 alone"):
        fused(capture, HEADS, replace(config, precision=PrecisionMode.FP16X3))


WRITES = """
import torch
import torch.nn.functional as F


# mtmc: x=f32[B,T] B=6 T=19
def f(x):
    y = x + 1
    y[:, 0] = 0
    y[2:4] *= 2.5
    y[:, 1:4] = x[:, :3]
    return torch.where(y > 1, -float("inf"), y) * torch.tensor(3.0)


# mtmc: x=f32[N,C] N=8 C=6
def own_labels(x):
    return F.cross_entropy(x * 2, torch.arange(x.shape[0], device=x.device) % 6) + torch.zeros((), device=x.device)
"""


def test_parts_that_are_written_and_tensors_of_one_number_are_followed(checker: Checker) -> None:
    """What an assignment to a slice becomes; torch makes a constant tensor of each number."""
    capture = checker.capture(WRITES)
    candidate = fused(capture, WRITES)
    assert checker.wrong(capture, [candidate], Case(capture.graph.sizes, "normal", 3)) == [""]
    assert "torch.ops" not in candidate.source


def test_tensors_that_torch_makes_between_kernels_are_on_the_device_of_the_inputs(checker: Checker) -> None:
    """Not on the one of the capture, which is the CPU where there is no GPU, and the first of several."""
    capture = checker.capture(WRITES, "own_labels")
    candidate = fused(capture, WRITES, nodes=["mul"])
    assert "arange.default(N, device=x.device)" in candidate.source
    assert "device='" not in candidate.source


def test_long_calls_are_broken_where_an_argument_ends() -> None:
    """As a person would write them; a module with many parameters made lines of 300 letters."""
    arguments = [f"self.layers[{i}].weight" for i in range(12)]
    text = call_text("block_launch", arguments, "    ")
    first, *inner, last = text.split("\n")
    assert (first, last) == ("block_launch(", "    )")
    assert "".join(inner).replace(" ", "").rstrip(",").split(",") == arguments
    assert all(line.startswith("        self") and 60 < len(line) <= LINE for line in inner)
    assert call_text("f", ["x", "y"], "    ") == "f(x, y)"


def test_the_right_operand_of_a_product_is_computed_first() -> None:
    """As in the user's code: from the left, the product of two large numbers would be infinite before it is divided."""
    quotient = Code("b / c", "float32", precedence=PRODUCT)
    assert render("mul", [Code("a", "float32"), quotient], {}, "float32") == ("a * (b / c)", PRODUCT)
    assert render("mul", [quotient, Code("a", "float32")], {}, "float32") == ("b / c * a", PRODUCT)
