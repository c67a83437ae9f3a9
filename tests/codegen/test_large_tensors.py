"""Tensors with more than 2**31 elements: offsets are 64-bit, or the guard rejects the call (checked on source text)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.codegen.kernel.kernel import MAX_GRID_Y
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, start, with_kernel
from tests.codegen.families import source

HUGE = 100_000
LOOPED: dict[str, object] = {"rows": 8, "block": 4, "loop": True}


def kernel_of(checker: Checker, text: str, size: int, config: dict[str, object] | None = None) -> Candidate:
    """The target as one kernel, for a workload in which every named size is ``size``, and a batch B fits a grid."""
    capture = checker.capture(text)
    sizes = {name: min(size, MAX_GRID_Y) if name == "B" else size for name in capture.graph.sizes}
    huge = replace(capture, graph=replace(capture.graph, sizes=sizes))
    return with_kernel(huge, start(huge), [node.name for node in huge.graph.nodes], config)


def directive(inputs: str, expression: str) -> str:
    """Source of the user's file."""
    names = ", ".join(word.split("=")[0] for word in inputs.split() if "[" in word)
    return (
        f"import torch\nimport torch.nn.functional as F\n\n# mtmc: {inputs}\ndef f({names}):\n    return {expression}\n"
    )


@pytest.mark.parametrize(
    ("words", "expression"),
    [
        ("x=f32[N,M] N=20 M=30", "x * 2 + 1"),
        ("x=f32[N,M] w=f32[M] N=20 M=30", "x * w"),
        ("x=f32[N,M] N=20 M=30", "torch.softmax(x, -1)"),
    ],
)
def test_row_indices_are_64_bit(checker: Checker, words: str, expression: str) -> None:
    text = kernel_of(checker, directive(words, expression), HUGE).source
    assert re.search(r"(row|rows|cols) = tl.program_id\(0\).to\(tl.int64\)", text)


def test_one_long_dimension_uses_64_bit_indices(checker: Checker) -> None:
    candidate = kernel_of(checker, directive("x=f32[N] N=20", "x * 2"), 3_000_000_000)
    assert "cols = tl.program_id(0).to(tl.int64) * BLOCK" in candidate.source
    assert candidate.launches[0].signature["n_cols"] == "i64"


def test_columns_beyond_32_bits_are_rejected_or_widened(checker: Checker) -> None:
    text = directive("x=f32[N,M] w=f32[M] N=20 M=30", "x * w")
    # Fewer: the second dimension of a grid has at most 65,535 blocks.
    assert f"x.shape[1] <= {65535 * 32}" in kernel_of(checker, text, 30).source
    capture = checker.capture(text)
    wide = replace(capture, graph=replace(capture.graph, sizes={"N": 30, "M": 3_000_000_000}))
    long = with_kernel(wide, start(wide), [node.name for node in wide.graph.nodes]).source
    assert "tl.program_id(0).to(tl.int64) * BLOCK" in long
    assert "2147483648" not in long


def test_strided_columns_are_64_bits(checker: Checker) -> None:
    text = directive("x=f32[N,M]{1,N} y=f32[N,M] N=20 M=30", "torch.tanh(x) + y")
    assert re.search(r"cols = \(.*\)\.to\(tl\.int64\)", kernel_of(checker, text, HUGE).source)
    text = directive("x=f32[B,C,S] B=4 C=12 S=10", "x.sum(1)")
    assert re.search(r"cols = \(start .*\)\.to\(tl\.int64\)", kernel_of(checker, text, HUGE, LOOPED).source)


def test_products_of_sizes_start_with_a_64_bit_factor(checker: Checker) -> None:
    text = kernel_of(checker, directive("x=f32[B,C,S] B=4 C=12 S=10", "x.sum(1)"), HUGE, LOOPED).source
    assert "outer = piece // " in text
    assert "outer * n_rows * n_cols" in text
    # Divisors may be products too; the launcher computes them.
    four = directive("x=f32[A,B,C,D] y=f32[A,C] A=3 B=4 C=5 D=6", "(x * y[:, None, :, None]).sum(3)")
    kernel = kernel_of(checker, four, HUGE, LOOPED).source.split("def f_fits")[0]
    assert not re.search(r"// \([A-Z] \* [A-Z]\)", kernel)
    assert re.search(r"// [A-Z]_[A-Z]\b", kernel)


def test_indices_are_widened_before_they_become_offsets(checker: Checker) -> None:
    text = directive("i=i32[B]@0..10 w=f32[V,D] B=5 V=11 D=12", "F.embedding(i, w) * 2")
    assert ".to(tl.int64)\n" in kernel_of(checker, text, HUGE).source.split("w = tl.load")[0].split("i = tl.load")[1]


def test_a_matmul_of_small_matrices_uses_32_bits_and_rejects_larger_ones(checker: Checker) -> None:
    text = kernel_of(checker, source("a=F[B,9], b=F[9,8]: a @ b", "f16"), 64).source
    assert re.search(r"9 \* a\.shape\[0\] < 2147483648", text)
    assert "int64" not in text.split("def f_fits")[0]


TILE: dict[str, object] = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2}
FAR = {
    "matrices": ("a=F[N,M] b=F[M,N] N=20 M=30", "torch.relu(a @ b)", {"precision": "ieee"}),
    "matrices of numbers": ("a=F[N,33] b=F[33,M] N=20 M=30", "a @ b + 1", {"precision": "ieee"}),
    "a batch, a transposed operand": ("a=F[B,M,N] b=F[B,M,N] B=2 N=20 M=30", "a.mT @ b", {"precision": "ieee"}),
    "tile after tile": ("a=F[N,M] b=F[M,N] N=20 M=30", "a @ b", {"precision": "ieee", "persist": 2}),
    "parts along K": ("a=F[N,M] b=F[M,N] N=20 M=300", "a @ b", {"precision": "ieee", "split_k": 2}),
    "last tiles shared": ("a=F[N,M] b=F[M,N] N=20 M=30", "torch.relu(a @ b)", {"precision": "ieee", "stream_k": 3}),
    "halves, last tiles shared": ("a=F[N,M] b=F[M,N] N=40 M=30", "a @ b", {"precision": "fp16x3", "stream_k": 3}),
    "halves": ("a=F[N,M] b=F[M,N] N=40 M=30", "a @ b", {"precision": "fp16x3"}),
    "halves, in short pieces": ("a=F[N,M] b=F[M,40] N=40 M=30", "a @ b", {"precision": "fp16x3-short"}),
    "halves, tiles moved by hardware": ("a=F[N,M] b=F[M,N] N=40 M=30", "a @ b", {"precision": "fp16x3", "tma": True}),
    "halves made as they are read": (
        "a=F[40,M] b=F[N,M] N=90 M=30", "F.linear(a, b)", {"precision": "fp16x3-promoted", "split_on_load": "right", "block_m": 64},
    ),
    "one place": ("x=F[B,8,H,W] w=F[6,8,1,1] B=2 H=5 W=7", "F.conv2d(x, w)", {"precision": "ieee"}),
    "places and channels": ("x=F[B,8,H,W] w=F[6,8,3,3] B=2 H=5 W=7", "F.conv2d(x, w, padding=1)", {"precision": "ieee"}),
    "place after place": (
        "x=F[B,16,H,W] w=F[6,16,3,3] B=2 H=5 W=7", "F.conv2d(x, w, padding=1)", {"precision": "ieee", "kernel_positions": True},
    ),
    "transposed, cut": (
        "x=F[B,8,H,W] w=F[8,3,3,3] B=2 H=5 W=7", "F.conv_transpose2d(x, w, None, 2, 1) * 2", {"precision": "ieee"},
    ),
}  # fmt: skip
"""Matmuls with large matrices: inputs, expression and configuration."""


@pytest.mark.parametrize("name", FAR)
def test_a_matmul_beyond_32_bits_uses_64_bits_and_is_correct_on_small_sizes(checker: Checker, name: str) -> None:
    words, expression, config = FAR[name]
    text = directive(words.replace("=F[", "=f32["), expression)
    candidate = kernel_of(checker, text, HUGE, {**TILE, **config})
    kernels = candidate.source.split("def f_fits")[0]
    assert "tl.int64)" in kernels
    if "promoted" in str(config.get("precision")):
        # The other operand is small; its split uses 32-bit offsets.
        kernels = kernels.split("@triton.jit")[-1]
    assert not re.search(r"(?<![\w.])[mnk](\[[^\]]*\])? \* [A-Z]", kernels), "no 32-bit index is multiplied"
    assert not checker.compile_errors(checker.capture(text), candidate)
    capture = checker.capture(text)
    assert checker.failures(capture, [candidate], Case(dict(capture.graph.sizes), "normal", 3)) == [""]


@pytest.mark.parametrize("layout", ["x=f32[N,M]{1,N}", "x=f32[N,M]{2*M,1}", "x=f32[N,M]{2*M,2}"])
@pytest.mark.parametrize("expression", ["torch.tanh(x) * 2", "torch.softmax(x, -1)", "x.sum(0)"])
def test_strided_inputs_are_read_without_a_copy(checker: Checker, layout: str, expression: str) -> None:
    capture = checker.capture(directive(f"{layout} N=20 M=30", expression))
    candidate = with_kernel(capture, start(capture), [node.name for node in capture.graph.nodes])
    assert "contiguous()" not in candidate.source.split("def f_triton")[1].split("# mtmc: end")[0]
    assert "clone" not in candidate.source


def test_distant_columns_use_64_bit_offsets(checker: Checker) -> None:
    """Regression: on an H200, a channels-last batch norm of 32769 images read out of bounds."""
    text = directive("x=f32[N,128] N=20", "x.sum(0)")
    config: dict[str, object] = {"rows": 64, "block": 32, "loop": True, "split": 16}
    generated = kernel_of(checker, text, HUGE, config).source
    assert "f_kernel_parts" in generated
    assert "cols = (start + tl.arange(0, BLOCK)[None, :]).to(tl.int64)" in generated


@pytest.mark.parametrize(("block", "first"), [(4, "M"), (64, "N")])
def test_the_second_dimension_of_a_grid_has_less_than_2_to_the_16_blocks(
    checker: Checker, block: int, first: str
) -> None:
    """Regression: "Triton Error [CUDA]: invalid argument" for 67,500 blocks of columns."""
    text = directive("x=f32[N,M] w=f32[M] N=20 M=30", "x * w")
    capture = checker.capture(text)
    large = replace(capture, graph=replace(capture.graph, sizes={"N": 4, "M": 300_000}))
    config: dict[str, object] = {"rows": 16, "block": block}
    generated = with_kernel(large, start(large), [node.name for node in large.graph.nodes], config).source
    launch = re.search(r"f_kernel\[\(\((\w+) ", generated)
    assert launch is not None and launch[1] == first
    limits = re.findall(r"x\.shape\[([01])\] <= (\d+)", generated)
    expected = {"M": [("0", str(65535 * 16)), ("1", str(2**31 - 1))], "N": [("1", str(65535 * 64))]}
    assert limits == expected[first]
