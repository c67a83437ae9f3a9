"""The float64 oracle and the random numbers that it shares with kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from mtmc_lsp.verify.worker.float64_execution import Float64Mode
from mtmc_lsp.verify.worker.oracle import SharedRandomMode, draw_seeds, uniform


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.half().float(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float16),
        lambda x: x.sum(-1, dtype=torch.float32),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x + torch.zeros(5, dtype=torch.float32),
        lambda x: x.to(torch.zeros(1, dtype=torch.float32)),
        lambda x: x.type_as(torch.ones(1, dtype=torch.float32)),
    ],
)
def test_no_cast_in_the_users_code_lowers_the_oracle_below_float64(cast) -> None:
    with Float64Mode():
        found = cast(torch.rand(5, 3, dtype=torch.float64).t())
    assert found.dtype is torch.float64


def test_integers_and_indices_stay_what_they_are() -> None:
    with Float64Mode():
        assert torch.arange(4).to(torch.int32).dtype is torch.int32
        assert torch.rand(4, dtype=torch.float64).argmax().dtype is torch.int64


def test_the_shared_random_numbers_are_those_of_triton() -> None:
    """``tl.rand4x`` in the interpreter, for seeds of all sizes, bit for bit."""
    code = """
import torch, triton, triton.language as tl
@triton.jit
def kernel(seed_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    words = tl.rand4x(tl.load(seed_ptr), at)
    for i in tl.static_range(4):
        tl.store(out_ptr + 4 * at + i, words[i])
from mtmc_lsp.verify.worker.oracle import uniform
for seed in (0, 1, 12345, 2**31 - 2, 2**40 + 7):
    out = torch.empty(1024)
    kernel[(1,)](torch.tensor([seed]), out, BLOCK=256)
    assert torch.equal(out, uniform(seed, 1024, "cpu")), seed
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dropout_keeps_as_many_elements_as_it_should() -> None:
    """The share of kept elements lies within five standard deviations."""
    for p in (0.1, 0.5, 0.9):
        with SharedRandomMode(draw_seeds(3, 1, "cpu")):
            kept = F.dropout(torch.ones(200_000), p, True)
        rate = float((kept != 0).float().mean())
        assert abs(rate - (1 - p)) < 5 * (p * (1 - p) / 200_000) ** 0.5
        assert torch.allclose(kept[kept != 0], torch.tensor(1 / (1 - p)))


def test_random_numbers_are_even_over_their_range() -> None:
    values = uniform(99, 100_000, "cpu")
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    counts = torch.histc(values, 10, 0, 1)
    assert float((counts - 10_000).abs().max()) < 500


@pytest.mark.parametrize("mask", ["none", "causal", "choice", "bias"])
def test_attention_that_drops_probabilities_is_that_of_torch_before_they_are_dropped(mask: str) -> None:
    """With identity values, the result is the probabilities: dropped ones are 0, and others are scaled."""
    query, key = torch.randn(2, 4, 8, 16, dtype=torch.float64), torch.randn(2, 2, 8, 16, dtype=torch.float64)
    value = torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8)
    masks = {"choice": torch.rand(8, 8) > 0.2, "bias": torch.randn(8, 8, dtype=torch.float64)}
    options = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "scale": 0.3, "enable_gqa": True}
    attention = torch.nn.functional.scaled_dot_product_attention
    whole = attention(query, key, value, **options)
    with SharedRandomMode(draw_seeds(3, 1, "cpu")):
        dropped = attention(query, key, value, dropout_p=0.25, **options)
    (seed,) = draw_seeds(3, 1, "cpu")
    is_kept = uniform(seed, whole.numel(), "cpu").view(whole.shape) >= 0.25
    assert not is_kept.all()
    torch.testing.assert_close(dropped, torch.where(is_kept, whole / 0.75, 0.0))


def test_dropout_inside_an_attention_layer_is_shared_and_torch_is_as_before() -> None:
    layer = torch.nn.MultiheadAttention(8, 2, dropout=0.5)
    x, before = torch.randn(4, 3, 8), torch.nn.functional.dropout
    results = []
    for seed in (1, 2):
        with SharedRandomMode(draw_seeds(3, 1, "cpu")):
            torch.manual_seed(seed)
            results.append(layer(x, x, x)[1])
    assert torch.equal(*results)
    assert torch.nn.functional.dropout is before
