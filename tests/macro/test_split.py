"""Reductions in parts and products split along K compute what the user's code computes."""

from __future__ import annotations

import pytest

from tests.micro.harness import fused, verified
from tests.micro.test_kernels import COLUMNS, GROUP, LOSS, NORM, SOFTMAX

TOTAL = """import torch
# mtmc: x=f32[N,M] N=30 M=70
def f(x):
    return (x * 2).sum(), x.mean(), x.max()
"""
PLACES = """import torch
# mtmc: x=f32[B,D] B=3 D=90
def f(x):
    return x.argmax(-1), x.argmin(-1), (x > -9).all(-1), (x > 1).any(-1)
"""
CASES = {
    "norm with its variance": (NORM, {"rows": 1, "block": 16, "split": 4}),
    "norm, several rows": (NORM, {"rows": 4, "block": 16, "split": 2}),
    "online softmax": (SOFTMAX, {"rows": 1, "block": 16, "split": 4}),
    "softmax, several rows": (SOFTMAX, {"rows": 2, "block": 16, "split": 8}),
    "middle dimension": (COLUMNS, {"rows": 8, "block": 4, "split": 2}),
    "group norm": (GROUP, {"rows": 1, "block": 16, "split": 2}),
    "cross entropy": (LOSS, {"rows": 2, "block": 16, "split": 2}),
    "a whole tensor": (TOTAL, {"block": 64, "split": 8}),
    "places and truths": (PLACES, {"rows": 1, "block": 16, "split": 4}),
    "places, several rows": (PLACES, {"rows": 2, "block": 16, "split": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reduction_in_parts_equals_the_users_code(name: str, captured) -> None:
    text, config = CASES[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, {"warps": 4, **config})
    assert "PARTS * BLOCK" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
