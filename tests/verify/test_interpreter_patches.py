"""Features that correct kernels need and that the interpreter lacks work in a verification."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from honest import own
from pairs import POINTWISE, changed

from mtmc_lsp.core.results import Verdict

LAUNCH = "(x, out, x.numel(), BLOCK=64)"
PARAMETERS = "count, BLOCK: tl.constexpr"
LIBDEVICE = (
    "import triton.language as tl\n",
    "import triton.language as tl\nfrom triton.language.extra import libdevice\n",
)
TUNED = (
    "@triton.jit",
    "@triton.autotune([triton.Config({'BLOCK': b}, num_warps=w) for b in (64, 128) for w in (2, 4)], key=['count'])\n@triton.jit",
)
KINDS = {
    "a float argument with methods": (
        "x * 0.3",
        "x * scale.to(tl.float32)",
        ((PARAMETERS, f"count, scale, {PARAMETERS[7:]}"), (LAUNCH, "(x, out, x.numel(), 0.3, BLOCK=64)")),
    ),
    "functions of CUDA's library": (
        "torch.tanh(x) + torch.erf(x) + torch.hypot(x, x * 2)",
        "libdevice.tanh(x) + libdevice.erf(x) + libdevice.hypot(x, x * 2.0)",
        (LIBDEVICE,),
    ),
    "a choice by timing": (
        "x * 2 + 1",
        "x * 2 + 1",
        (TUNED, (LAUNCH, "(x, out, x.numel())"), ("(triton.cdiv(x.numel(), 64),)", "lambda m: (triton.cdiv(x.numel(), m['BLOCK']),)")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_kernel_with_this_is_certified(kind: str, judge: Callable[..., Verdict]) -> None:
    formula, triton, changes = KINDS[kind]
    verdict = judge(own(formula), "own", changed(POINTWISE.replace("FORMULA", triton), *changes), "fast")
    assert verdict.is_correct, verdict.reason


def test_a_wrong_function_of_cudas_library_is_found(judge: Callable[..., Verdict]) -> None:
    """The library's functions compute; they do not only pass."""
    text = changed(POINTWISE.replace("FORMULA", "libdevice.sinh(x)"), LIBDEVICE)
    assert not judge(own("torch.tanh(x)"), "own", text, "fast").is_correct
