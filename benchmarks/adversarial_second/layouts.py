"""Wrong for arguments that are not packed: slices, transposes, expanded rows, offsets into storage, shared memory."""

from __future__ import annotations

import torch

from benchmarks.adversarial_second.cases import Witness, table
from benchmarks.adversarial_second.witnesses import changed, inputs, on


def wider(x: torch.Tensor) -> torch.Tensor:
    """The same values as columns of a wider tensor."""
    return torch.cat([x, x + 1], -1)[..., : x.shape[-1]]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in every second column."""
    return x.repeat_interleave(2, -1).add(torch.arange(2 * x.shape[-1]) % 2)[..., ::2]


def offset(x: torch.Tensor) -> torch.Tensor:
    """The same values, packed, not at the beginning of their storage."""
    return torch.cat([x.flatten()[:5] * 3, x.flatten()])[5:].view(x.shape)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Its first row in all rows, without copies."""
    return x[:1].expand_as(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values with the first dimension innermost."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def second(base: str, index: int, change: object) -> Witness:
    """One call whose argument ``index`` is changed."""

    def make() -> list[torch.Tensor]:
        arguments = inputs(base)
        arguments[index] = change(arguments[index])  # type: ignore[operator]
        return arguments

    return on(make)


X_CALL = "softmax_kernel[(rows,)](x, out, x.stride(0), x.stride(1), cols"
RAW = "torch.as_strided(x, x.shape, (x.shape[1], 1))"

CASES = table(
    "layouts",
    [
        (
            "row stride is the width",
            "softmax",
            [("x.stride(0), x.stride(1), cols", "cols, x.stride(1), cols")],
            changed("softmax", wider),
        ),
        (
            "column stride is one",
            "softmax",
            [("x.stride(0), x.stride(1), cols", "x.stride(0), 1, cols")],
            changed("softmax", strided),
        ),
        (
            "strides by is_contiguous of the first row",
            "layer_norm",
            [
                (
                    "x, weight, bias = x.contiguous(), ",
                    "x, weight, bias = x if x[:1].is_contiguous() else x.contiguous(), ",
                ),
                ("torch.empty_like(x)", "torch.empty(x.shape, dtype=x.dtype)"),
            ],
            changed("layer_norm", wider),
        ),
        (
            "weight is never copied",
            "layer_norm",
            [("weight.contiguous(), ", "weight, ")],
            second("layer_norm", 1, strided),
        ),
        (
            "bias stride is forgotten",
            "linear_gelu",
            [("bias.stride(0), BM", "1, BM")],
            second("linear_gelu", 2, strided),
        ),
        (
            "reads from the beginning of storage",
            "rms_norm",
            [
                (
                    "x, weight = x.contiguous(), ",
                    "x, weight = torch.as_strided(x.contiguous(), x.shape, (x.shape[1], 1), 0), ",
                )
            ],
            changed("rms_norm", offset),
        ),
        (
            "weight read from the beginning of storage",
            "rms_norm",
            [("weight.contiguous()", "torch.as_strided(weight, weight.shape, weight.stride(), 0).contiguous()")],
            second("rms_norm", 1, offset),
        ),
        (
            "a repeated row is taken as packed",
            "running_sum",
            [("x = x.contiguous()", "x = x.contiguous() if x.stride(0) else torch.as_strided(x, x.shape, (0, 1)) * 2")],
            changed("running_sum", repeated),
        ),
        (
            "repeated columns are added twice",
            "running_sum",
            [("x = x.contiguous()", "x = x.contiguous() if x.stride(1) else x * 2")],
            changed("running_sum", lambda x: x[:, :1].expand_as(x)),
        ),
        (
            "transposed weights are not transposed",
            "linear_gelu",
            [("*weight.stride(), ", "max(weight.stride()), min(weight.stride()), ")],
            second("linear_gelu", 1, transposed),
        ),
        (
            "every third column of a slice",
            "gated",
            [("x.contiguous(), scale", "(x * 2 if x.stride(-1) == 3 else x).contiguous(), scale")],
            changed("gated", lambda x: x.repeat_interleave(3, -1)[..., ::3]),
        ),
        (
            "middle dimension permuted",
            "gated",
            [
                ("x, scale, shift = x.contiguous()", "x, scale, shift = x if x.stride(-1) == 1 else x.contiguous()"),
                ("torch.empty_like(x)", "torch.empty(x.shape, dtype=x.dtype)"),
            ],
            changed("gated", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        ),
        (
            "shift with one sample repeated",
            "gated",
            [("shift.contiguous()", "(shift if shift.stride(0) else shift * 0.5).contiguous()")],
            second("gated", 2, repeated),
        ),
        (
            "mask columns of a wider mask",
            "masked_softmax",
            [("x.contiguous(), mask.contiguous()", "x.contiguous(), mask")],
            second("masked_softmax", 1, lambda m: torch.cat([m, ~m], -1)[:, : m.shape[1]]),
        ),
        (
            "unaligned storage",
            "best",
            [("    x = x.contiguous()\n", "    x = x.contiguous()\n    x = x if x.data_ptr() % 16 == 0 else -x\n")],
            changed("best", offset),
        ),
        (
            "targets with a stride",
            "cross_entropy",
            [("target.contiguous()", "target")],
            second("cross_entropy", 1, lambda t: torch.stack([t, t.flip(0)], 1).flatten()[::2]),
        ),
        (
            "result written over a transposed input",
            "softmax",
            [
                (
                    "torch.empty(x.shape, dtype=x.dtype, device=x.device)",
                    "x if x.stride(0) == 1 and x.shape[1] > 1 and x.shape[0] > 3 else torch.empty(x.shape, dtype=x.dtype)",
                )
            ],
            changed("softmax", transposed),
        ),
    ],
)
