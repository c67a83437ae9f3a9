"""Wrong for values that random inputs rarely have: ties, wide means, extremes, masks, special rows."""

from __future__ import annotations

import torch

from benchmarks.adversarial_second.cases import table
from benchmarks.adversarial_second.witnesses import changed, inputs, on

NAN = float("nan")


def all_hidden() -> list[torch.Tensor]:
    """A row whose every column is masked."""
    x, mask = inputs("masked_softmax")
    mask[1] = True
    return [x, mask]


def last_target() -> list[torch.Tensor]:
    """Targets that are all the last class."""
    logits, target = inputs("cross_entropy")
    return [logits, torch.full_like(target, logits.shape[1] - 1)]


def one_spike(value: float, place: int = -1) -> object:
    """Puts a value into one element of each row."""

    def change(x: torch.Tensor) -> torch.Tensor:
        x[:, place] = value
        return x

    return change


SUM = "total = tl.sum(tl.where(inside, numerator, 0.0), axis=0)"

CASES = table(
    "values",
    [
        (
            "no maximum subtracted",
            "softmax",
            [("shifted = x - tl.max(x, axis=0)", "shifted = x")],
            changed("softmax", lambda x: x + 100),
        ),
        (
            "maximum clamped",
            "softmax",
            [("x - tl.max(x, axis=0)", "x - tl.minimum(tl.max(x, axis=0), 20.0)")],
            changed("softmax", lambda x: x + 200),
        ),
        (
            "exponent clamped at -20",
            "softmax",
            [("tl.exp(shifted)", "tl.exp(tl.maximum(shifted, -20.0))")],
            on(lambda: [torch.linspace(0, -60, 64).repeat(2, 1)], torch.log),
        ),
        (
            "small probabilities flushed",
            "softmax",
            [("numerator / total", "tl.where(numerator / total < 1e-12, 0.0, numerator / total)")],
            on(lambda: [torch.linspace(-30, -60, 64).repeat(2, 1) - torch.tensor([-60.0] + [0] * 63)], torch.log),
        ),
        (
            "one-pass variance",
            "layer_norm",
            [
                (
                    "variance = tl.sum(centred * centred, axis=0) / n_cols",
                    "variance = tl.sum(x * x, axis=0) / n_cols - mean * mean",
                )
            ],
            changed("layer_norm", lambda x: x + 3000),
        ),
        (
            "variance clamped from below",
            "layer_norm",
            [("variance + eps", "tl.maximum(variance, 1e-4) + eps")],
            changed("layer_norm", lambda x: x * 1e-3),
        ),
        (
            "epsilon ten times as large",
            "layer_norm",
            [("cols, 1e-5,", "cols, 1e-4,")],
            changed("layer_norm", lambda x: x * 0.003),
        ),
        (
            "epsilon added to the deviation",
            "layer_norm",
            [("tl.rsqrt(variance + eps)", "1.0 / (tl.sqrt(variance) + eps)")],
            changed("layer_norm", lambda x: x * 1e-3),
        ),
        (
            "no epsilon for rows of zeros",
            "rms_norm",
            [("/ n_cols + eps)", "/ n_cols)")],
            changed("rms_norm", lambda x: x * 0),
        ),
        (
            "squares in half precision",
            "rms_norm",
            [("other=0.0).to(tl.float32)", "other=0.0)")],
            changed("rms_norm", lambda x: x * 120),
        ),
        (
            "gelu by tanh",
            "linear_gelu",
            [
                (
                    "0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))",
                    "y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))",
                )
            ],
            on(lambda: [torch.full((2, 1), -3.0), torch.ones(1, 4), torch.linspace(-0.3, 0.3, 4)]),
        ),
        (
            "gelu is linear above 4",
            "linear_gelu",
            [("y = 0.5 * y *", "y = 0.5 * tl.where(y > 30.0, 30.0, y) *")],
            changed("linear_gelu", lambda x: x * 30),
        ),
        (
            "silu overflows for negative values",
            "gated",
            [("y = y / (1.0 + tl.exp(-y))", "y = y * tl.exp(y) / (1.0 + tl.exp(y))")],
            changed("gated", lambda x: x * 200),
        ),
        (
            "negative zeros and tiny values vanish",
            "gated",
            [("y * x, mask", "tl.where(tl.abs(x) < 1e-6, 0.0, y * x), mask")],
            on(lambda: [torch.full((1, 2, 8), 1e-7), torch.ones(8), torch.ones(1, 1, 8)]),
        ),
        (
            "ties give the last index",
            "best",
            [("tl.min(tl.where(hit, cols, BLOCK), axis=0)", "tl.max(tl.where(hit, cols, 0), axis=0)")],
            changed("best", torch.zeros_like),
        ),
        (
            "NaN is not the maximum",
            "best",
            [
                ("hit = tl.where(any_nan, strange, (x == top) & inside)", "hit = (x == top) & inside"),
                ('tl.where(any_nan, float("nan"), top)', "top"),
            ],
            changed("best", one_spike(NAN, 2)),
        ),
        (
            "negative rows count from zero",
            "best",
            [('other=float("-inf"))\n    strange', "other=0.0)\n    strange")],
            changed("best", lambda x: -x.abs() - 1),
        ),
        (
            "all-masked rows are zeros",
            "masked_softmax",
            [
                (
                    "numerator / total, mask=inside",
                    "tl.where(tl.max(x, axis=0) < -1e8, 0.0, numerator / total), mask=inside",
                )
            ],
            on(all_hidden),
        ),
        (
            "mask adds instead of replacing",
            "masked_softmax",
            [("tl.where(hidden != 0, -1e9, x)", "tl.where(hidden != 0, x - 1e4, x)")],
            on(all_hidden),
        ),
        (
            "last class is the first",
            "cross_entropy",
            [
                (
                    "target = tl.load(target_ptr + row)",
                    "target = tl.load(target_ptr + row)\n    target = tl.where(target == n_cols - 1, 0, target)",
                )
            ],
            on(last_target),
        ),
        (
            "loss is at least 1e-3",
            "cross_entropy",
            [
                (
                    "tl.store(out_ptr + row, total - tl.load(logits_ptr + row * n_cols + target))",
                    "tl.store(out_ptr + row, tl.maximum(total - tl.load(logits_ptr + row * n_cols + target), 1e-3))",
                )
            ],
            on(lambda: [torch.eye(6) * 30, torch.arange(6)]),
        ),
        (
            "no maximum subtracted from logits",
            "cross_entropy",
            [("    top = tl.max(logits, axis=0)\n", "    top = tl.max(logits, axis=0) * 0\n")],
            on(lambda: [inputs("cross_entropy")[0] + 100, inputs("cross_entropy")[1]]),
        ),
        (
            "infinite carry is dropped",
            "running_sum",
            [("carry += tl.sum(x, axis=0)", "carry += tl.minimum(tl.sum(x, axis=0), 1e3)")],
            changed("running_sum", lambda x: x.abs() * 1e3),
        ),
        (
            "running sum in half precision of the carry",
            "running_sum",
            [("carry += tl.sum(x, axis=0)", "carry = (carry + tl.sum(x, axis=0)).to(tl.float16).to(tl.float32)")],
            changed("running_sum", lambda x: x + 5),
        ),
    ],
)
