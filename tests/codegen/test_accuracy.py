"""Reductions and losses have at most twice the error of the user's code, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mtmc_lsp.core.dtypes import EPSILON
from tests.codegen.harness import results
from tests.planning.situations import fully_fused, start

FORMS: dict[str, str] = {
    "cross entropy": "F.cross_entropy(x, labels, reduction='none')",
    "its mean": "F.cross_entropy(x, labels)",
    "with smoothing": "F.cross_entropy(x, labels, label_smoothing=0.1, reduction='none')",
    "of probabilities": "F.cross_entropy(x, y.softmax(-1), reduction='none')",
    "likelihood of classes": "F.nll_loss(F.log_softmax(x, -1), labels, reduction='none')",
    "picked by hand": "-x.log_softmax(-1).gather(1, labels[:, None])[:, 0]",
    "divergence": "F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction='none').sum(-1)",
    "entropy": "-(x.softmax(-1) * x.log_softmax(-1)).sum(-1)",
    "logsumexp": "x.logsumexp(-1)",
    "softmax": "x.softmax(-1)",
    "binary cross entropy": "F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction='none').mean(-1)",
    "soft margin": "F.soft_margin_loss(x, y.sign(), reduction='none').mean(-1)",
    "mean": "x.mean(-1)",
    "variance": "x.var(-1)",
    "standard deviation": "x.std(-1)",
    "norm": "x.norm(dim=-1)",
    "layer norm": "F.layer_norm(x, x.shape[-1:])",
    "root mean square": "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)",
    "squared error": "F.mse_loss(x, y, reduction='none').mean(-1)",
    "cosine": "F.cosine_similarity(x, y, -1)",
}
LOGITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of usual size": lambda x: x,
    "large": lambda x: 100 * x,
    "far from zero": lambda x: x + 1000,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_error_is_at_most_twice_that_of_the_users_code(form: str, captured) -> None:
    text = f"""import torch
import torch.nn.functional as F
# mtmc: x=f32[N,C] y=f32[N,C] labels=i64[N]@0..299 N=48 C=300
def f(x, y, labels):
    return {FORMS[form]}
"""
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    names = [item.name for item in capture.graph.inputs]
    scope: dict[str, Callable[..., torch.Tensor]] = {}
    exec(text, scope)  # the text above
    too_large = {}
    for kind, change in LOGITS.items():
        generator = torch.Generator().manual_seed(7)
        x, y = (torch.randn(48, 300, generator=generator) for _ in range(2))
        inputs = {"x": change(x), "y": y, "labels": torch.randint(0, 300, (48,), generator=generator)}
        exact = scope["f"](inputs["x"].double(), inputs["y"].double(), inputs["labels"])
        errors = [
            float((value.double() - exact).norm() / exact.norm())
            for value in (scope["f"](**inputs), results(capture, candidate, {name: inputs[name] for name in names})[0])
        ]
        if errors[1] > 2 * errors[0] + EPSILON["float32"] / 2:
            too_large[kind] = errors
    assert too_large == {}
