"""A copy to another memory layout is a separate kernel that reads its input through the preceding views."""

from __future__ import annotations

import pytest

from tests.codegen.families import source
from tests.codegen.harness import fused, verified
from tests.planning.situations import operations, schedule_of

CASES = {
    "space to depth": "x=F[B,3,4,6]: x.view(x.shape[0], 3, 2, 2, 3, 2).permute(0, 3, 5, 1, 2, 4).reshape(x.shape[0], 12, 2, 3)",
    "a transposed tensor": "x: x.transpose(1, 2).contiguous()",
    "repeated": "x: x[:, None].expand(-1, 3, -1, -1).reshape(x.shape[0], 18, 7)",
}


@pytest.mark.parametrize("name", CASES)
def test_a_copy_becomes_a_kernel(name: str, captured) -> None:
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = fused(capture, text)
    copies = [node.name for node in capture.graph.nodes if "clone" in node.op]
    assert copies and "clone" in operations(capture, candidate)
    assert all(schedule_of(candidate).kernel_of(copy) for copy in copies)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
