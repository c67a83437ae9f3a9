"""Regression tests: user code that was once rejected or rendered incorrectly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtmc_lsp.codegen.kernel.formulas import render
from mtmc_lsp.codegen.kernel.snippets import LINE, PRODUCT, Code, call_text
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import analyse
from mtmc_lsp.schedule.configs import PrecisionMode
from mtmc_lsp.schedule.matmul_configs import product_config
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, greedy
from tests.codegen.harness import fused, verified
from tests.planning.situations import fully_fused, start

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


def test_heads_of_one_projection_become_one_attention_kernel(checker: Checker) -> None:
    """The same view provides keys along the queries' axis and along their own."""
    capture = checker.capture(HEADS)
    candidate = fused(capture, HEADS)
    assert checker.failures(capture, [candidate], Case(capture.graph.sizes, "normal", 3)) == [""]


def test_non_ascii_letters_are_transliterated_in_kernels(checker: Checker) -> None:
    """Triton's compiler splits multi-byte letters; the guard keeps the user's names."""
    capture = checker.capture(HEADS, "größe")
    candidate = fused(capture, HEADS)
    kernel = candidate.source[
        candidate.source.index("def grose_kernel") : candidate.source.index("def grose_fits(ä, λ)")
    ]
    assert "a * lamda" in kernel
    assert checker.compile_errors(capture, candidate) == []


def test_kernels_whose_limits_exclude_the_workload_are_refused(checker: Checker) -> None:
    """They would never run. The planner chooses another precision for too few rows."""
    capture = checker.capture(HEADS, "few_rows")
    ir = lower(capture.graph)
    region = analyse(ir, [node.name for node in capture.graph.nodes])
    config = product_config(ir, region, H200, PrecisionMode.FP16X3)
    assert config.precision is PrecisionMode.IEEE
    with pytest.raises(CannotCode, match="kernels require N >= 32"):
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


def test_slice_assignments_and_scalar_tensors_are_supported(checker: Checker) -> None:
    """An assignment to a slice; torch makes a constant tensor of each number."""
    capture = checker.capture(WRITES)
    candidate = fused(capture, WRITES)
    assert checker.failures(capture, [candidate], Case(capture.graph.sizes, "normal", 3)) == [""]
    assert "torch.ops" not in candidate.source


def test_tensors_created_by_torch_calls_are_on_the_inputs_device(checker: Checker) -> None:
    """They must not use the capture device, which may be the CPU or the first of several GPUs."""
    capture = checker.capture(WRITES, "own_labels")
    candidate = fused(capture, WRITES, nodes=["mul"])
    assert "torch.arange(N, device=x.device)" in candidate.source
    assert "device='" not in candidate.source


def test_long_calls_are_wrapped_between_arguments() -> None:
    """Modules with many parameters produced lines of 300 characters."""
    arguments = [f"self.layers[{i}].weight" for i in range(12)]
    text = call_text("block_launch", arguments, "    ")
    first, *inner, last = text.split("\n")
    assert (first, last) == ("block_launch(", "    )")
    assert "".join(inner).replace(" ", "").rstrip(",").split(",") == arguments
    assert all(line.startswith("        self") and 60 < len(line) <= LINE for line in inner)
    assert call_text("f", ["x", "y"], "    ") == "f(x, y)"


def test_the_users_evaluation_order_of_products_is_kept() -> None:
    """Evaluating from the left would overflow: the product of two large numbers precedes the division."""
    quotient = Code("b / c", "float32", precedence=PRODUCT)
    assert render("mul", [Code("a", "float32"), quotient], {}, "float32") == ("a * (b / c)", PRODUCT)
    assert render("mul", [quotient, Code("a", "float32")], {}, "float32") == ("b / c * a", PRODUCT)


MEMORY_TOKENS = """
import torch


# mtmc: q=f32[B,N,32] mem=f32[M,32] x=f32[B,32,H,W] B=2 N=5 M=3 H=16 W=16
def attend(q, mem, x):
    tokens = x[..., 1:].flatten(2).transpose(1, 2)
    keys = torch.cat((mem[None].expand(x.shape[0], -1, -1), tokens), dim=1)
    return (q @ keys.transpose(1, 2)).softmax(-1) @ keys
"""


def test_rows_of_an_image_behind_further_keys_have_offsets_as_small_as_the_image(captured) -> None:
    """A row's number is computed by a division, and its bound is the image's height, not that of any integer."""
    capture = captured(MEMORY_TOKENS, "attend")
    candidate = fused(capture, MEMORY_TOKENS)
    assert verified(capture, candidate).reason == ""


ONE_PART = """
import torch


# mtmc: x=f32[2,48] y=f32[2,48]
def f(x, y):
    return torch.chunk(x, 1, -1)[0], torch.relu(y)
"""


def test_a_list_of_one_tensor_is_one_result(captured) -> None:
    """``torch.ops.aten.split`` returns a list, whatever its length."""
    capture = captured(ONE_PART, "f")
    assert verified(capture, fully_fused(capture, start(capture, ONE_PART))).reason == ""


UNEVEN_PARTS = """
import torch


# mtmc: x=f32[5,A] A=3
def f(x):
    best = x.argmax(-2)
    return torch.chunk(best, 2, -1)[0], best, torch.relu(x) + 1
"""


def test_an_index_may_be_split_into_parts_of_different_sizes(captured) -> None:
    """No part is taken for the values at the other one."""
    capture = captured(UNEVEN_PARTS, "f")
    assert verified(capture, fully_fused(capture, start(capture, UNEVEN_PARTS))).reason == ""


def test_a_difference_is_computed_before_it_is_added(checker: Checker) -> None:
    head = "import torch\n\n# mtmc: x=f32[N] y=f32[N] N=70\n"
    capture = checker.capture(head + "def f(x, y):\n    return x + (y * 4096.0 - y.abs() * 4096.0)\n")
    x, y = torch.linspace(-1e-3, 1e-3, 70), torch.linspace(1.0, 3.0, 70)
    (result,) = checker.results(capture, greedy(capture, {}), {"x": x, "y": y})
    assert torch.equal(result, x)
