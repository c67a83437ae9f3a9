"""Usual values for constants of kernels that no launch of their file tells."""

from __future__ import annotations

import pytest

from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.triton.launch_sites import LaunchForm, launch_forms

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
KERNEL = """@triton.jit
def k(x_ptr, y_ptr, n, eps: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, USE_BIAS: tl.constexpr,
      KIND: tl.constexpr, out_type: tl.constexpr, FAST: tl.constexpr = True):
    at = tl.program_id(0) * D + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n) + eps
    if USE_BIAS and FAST:
        x += 1.0
    if KIND == "mean":
        x = x / D
    tl.store(y_ptr + at, x.to(out_type), mask=at < n)


"""
LAUNCH = """def f(x, y, options):
    k[(1,)](x, y, x.numel(), 1e-5, x.shape[1], options.block, False, options.kind, tl.float16)
"""


def forms(text: str, *, assumes: bool = True) -> list[LaunchForm]:
    outline = Outliner("/m.py").outline(text.encode(), parse(text.encode()))
    return launch_forms(outline, "/m.py", assumes=assumes)


def test_unknown_constants_get_values_by_their_uses() -> None:
    (form,) = forms(HEAD + KERNEL)
    assert form.launch.constexprs == {
        "eps": 1.0,
        "D": 4,
        "BLOCK": 64,
        "USE_BIAS": False,
        "KIND": "mean",
        "out_type": "triton.dtype:fp32",
        "FAST": True,
    }
    assert form.assumed == ("eps", "D", "BLOCK", "USE_BIAS", "KIND", "out_type"), "a default is known"


def test_values_of_the_launch_are_not_assumed() -> None:
    (form,) = forms(HEAD + KERNEL + LAUNCH)
    assert form.launch.constexprs["eps"] == 1e-5
    assert form.assumed == ("D", "BLOCK", "KIND", "out_type")


def test_forms_of_the_checks_assume_nothing() -> None:
    assert forms(HEAD + KERNEL + LAUNCH, assumes=False) == []


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("x = tl.zeros([UNKNOWN, 2], tl.float32)", 64),
        ("x = tl.arange(0, UNKNOWN // 2)", 64),
        ("x = 1 if UNKNOWN else 2", False),
        ("x = 2 if not UNKNOWN else UNKNOWN", 4),
        ("x = tl.zeros([2], dtype=UNKNOWN)", "triton.dtype:fp32"),
    ],
)
def test_a_use_decides_the_value(statement: str, value: object) -> None:
    text = f"{HEAD}@triton.jit\ndef k(x_ptr, UNKNOWN: tl.constexpr):\n    {statement}\n    tl.store(x_ptr, 1.0)\n"
    (form,) = forms(text)
    assert form.launch.constexprs == {"UNKNOWN": value}


def test_helpers_of_other_kernels_have_no_form() -> None:
    assert forms(f"{HEAD}@triton.jit\ndef add(a, b, N: tl.constexpr):\n    return a + b * N\n") == []
    assert forms(f"{HEAD}@triton.jit\ndef get(x_ptr, N: tl.constexpr):\n    return tl.load(x_ptr + N)\n") == []
    (form,) = forms(f"{HEAD}@triton.jit\ndef put(x_ptr, value):\n    tl.store(x_ptr, value)\n    return\n")
    assert form.assumed == ()


def test_blocks_are_small_where_a_tile_may_have_several_dimensions() -> None:
    names = ("A", "B", "C", "D")
    parameters = ", ".join(f"{name}: tl.constexpr" for name in names)
    body = "\n".join(f"    x{name} = tl.arange(0, {name})" for name in names)
    (form,) = forms(f"{HEAD}@triton.jit\ndef k(x_ptr, {parameters}):\n{body}\n    tl.store(x_ptr, 1.0)\n")
    assert set(form.launch.constexprs.values()) == {32}
