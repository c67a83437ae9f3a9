"""Configurations that a file computes are read from its text, so that further ones are proposed."""

from __future__ import annotations

import pytest

from mtmc_lsp.kernels.actions.tuning.computed import computed_configurations
from mtmc_lsp.kernels.actions.tuning.configuration import Configuration
from tests.kernels.observing import HEADER
from tests.kernels.proposing import applied, proposed

COMPREHENSION = '[triton.Config({"BLOCK": b, "HALF": b // 2}, num_warps=w) for b in [64, 128] for w in (4, 8)]'
FILE = b"""
WARPS = [triton.Config({}, num_warps=w) for w in range(1, 3)]

def configs():
    '''The configurations.'''
    return WARPS + [triton.Config(kwargs={"BLOCK": 2 * 32}, num_stages=2)]

def changing():
    print("configs")
    return WARPS
"""


def test_comprehensions_names_and_functions_are_followed() -> None:
    assert computed_configurations(COMPREHENSION, FILE) == tuple(
        Configuration((("BLOCK", block), ("HALF", block // 2)), warps, 3) for block in (64, 128) for warps in (4, 8)
    )
    warps = (Configuration((), 1, 3), Configuration((), 2, 3))
    assert computed_configurations("WARPS", FILE) == warps
    assert computed_configurations("configs()", FILE) == (*warps, Configuration((("BLOCK", 64),), 4, 2))


@pytest.mark.parametrize(
    "expression",
    [
        "changing()",
        "configs(3)",
        "missing",
        "[make(b) for b in [1, 2]]",
        "[triton.Config({'B': b}) for b in [1, 2] if b > 1]",
        "[triton.Config({'B': b}) for b in sizes]",
        "[triton.Config({'B': f(b)}) for b in [1, 2]]",
        "[triton.Config({'B': b}, pre_hook=hook) for b in [1, 2]]",
        "[triton.Config({'B': b}, num_warps='4') for b in [1, 2]]",
        "[triton.Config({'B': b}) for b in range(10000)]",
        "[",
    ],
)
def test_what_the_text_does_not_tell_stays_unknown(expression: str) -> None:
    assert computed_configurations(expression, FILE) == ()


ROWS = (
    HEADER
    + """\
@triton.autotune(
    configs=[
        triton.Config({"BLOCK": b}, num_warps=w)
        for b in [64, 128]
        for w in [4, 8]
    ],
    key=["n"],
)
@triton.jit
def rows_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2.0 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def rows(x):
    out = torch.empty_like(x)
    rows_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out
"""
)


def test_computed_configurations_get_neighbours_with_other_blocks_and_warps() -> None:
    text = applied(ROWS, "autotune", constants={"BLOCK": 64}, has_gpu=True)
    added = text.partition("    ] + [")[2].partition("],")[0]
    assert 'triton.Config({"BLOCK": 256}, num_warps=4, num_stages=3)' in added
    assert "num_warps=16" in added or "num_warps=2" in added
    assert 'triton.Config({"BLOCK": 64}, num_warps=4, num_stages=3)' not in added, "it is one of the author's"
    assert "for w in [4, 8]\n    ] + [" in text
    unknown = ROWS.replace("[64, 128]", "sizes()")
    assert proposed(unknown, "autotune", constants={"BLOCK": 64}, has_gpu=True) == []
