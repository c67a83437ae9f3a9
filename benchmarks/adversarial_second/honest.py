"""Correct kernels in many styles: each base kernel, other algorithms, and changes that keep the results right."""

from __future__ import annotations

from benchmarks.adversarial_second import honest_more
from benchmarks.adversarial_second.cases import FOLDER, Case, Edit

VARIANTS: list[tuple[str, str, list[Edit]]] = [
    (
        "blocks twice as wide",
        "softmax",
        [("BLOCK=triton.next_power_of_2(cols)", "BLOCK=2 * triton.next_power_of_2(cols)")],
    ),
    ("exp2 instead of exp", "softmax", [("tl.exp(shifted)", "tl.exp2(shifted * 1.4426950408889634)")]),
    ("a product with the reciprocal", "softmax", [("numerator / total", "numerator * (1.0 / total)")]),
    ("packed first", "softmax", [("    rows, cols = x.shape\n", "    x = x.contiguous()\n    rows, cols = x.shape\n")]),
    (
        "options of the launch",
        "softmax",
        [("BLOCK=triton.next_power_of_2(cols)", "BLOCK=triton.next_power_of_2(cols), num_warps=8, num_stages=2")],
    ),
    ("grid from a function", "softmax", [("softmax_kernel[(rows,)]", "softmax_kernel[lambda meta: (rows,)]")]),
    ("zeros for the result", "layer_norm", [("out = torch.empty_like(x)", "out = torch.zeros_like(x)")]),
    ("root and division", "layer_norm", [("centred * tl.rsqrt(variance + eps)", "centred / tl.sqrt(variance + eps)")]),
    ("fused multiply and add", "layer_norm", [("normed * weight + bias", "tl.fma(normed, weight, bias)")]),
    (
        "reciprocal of the width",
        "layer_norm",
        [
            (
                "variance = tl.sum(centred * centred, axis=0) / n_cols",
                "variance = tl.sum(centred * centred, axis=0) * (1.0 / n_cols)",
            )
        ],
    ),
    (
        "a check of its arguments",
        "layer_norm",
        [
            (
                "    x, weight, bias = x",
                "    assert x.dim() == 2 and weight.shape == bias.shape\n    x, weight, bias = x",
            )
        ],
    ),
    ("epsilon at compile time", "rms_norm", [("n_cols, eps, BLOCK", "n_cols, eps: tl.constexpr, BLOCK")]),
    (
        "mean of halves of the row",
        "rms_norm",
        [
            (
                "tl.sum(x * x, axis=0)",
                "(tl.sum(tl.where(cols < 64, x * x, 0.0), axis=0) + tl.sum(tl.where(cols >= 64, x * x, 0.0), axis=0))",
            )
        ],
    ),
    ("explicit type of the result", "rms_norm", [(".to(out_ptr.dtype.element_ty)", ".to(tl.float16)")]),
    (
        "tiles of 16",
        "linear_gelu",
        [
            ("triton.cdiv(M, 32), triton.cdiv(N, 32)", "triton.cdiv(M, 16), triton.cdiv(N, 16)"),
            ("BM=32, BN=32, BK=32", "BM=16, BN=16, BK=16"),
        ],
    ),
    (
        "tall tiles",
        "linear_gelu",
        [("triton.cdiv(M, 32), ", "triton.cdiv(M, 64), "), ("BM=32, BN=32, BK=32", "BM=64, BN=32, BK=16")],
    ),
    (
        "bias first",
        "linear_gelu",
        [
            (
                "total = tl.zeros((BM, BN), dtype=tl.float32)",
                "total = tl.zeros((BM, BN), dtype=tl.float32) + tl.load(bias_ptr + cols * b_stride, mask=cols < N, other=0.0)[None, :]",
            ),
            ("y = total + tl.load(bias_ptr + cols * b_stride, mask=cols < N, other=0.0)[None, :]", "y = total"),
        ],
    ),
    ("tiles of 32 columns", "running_sum", [("BLOCK=64", "BLOCK=32")]),
    ("the whole row in a tile", "running_sum", [("BLOCK=64", "BLOCK=triton.next_power_of_2(x.shape[1])")]),
    ("carry before the store", "running_sum", [("tl.cumsum(x, axis=0) + carry", "carry + tl.cumsum(x, axis=0)")]),
    (
        "target masked by comparison",
        "cross_entropy",
        [("tl.load(logits_ptr + row * n_cols + target)", "tl.sum(tl.where(cols == target, logits, 0.0), axis=0)")],
    ),
    (
        "narrow index",
        "cross_entropy",
        [("target = tl.load(target_ptr + row)", "target = tl.load(target_ptr + row).to(tl.int32)")],
    ),
    ("small blocks", "gated", [("triton.cdiv(count, 256)", "triton.cdiv(count, 128)"), ("BLOCK=256", "BLOCK=128")]),
    ("sigmoid of the library", "gated", [("y = y / (1.0 + tl.exp(-y))", "y = y * tl.sigmoid(y)")]),
    (
        "a cached block size",
        "gated",
        [
            ("def gated(x, scale, shift):\n", "sizes = {}\n\n\ndef gated(x, scale, shift):\n"),
            ("triton.cdiv(count, 256)", "triton.cdiv(count, sizes.setdefault(x.device, 256))"),
        ],
    ),
    ("mask as bytes", "masked_softmax", [("mask.contiguous()", "mask.contiguous().view(torch.uint8)")]),
    ("tanh form of the gate", "gated_norm", [("tl.sigmoid(gate)", "1.0 / (1.0 + tl.exp(-gate))")]),
    (
        "width kept by the module",
        "gated_norm",
        [
            ("        self.eps = eps\n", "        self.eps = eps\n        self.width = width\n"),
            ("cols = x.shape[-1]", "cols = self.width"),
        ],
    ),
    ("a kernel per row of a view", "gated_norm", [("x = x.contiguous()", "x = x.contiguous().view(x.shape)")]),
    ("indices by torch's own type", "best", [("dtype=torch.int64", "dtype=torch.long")]),
]

TUNED = '@triton.autotune(configs=[triton.Config({}, num_warps=w) for w in (2, 4, 8)], key=["n"])\n'


def untried(reference: object, candidate: object) -> tuple[None, None]:
    """Triton's interpreter alone cannot autotune: it needs a driver."""
    return None, None


CASES = [
    *(
        Case("honest", f"{path.stem}, as it is", path.stem, (), None, "certified")
        for path in sorted((FOLDER / "kernels").glob("*.py"))
    ),
    *(
        Case("honest", f"{base}, {name}", base, tuple(edits), None, "certified")
        for name, base, edits in VARIANTS + honest_more.VARIANTS
    ),
    Case(
        "honest",
        "softmax, autotuned",
        "softmax__heuristics",
        (("@triton.heuristics(", TUNED + "@triton.heuristics("),),
        untried,
        "certified",
    ),
]
