"""Losses of zeros, negative numbers, NaN and infinities match PyTorch."""

from __future__ import annotations

import pytest

from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, greedy

SPECIAL = ("0.0", "-1.0", "1.0", "float('nan')", "float('inf')", "-float('inf')", "-0.0", "2.0", "200.0", "-200.0")
"""All pairs of these occur among the elements; other elements keep random values."""
LOSSES = {
    "squared": "F.mse_loss(x, y, reduction='none')",
    "absolute": "F.l1_loss(x, y, reduction='none')",
    "smooth": "F.smooth_l1_loss(x, y, reduction='none')",
    "smooth, steep": "F.smooth_l1_loss(x, y, reduction='none', beta=0.0)",
    "huber": "F.huber_loss(x, y, reduction='none', delta=0.5)",
    "divergence": "F.kl_div(x, y, reduction='none')",
    "divergence of logarithms": "F.kl_div(x, y, reduction='none', log_target=True)",
    "binary of logits": "F.binary_cross_entropy_with_logits(x, y, reduction='none')",
    "binary of logits, weighted": "F.binary_cross_entropy_with_logits(x, y, y, reduction='none', pos_weight=x)",
    "binary": "F.binary_cross_entropy(u, (y > 0).float(), reduction='none')",
    "binary, ends weighted": "F.binary_cross_entropy((x > 0).float(), u, y, reduction='none')",
    "hinge": "F.hinge_embedding_loss(x, (y > 0).float() * 2 - 1, reduction='none')",
    "ranking": "F.margin_ranking_loss(x, y, torch.sign(x), reduction='none')",
    "soft margin": "F.soft_margin_loss(x, y, reduction='none')",
    "poisson": "F.poisson_nll_loss(x, y, reduction='none', full=True)",
    "poisson, no logarithms": "F.poisson_nll_loss(x, y, reduction='none', log_input=False)",
    "triplet": "F.triplet_margin_loss(x, y, u, reduction='none')",
    "cosine": "F.cosine_embedding_loss(x, y, torch.ones_like(x[:, 0]), reduction='none')",
    "likelihood": "F.nll_loss(x, j[:, 0] % 4, reduction='none')",
    "likelihood, ignoring": "F.nll_loss(x, j[:, 0] % 4, reduction='none', ignore_index=3)",
    "likelihood, weighted": "F.nll_loss(x, j[:, 0] % 4, y[0], reduction='none', ignore_index=3)",
    "cross entropy": "F.cross_entropy(x, j[:, 0] % 4, reduction='none')",
    "cross entropy, smoothed": "F.cross_entropy(x, j[:, 0] % 4, reduction='none', label_smoothing=0.1, ignore_index=3)",
    "cross entropy, weighted": "F.cross_entropy(x, j[:, 0] % 4, y[0], reduction='none', label_smoothing=0.1)",
    "cross entropy, probabilities": "F.cross_entropy(x, y, reduction='none')",
    "cross entropy, probabilities smoothed": "F.cross_entropy(x, y, y[0], reduction='none', label_smoothing=0.1)",
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_special_values_matches_pytorch(checker: Checker, name: str) -> None:
    fill = "".join(f".masked_fill({{0}} == {number}, {value})" for number, value in enumerate(SPECIAL))
    text = f"""import torch
import torch.nn.functional as F

# mtmc: a=f32[N,4] b=f32[N,4] u=f32[N,4]@0..1 i=i64[N,4]@0..19 j=i64[N,4]@0..19 N=900
def f(a, b, u, i, j):
    x = a{fill.format("i")}
    y = b{fill.format("j")}
    return {LOSSES[name]}
"""
    capture = checker.capture(text)
    candidate = greedy(capture, {})
    found = checker.failures(capture, [candidate], Case(dict(capture.graph.sizes), "normal", 5))
    assert found == [""]
