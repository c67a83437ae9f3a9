"""Wrong by precision: lower inside, or results of another type."""

from __future__ import annotations

import torch

from benchmarks.adversarial_second.cases import table
from benchmarks.adversarial_second.witnesses import at, on

CASES = table(
    "dtypes",
    [
        (
            "exponentials in half precision",
            "softmax",
            [("numerator = tl.exp(shifted)", "numerator = tl.exp(shifted).to(tl.float16).to(tl.float32)")],
            at("softmax"),
        ),
        (
            "input rounded to bfloat16",
            "layer_norm",
            [("mask=inside, other=0.0)\n    mean", "mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)\n    mean")],
            at("layer_norm"),
        ),
        (
            "product of half precision inputs",
            "linear_gelu",
            [('tl.dot(x, w, input_precision="ieee")', "tl.dot(x.to(tl.float16), w.to(tl.float16))")],
            at("linear_gelu"),
        ),
        (
            "inputs cut to 10 bits of mantissa",
            "linear_gelu",
            [("tl.dot(x, w,", "tl.dot((x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True), w,")],
            at("linear_gelu"),
        ),
        (
            "weight in 8 bits",
            "rms_norm",
            [("other=0.0)\n    tl.store", "other=0.0).to(tl.float8e5).to(tl.float16)\n    tl.store")],
            at("rms_norm"),
        ),
        ("index of 32 bits", "best", [("dtype=torch.int64", "dtype=torch.int32")], at("best")),
        (
            "result of the default dtype",
            "rms_norm",
            [("out = torch.empty_like(x)", "out = torch.empty(x.shape, dtype=torch.float32)")],
            at("rms_norm"),
        ),
        (
            "half precision result of a small sum",
            "cross_entropy",
            [("    return out", "    return out.to(torch.float16).to(torch.float32)")],
            at("cross_entropy"),
        ),
        (
            "sums stay in half precision",
            "gated",
            [("y = x * scale + shift", "y = (x * scale + shift).to(tl.float16).to(tl.float32)")],
            at("gated"),
        ),
        (
            "masked value is -5",
            "masked_softmax",
            [("tl.where(hidden != 0, -1e9, x)", "tl.where(hidden != 0, -5.0, x)")],
            at("masked_softmax"),
        ),
        (
            "float64 answers for float32 code",
            "softmax",
            [("    return out\n", "    return out.double()\n")],
            at("softmax"),
        ),
        (
            "index through a float",
            "best",
            [
                (
                    "tl.store(index_ptr + row, tl.min(tl.where(hit, cols, BLOCK), axis=0))",
                    "tl.store(index_ptr + row, tl.min(tl.where(hit, cols, BLOCK), axis=0).to(tl.float16).to(tl.int64))",
                )
            ],
            on(lambda: [torch.nn.functional.one_hot(torch.tensor([2049, 2051]), 2060).float()]),
        ),
    ],
)
