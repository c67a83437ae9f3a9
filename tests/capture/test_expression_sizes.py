"""Sizes that the directive writes as expressions: rows such as ``B*S`` are free, widths such as ``2*D`` stay constant."""

from __future__ import annotations

import pytest

from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
BEAMS = (
    HEAD + "# mtmc: x=f32[B*4,10] scores=f32[B,4] B=8\ndef f(x, scores):\n"
    "    return torch.tanh(x.view(-1, 4, 10)) + scores[..., None]\n"
)
TOKENS = (
    HEAD + "# mtmc: x=f32[B*S,10] mask=f32[B,S]@0..1 B=4 S=16\ndef f(x, mask):\n"
    "    return (x.exp().sum(-1) * mask.reshape(-1)).sum() / mask.sum()\n"
)


def shapes(capture) -> dict[str, list[str]]:
    return {item.name: [str(size) for size in item.type.shape] for item in capture.graph.inputs}


def test_a_multiple_of_the_batch_is_free(captured) -> None:
    capture = captured(BEAMS, "f")
    assert shapes(capture) == {"x": ["4 * B", "10"], "scores": ["B", "4"]}
    assert capture.workload.assumed == ()
    candidate = fully_fused(capture, start(capture, BEAMS))
    guard = candidate.source.split("def f_fits(")[1].split("\n\n\n")[0]
    assert "x.shape[0] == 4 * scores.shape[0]" in guard
    assert verified(capture, candidate).reason == ""


def test_a_product_of_batch_and_length_is_free(captured) -> None:
    capture = captured(TOKENS, "f")
    assert capture.graph.sizes == {"B": 4, "S": 16}
    assert shapes(capture)["mask"] == ["B", "S"]
    candidate = fully_fused(capture, start(capture, TOKENS))
    assert "64" not in candidate.source.split("def f_fits(")[1].split("\n\n\n")[0]
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize(
    ("directive", "name", "expected"),
    [
        ("x=f32[N,2*D] w=f32[N] N=8 D=16", "x", ["N", "32"]),
        ("x=f32[N,D] w=f32[3*D] N=8 D=16", "w", ["48"]),
    ],
)
def test_a_multiple_of_a_width_is_a_constant(captured, directive: str, name: str, expected: list[str]) -> None:
    text = HEAD + f"# mtmc: {directive}\ndef f(x, w):\n    return torch.relu(x).sum(), torch.sigmoid(w) * 2\n"
    assert shapes(captured(text, "f"))[name] == expected
