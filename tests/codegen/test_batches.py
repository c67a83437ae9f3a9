"""Batches that are larger than the second dimension of a grid may be."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.protocols import CannotCode
from tests.codegen.harness import fused

HEAD = "import torch\n\n\n"
PRODUCT = """# mtmc: a=f32[B,16,16] b=f32[B,16,16] B=3
def f(a, b):
    return torch.relu(a @ b)
"""
ATTENTION = """# mtmc: q=f16[B,16,16] k=f16[B,16,16] v=f16[B,16,16] B=3
def f(q, k, v):
    return torch.softmax(q @ k.transpose(1, 2), -1) @ v
"""
PRODUCT_CONFIG = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "group_m": 4,
    "warps": 4,
    "stages": 2,
    "precision": "ieee",
}
ATTENTION_CONFIG = {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}
TARGETS = {"product": (PRODUCT, PRODUCT_CONFIG), "attention": (ATTENTION, ATTENTION_CONFIG)}


@pytest.mark.parametrize("name", TARGETS)
def test_the_guard_refuses_a_batch_that_no_grid_holds(name: str, captured) -> None:
    text, config = TARGETS[name]
    candidate = fused(captured(HEAD + text, "f"), HEAD + text, config)
    assert ".shape[0] <= 65535" in candidate.source


@pytest.mark.parametrize("name", TARGETS)
def test_a_workload_with_such_a_batch_is_refused_with_a_reason(name: str, captured) -> None:
    text, config = TARGETS[name]
    text = HEAD + text.replace("B=3", "B=65536")
    with pytest.raises(CannotCode, match="the kernels require B <= 65535, which does not hold"):
        fused(captured(text, "f"), text, config)
