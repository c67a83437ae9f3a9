"""What the oldest supported versions of torch and triton cannot do, for tests that need it."""

from __future__ import annotations

import re

import pytest
import torch
import triton


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


OLDEST_TORCH, OLDEST_TRITON = _numbers(torch.__version__) <= (2, 11), _numbers(triton.__version__) <= (3, 6)
needs_scales_of_rows = pytest.mark.skipif(
    OLDEST_TORCH, reason="torch._scaled_mm of PyTorch 2.11 has scales of tensors alone on a CPU"
)
