"""Tensors of more than 2**31 elements: offsets are 64-bit, or the guard refuses. Seen in the text, so no memory is needed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.core.run import Candidate
from tests.micro.checker import Checker, start, with_kernel
from tests.micro.families import source

HUGE = 100_000
LOOPED: dict[str, object] = {"rows": 8, "block": 4, "loop": True}


def kernel_of(checker: Checker, text: str, size: int, config: dict[str, object] | None = None) -> Candidate:
    """The target as one kernel, written for a workload in which every named size is ``size``."""
    capture = checker.capture(text)
    huge = replace(capture, graph=replace(capture.graph, sizes=dict.fromkeys(capture.graph.sizes, size)))
    return with_kernel(huge, start(huge), [node.name for node in huge.graph.nodes], config)


def directive(words: str, expression: str) -> str:
    """A user's file."""
    names = ", ".join(word.split("=")[0] for word in words.split() if "[" in word)
    return (
        f"import torch\nimport torch.nn.functional as F\n\n# mtmc: {words}\ndef f({names}):\n    return {expression}\n"
    )


@pytest.mark.parametrize(
    ("words", "expression"),
    [
        ("x=f32[N,M] N=20 M=30", "x * 2 + 1"),
        ("x=f32[N,M] w=f32[M] N=20 M=30", "x * w"),
        ("x=f32[N,M] N=20 M=30", "torch.softmax(x, -1)"),
    ],
)
def test_rows_are_numbered_in_64_bits(checker: Checker, words: str, expression: str) -> None:
    text = kernel_of(checker, directive(words, expression), HUGE).source
    assert re.search(r"(row|rows|cols) = tl.program_id\(0\).to\(tl.int64\)", text)


def test_one_long_dimension_is_counted_in_64_bits(checker: Checker) -> None:
    candidate = kernel_of(checker, directive("x=f32[N] N=20", "x * 2"), 3_000_000_000)
    assert "cols = tl.program_id(0).to(tl.int64) * BLOCK" in candidate.source
    assert candidate.launches[0].signature["n_cols"] == "i64"


def test_a_dimension_of_columns_beyond_32_bits_is_refused_or_widened(checker: Checker) -> None:
    text = directive("x=f32[N,M] w=f32[M] N=20 M=30", "x * w")
    assert "x.shape[1] < 2147483648" in kernel_of(checker, text, 30).source
    long = kernel_of(checker, text, 3_000_000_000).source
    assert "tl.program_id(1).to(tl.int64) * BLOCK" in long
    assert "2147483648" not in long


def test_strided_columns_are_64_bits(checker: Checker) -> None:
    text = directive("x=f32[N,M]{1,N} y=f32[N,M] N=20 M=30", "torch.tanh(x) + y")
    assert re.search(r"cols = \(.*\)\.to\(tl\.int64\)", kernel_of(checker, text, HUGE).source)
    text = directive("x=f32[B,C,S] B=4 C=12 S=10", "x.sum(1)")
    assert re.search(r"cols = \(start .*\)\.to\(tl\.int64\)", kernel_of(checker, text, HUGE, LOOPED).source)


def test_products_of_sizes_are_made_from_the_64_bit_side(checker: Checker) -> None:
    text = kernel_of(checker, directive("x=f32[B,C,S] B=4 C=12 S=10", "x.sum(1)"), HUGE, LOOPED).source
    assert "outer = piece // " in text
    assert "outer * n_rows * n_cols" in text
    # What is divided by may be a product, too: the launcher works it out.
    four = directive("x=f32[A,B,C,D] y=f32[A,C] A=3 B=4 C=5 D=6", "(x * y[:, None, :, None]).sum(3)")
    kernel = kernel_of(checker, four, HUGE, LOOPED).source.split("def f_fits")[0]
    assert not re.search(r"// \([A-Z] \* [A-Z]\)", kernel)
    assert re.search(r"// [A-Z]_[A-Z]\b", kernel)


def test_indices_are_widened_before_they_become_offsets(checker: Checker) -> None:
    text = directive("i=i32[B]@0..10 w=f32[V,D] B=5 V=11 D=12", "F.embedding(i, w) * 2")
    assert ".to(tl.int64)\n" in kernel_of(checker, text, HUGE).source.split("w = tl.load")[0].split("i = tl.load")[1]


def test_a_product_refuses_matrices_beyond_32_bits(checker: Checker) -> None:
    text = source("a=F[B,9], b=F[9,8]: a @ b", "f16")
    assert re.search(r"9 \* a\.shape\[0\] < 2147483648", kernel_of(checker, text, 64).source)


@pytest.mark.parametrize("layout", ["x=f32[N,M]{1,N}", "x=f32[N,M]{2*M,1}", "x=f32[N,M]{2*M,2}"])
@pytest.mark.parametrize("expression", ["torch.tanh(x) * 2", "torch.softmax(x, -1)", "x.sum(0)"])
def test_strided_inputs_are_read_where_they_lie(checker: Checker, layout: str, expression: str) -> None:
    capture = checker.capture(directive(f"{layout} N=20 M=30", expression))
    candidate = with_kernel(capture, start(capture), [node.name for node in capture.graph.nodes])
    assert "contiguous()" not in candidate.source.split("def f_triton")[1].split("# mtmc: end")[0]
    assert "clone" not in candidate.source
