"""Verification rejects wrong kernels of every family; each mutation is a typical kernel bug."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.core.errors import TargetRaises
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import verification_cases
from tests.codegen.checker import Checker, greedy
from tests.codegen.families import FAMILIES, source

LOOPED: dict[str, object] = {"rows": 2, "block": 4, "loop": True, "warps": 4, "stages": 2}
MUTATIONS: tuple[tuple[str, dict[str, object], str, str], ...] = (
    ("pointwise: chain", {}, "* 2.0", "* 2.001"),
    ("pointwise: chain", {}, "mask=col_mask", "mask=cols < n_cols - 1"),
    ("pointwise: chain", {}, "tl.exp(-", "tl.exp(1e-3 - "),
    ("pointwise: dropout by seed", {}, ">= 0.3", ">= 0.31"),
    ("pointwise: dropout by seed", {}, "seed_ptr)", "seed_ptr) + 1"),
    ("views: rotated halves", {}, "< 4", "< 3"),
    ("reductions: sum", LOOPED, "range(0, n_cols, BLOCK)", "range(0, n_cols - BLOCK, BLOCK)"),
    ("reductions: log of sums", {}, "tl.exp(", "tl.exp2("),
    ("reductions: softmax", LOOPED, '-float("inf")', "0.0"),
    ("reductions: argmax", {}, "tl.maximum(a", "tl.minimum(a"),
    ("reductions: variance", {}, "tl.sum(", "0.999 * tl.sum("),
    ("norms: layer", {}, "1e-05", "1e-02"),
    ("norms: root mean square", {}, "tl.rsqrt", "tl.sqrt"),
    ("norms: batch, evaluation", {}, "+ 1e-05", "- 1e-05"),
    ("products: matrices", {}, "acc = tl.dot(", "acc = 0.99 * tl.dot("),
    (
        "products: linear with prologue and epilogue",
        {},
        "start + tl.arange(0, BLOCK_K)",
        "start + 1 + tl.arange(0, BLOCK_K)",
    ),
    ("products: batched", {}, "acc * 2.0", "acc * 2.0 + 1e-3"),
    ("scans: sums", LOOPED, "carry = tl.sum(", "carry = 0.0 * tl.sum("),
    ("scans: reverse sums", {}, ", reverse=True", ""),
    ("convolutions: many channels", {}, "kernel_position // 3", "kernel_position % 3"),
    ("convolutions: depthwise", {}, "tl.static_range(9)", "tl.static_range(8)"),
    ("convolutions: transposed, cut", {}, "tl.dot(", "0.99 * tl.dot("),
    ("pooling: max", {}, '-float("inf")', "0.0"),
    ("pooling: average with ceil_mode", {}, "tl.minimum(", "tl.maximum("),
    ("losses: cross entropy, smoothed", {}, "* 0.1", "* 0.11"),
    ("losses: cross entropy, ignoring", {}, "!= 3", "!= 4"),
    ("losses: divergence", {}, "tl.log(", "tl.log2("),
    ("indexing: gather", {}, "* 2.0", "* 2.0 + 1.0"),
    ("indexing: rows", {}, "+ 11", "+ 10"),
    ("attention: causal", {}, "<=", "<"),
    ("attention: causal", {}, "first_query + BLOCK_M,", "first_query,"),
    ("attention: plain", {}, " * 0.51", " * 0.53"),
)


def rejection(checker: Checker, capture: Capture, candidate: Candidate) -> str:
    """The first failure on the cases that verification runs."""
    for case in verification_cases(capture, interpreted=True, seed=5):
        if not case.expects_kernel:
            continue
        try:
            if wrong := checker.failures(capture, [candidate], case)[0]:
                return wrong
        except TargetRaises:
            # The user's code does not support these sizes.
            continue
    return ""


@pytest.mark.parametrize(("family", "config", "old", "new"), MUTATIONS)
def test_a_wrong_kernel_is_rejected(
    checker: Checker, family: str, config: dict[str, object], old: str, new: str
) -> None:
    capture = checker.capture(source(FAMILIES[family], "f32"))
    good = greedy(capture, config)
    own, kernels, launcher = re.split(r"(?=# mtmc: begin|def f_fits)", good.source, maxsplit=2)
    assert old in kernels
    wrong = replace(good, source=f"{own}{kernels.replace(old, new)}{launcher}")
    assert "values: " in rejection(checker, capture, wrong)
