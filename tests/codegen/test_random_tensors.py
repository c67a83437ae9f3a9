"""Random numbers that the user's code draws from PyTorch's generator: the launcher draws them in the same order."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, planned
from tests.planning.situations import act

HEAD = "import torch\n# mtmc: x=f32[N,M] N=40 M=30\ndef f(x):\n"
TWO = """    scale = torch.rand(x.shape[1], device=x.device)
    noise = torch.randn(x.shape[0], x.shape[1], device=x.device)
    return torch.softmax(x * 2.0 + noise, -1) * scale
"""
UNREAD = """    torch.rand(3, device=x.device)
    return torch.softmax(x + torch.randn(x.shape[0], x.shape[1], device=x.device), -1)
"""


def test_random_numbers_are_drawn_in_the_users_order(checker: Checker) -> None:
    """The first number drawn is read last; results must be within the tolerance of the float64 reference."""
    capture = checker.capture(HEAD + TWO)
    candidate = planned(capture)
    body = candidate.source.partition("def f_launch(")[2]
    assert 0 < body.index("aten.rand.default") < body.index("aten.randn.default")
    for seed in (3, 4):
        assert checker.failures(capture, [candidate], Case(capture.graph.sizes, "normal", seed)) == [""]


def test_different_random_numbers_are_detected(checker: Checker) -> None:
    """Numbers in another order fail the comparison."""
    capture = checker.capture(HEAD + TWO)
    candidate = planned(capture)
    lines = candidate.source.splitlines()
    first = next(i for i, line in enumerate(lines) if "aten.rand.default" in line)
    second = next(i for i, line in enumerate(lines) if "aten.randn.default" in line)
    lines[first], lines[second] = lines[second], lines[first]
    turned = type(candidate)(**{**vars(candidate), "source": "\n".join(lines) + "\n"})
    assert "relative L2 error" in checker.failures(capture, [turned], Case(capture.graph.sizes, "normal", 3))[0]


def test_unused_random_numbers_are_drawn_or_the_difference_is_detected(checker: Checker) -> None:
    capture = checker.capture(HEAD + UNREAD)
    candidate = planned(capture)
    wrong = checker.failures(capture, [candidate], Case(capture.graph.sizes, "normal", 3))[0]
    assert ("aten.rand.default" in candidate.source) is (not wrong)


def test_random_numbers_exclude_cuda_graphs(checker: Checker) -> None:
    capture = checker.capture(HEAD + TWO)
    with pytest.raises(CannotCode, match="draws new random numbers"):
        act(capture, planned(capture), ActionKind.CUDA_GRAPH)


def test_random_tensors_together_with_dropout_are_refused(checker: Checker) -> None:
    """Dropout kernels draw their seeds first, which would shift all later numbers of the generator."""
    text = (
        HEAD + "    return torch.nn.functional.dropout(x, 0.5) + torch.randn(x.shape[0], x.shape[1], device=x.device)\n"
    )
    with pytest.raises(TargetUnsupported, match="randn"):
        checker.capture(text)
