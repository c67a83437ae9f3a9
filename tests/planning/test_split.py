"""Reductions in parts and products split along K compute what the user's code computes."""

from __future__ import annotations

import pytest

from tests.codegen.harness import fused, verified
from tests.codegen.test_kernels import COLUMNS, DROPOUT, GROUP, LINEAR, LOSS, NORM, ROTARY, SCAN, SOFTMAX

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


BATCHED = """import torch
# mtmc: a=f32[B,M,K] b=f32[B,K,N] B=2 M=20 K=70 N=24
def f(a, b):
    return torch.relu(a @ b) + 1.0
"""
TALL = BATCHED.replace("M=20", "M=36")
COMPUTED = """import torch
# mtmc: a=f32[M,K]@1..2 b=f32[K,N] M=34 K=70 N=36
def f(a, b):
    return torch.reciprocal(a * 1000 + 0.001) @ b + 1.0
"""
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2}
PRODUCTS = {
    "linear": (LINEAR, {"precision": "ieee", "split_k": 2}),
    "linear by split operands": (LINEAR, {"precision": "fp16x3", "split_k": 4}),
    "linear by split operands, tiles moved by hardware": (LINEAR, {"precision": "fp16x3", "tma": True, "split_k": 4}),
    "batched": (BATCHED, {"precision": "ieee", "split_k": 4}),
    "both operands split as they are read": (
        LINEAR,
        {"precision": "fp16x3-promoted", "split_on_load": "both", "split_k": 4},
    ),
    "batches split as they are read": (
        BATCHED,
        {"precision": "fp16x3-promoted", "split_on_load": "both", "split_k": 2},
    ),
    "what is computed split before it is summed": (
        COMPUTED,
        {"precision": "fp16x3-promoted", "split_on_load": "both", "split_k": 2},
    ),
}


def test_program_instances_that_share_a_sum_count_only_their_blocks(captured) -> None:
    """Each program instance takes every fourth block and counts only its blocks per piece."""
    capture = captured(LINEAR, "f")
    config = {**SMALL, "precision": "fp16x3", "split_k": 4}
    source = fused(capture, LINEAR, config).source
    assert "if (start // (PARTS * BLOCK_K) + 1) % PIECE == 0:" in source


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_split_along_k_equals_the_users_code(name: str, captured) -> None:
    text, config = PRODUCTS[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, {**SMALL, **config})
    assert [launch.kernel for launch in candidate.launches][-2:] == ["f_kernel_parts", "f_kernel"]
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


PERSISTENT = {
    "product": (LINEAR, {**SMALL, "precision": "ieee", "persist": 3}),
    "batched product": (BATCHED, {**SMALL, "precision": "ieee", "persist": 2}),
    "product, one loop over tiles and K": (LINEAR, {**SMALL, "precision": "ieee", "persist": 3, "flatten": True}),
    "product, tiles moved by hardware": (LINEAR, {**SMALL, "precision": "fp16x3", "tma": True, "persist": 3}),
    "batched product, tiles moved by hardware": (TALL, {**SMALL, "precision": "fp16x3", "tma": True, "persist": 2}),
    "norm, whole rows": (NORM, {"rows": 1, "block": 64, "persist": 4}),
    "norm, several rows": (NORM, {"rows": 2, "block": 64, "persist": 2}),
    "norm, looped": (NORM, {"rows": 1, "block": 32, "loop": True, "persist": 4}),
    "elementwise": (ROTARY, {"rows": 4, "block": 16, "persist": 2}),
    "elementwise over one axis": (DROPOUT, {"block": 64, "persist": 3}),
    "scan": (SCAN, {"rows": 2, "block": 16, "persist": 2}),
}


@pytest.mark.parametrize("name", PERSISTENT)
def test_persistent_programs_equal_the_users_code(name: str, captured) -> None:
    text, config = PERSISTENT[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, config)
    assert "tl.num_programs(0)" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_values_without_a_row_axis_are_loaded_once_per_program_instance(captured) -> None:
    capture = captured(NORM, "f")
    source = fused(capture, NORM, {"rows": 1, "block": 64, "persist": 4}).source
    assert source.index("w = tl.load(") < source.index("for row in range(")


def test_columns_may_be_the_inner_order_of_programs(captured) -> None:
    capture = captured(ROTARY, "f")
    candidate = fused(capture, ROTARY, {"rows": 4, "block": 16, "order": "columns"})
    assert "rows = tl.program_id(1)" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
