"""Literal tensors in the target's body are graph constants, which the launcher creates once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

HEAD = """import torch
TABLE = torch.tensor([1.0, 2.0])
# mtmc: codes=i64[M,N]@0..3 scale=f32[M,1] M=6 N=20
def f(codes, scale):
"""
WRITTEN = {
    "a code book": (
        "table = torch.tensor([-1.0, -0.1, 0.1, 1.0], device=scale.device)\n    return table[codes] * scale",
        "table = _constant((-1.0, -0.1, 0.1, 1.0), torch.float32, codes.device)",
    ),
    "weights of another dtype": (
        "w = torch.as_tensor([[0.3], [2.0]], dtype=torch.float16)\n    return codes[:, :1] * scale + w.sum(0)",
        "w = _constant(((0.3,), (2.0,)), torch.float16, codes.device)",
    ),
    "the largest there is": (
        "top = torch.tensor([float('inf'), 3.0, 1.0, 2.0])\n    return torch.minimum(top[codes], scale)",
        '_constant((float("inf"), 3.0, 1.0, 2.0), torch.float32, codes.device)',
    ),
    "numbers that do not equal themselves": (
        "t = torch.tensor([float('nan'), -0.0, 1.0, 2.0])\n    return t[codes] * scale",
        't = torch.tensor([float("nan"), -0.0, 1.0, 2.0], dtype=torch.float32, device=codes.device)',
    ),
    "given back": ("return codes * scale, torch.tensor([1, 2])", "_constant((1, 2), torch.int64, codes.device)"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_literal_tensors_are_constants(name: str, captured) -> None:
    body, expected = WRITTEN[name]
    text = f"{HEAD}    {body}\n"
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert expected in candidate.source.replace("\n        ", "").replace("\n    ", " ")
    assert verified(capture, candidate).reason == ""


def test_a_returned_literal_is_a_copy_that_the_caller_may_change(captured) -> None:
    text = f"{HEAD}    return codes * scale, torch.tensor([1, 2])\n"
    graph = captured(text, "f").graph
    assert graph.node(graph.outputs[1].name).op == "aten.clone.default"


def test_other_numbers_are_incorrect(captured) -> None:
    text = f"{HEAD}    {WRITTEN['a code book'][0]}\n"
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    wrong = candidate.source.replace("-0.1, 0.1, 1.0), torch", "-0.1, 0.2, 1.0), torch")
    assert wrong != candidate.source
    assert "values" in verified(capture, replace(candidate, source=wrong)).reason


def test_a_tensor_of_the_module_is_not_a_constant(captured) -> None:
    with pytest.raises(TargetUnsupported, match="neither an argument nor a parameter"):
        captured(f"{HEAD}    return codes[:, :2] * TABLE + scale\n", "f")
