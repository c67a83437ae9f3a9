"""Reductions and results of equal row and column sizes share one pass; no reduction is repeated per element."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import CannotFuse, analyse
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

HEAD = "import torch\n\n\n# mtmc: x=f32[N,D] y=f32[N,D] z=f32[N,M] N=37 D=24 M=30\ndef f(x, y, z):\n    return "
TOGETHER = {
    "a row scaled by another's norm": "y * x.norm(dim=-1, keepdim=True)",
    "two rows' deviations": "x * (x.std(-1, keepdim=True) / y.std(-1, keepdim=True))",
    "sums of two tensors": "x.sum(-1) - y.exp().sum(-1)",
    "two results": "y * x.sum(-1, keepdim=True), x - x.amax(-1, keepdim=True)",
    "all of one by all of another": "y / x.square().sum()",
}


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_of_equal_length_share_a_pass(checker: Checker, name: str) -> None:
    text = f"{HEAD}{TOGETHER[name]}\n"
    capture = checker.capture(text)
    candidate = fused(capture, text)
    assert len(candidate.launches) == 1
    for sizes in (dict(capture.graph.sizes), {**capture.graph.sizes, "N": 1}, {**capture.graph.sizes, "D": 1}):
        assert checker.failures(capture, [candidate], Case(sizes, "normal", 5)) == [""]


@pytest.mark.parametrize("body", ["z * x.sum(-1, keepdim=True)", "z[:, :1] * x.sum()"])
def test_no_reduction_is_repeated_for_each_element(checker: Checker, body: str) -> None:
    capture = checker.capture(f"{HEAD}{body}\n")
    with pytest.raises(CannotFuse, match="recomputed for each element"):
        analyse(lower(capture.graph), [node.name for node in capture.graph.nodes])


def test_the_rows_of_a_square_matrix_are_not_its_columns(checker: Checker) -> None:
    # Equal sizes must not unify reduced and remaining axes: the kernel would read the diagonal.
    text = (
        "import torch\n\n\n# mtmc: x=f32[N,D] w=f32[D,D] N=37 D=24\ndef f(x, w):\n"
        "    return (x * w.mean(0)).sum(1, keepdim=True) + x\n"
    )
    capture = checker.capture(text)
    with pytest.raises(CannotFuse, match="another axis"):
        analyse(lower(capture.graph), [node.name for node in capture.graph.nodes])


@pytest.mark.parametrize("body", ["(x - y).square().mean()", "x.std()", "x.flatten().var()"])
def test_an_element_count_is_computed_by_the_launcher(checker: Checker, body: str) -> None:
    # Kernel sizes below 2^31 are int32, and so is their product in the kernel.
    text = f"{HEAD}{body}\n"
    candidate = fused(checker.capture(text), text)
    kernels = candidate.source.split("_can_launch_on")[0]
    assert not re.findall(r"/ \(.*\* ", kernels), kernels
    assert re.search(r"(\bN \* D\b|\bD \* N\b|numel\(\))", candidate.source.split("_launch(")[1])
