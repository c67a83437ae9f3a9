"""Updates of masked elements become a select between new and old values inside a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

UPDATES = {
    "a number": "x[mask] = 0.5",
    "a number taken away": "x[mask] -= 1",
    "other elements": "x[mask] = y[mask]",
    "computed of both": "x[y > 0] += y[y > 0].exp() * 2",
    "of whole rows": "x[mask[:, 0]] = y[0]",
    "of whole rows, computed": "x[mask[:, 0]] *= y[mask[:, 0]] + y[0]",
    "of the sign": "x[x < 0] *= 0.1",
    "of one tensor's own": "x[mask] = x[mask].clamp(-1.0, 1.0).to(torch.float16).float()",
}


def text_of(update: str, returned: str = "torch.softmax(x, -1)") -> str:
    return f"""import torch
# mtmc: x=f32[M,N] mask=bool[M,N] y=f32[M,N] M=6 N=20
def f(x, mask, y):
    x = x * 2
    {update}
    return {returned}
"""


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_under_a_mask_is_part_of_a_kernel(name: str, captured) -> None:
    text = text_of(UPDATES[name])
    capture = captured(text, "f")
    assert not any("index" in node.op for node in capture.graph.nodes)
    candidate = fully_fused(capture, start(capture, text))
    assert candidate.source.count("@triton.jit") == 1
    assert "index_put" not in candidate.source
    assert verified(capture, candidate).reason == ""


def test_an_argument_is_updated_in_place(captured) -> None:
    text = text_of("y[mask] += x[mask]", "None")
    capture = captured(text, "f")
    assert [mutation.input for mutation in capture.graph.mutations] == ["y"]
    candidate = fully_fused(capture, start(capture, text))
    assert verified(capture, candidate).reason == ""
    wrong = candidate.source.replace("tl.where(mask, ", "tl.where(mask == 0, ")
    assert wrong != candidate.source
    assert "afterwards" in verified(capture, replace(candidate, source=wrong)).reason


@pytest.mark.parametrize(
    ("update", "returned"),
    [
        ("pass", "x[mask]"),
        ("z = x[mask]", "z.mean() + x"),
        ("x[mask] = y[mask].flip(0)", "x"),
        ("x[mask] = x[mask].sort().values", "x"),
        ("x[mask] = x[mask] - x[mask].mean()", "x"),
        ("x[mask] = x[mask].cumsum(0)", "x"),
    ],
)
def test_updates_that_need_the_selected_elements_compacted_are_refused(update: str, returned: str, captured) -> None:
    text = text_of(update, returned)
    with pytest.raises(TargetUnsupported, match="whose size depends on the values of a tensor") as caught:
        captured(text, "f")
    assert caught.value.where is not None
    assert caught.value.where.line == 6 - (update != "pass")
