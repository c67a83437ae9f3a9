"""Targets that return views of an input that they change, such as a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

VIEWS = {
    "a slice": ("x[:, 1:-1] += 1; return x[:, 1:-1]", "x=f32[B,N] B=5 N=40"),
    "a smaller slice, and a number": ("x.mul_(2); return x[1:, ::2], x.shape[1] - 3", "x=f32[B,N] B=5 N=40"),
    "a transposed part, and a tensor": (
        "x[:, :2] = y; return x.transpose(0, 1)[1:], y.sum()",
        "x=f32[B,N] y=f32[B,2] B=5 N=40",
    ),
    "in a dictionary": ("x[:, 0] *= y; return {'row': x[0], 'all': x, 'y': y + 1}", "x=f32[B,N] y=f32[B] B=5 N=40"),
    "fixed sizes": ("x[:, 1:-1] += 1; return x[:, 1:-1]", "x=f32[2,40]"),
}


def text_of(name: str) -> str:
    body, workload = VIEWS[name]
    return (
        f"import torch\n# mtmc: {workload}\ndef f({', '.join(p[0] for p in workload.split() if '[' in p)}):\n"
        + "".join(f"    {line.strip()}\n" for line in body.split("; "))
    )


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_changed_input_is_returned_as_a_view(name: str, captured) -> None:
    text = text_of(name)
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert ".as_strided(" in candidate.source
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize(
    ("right", "wrong", "reason"),
    [
        ("storage_offset() + 1)", "storage_offset() + 2)", "values"),
        (".storage_offset() + 1)", ".storage_offset() + 1).clone()", "shares memory with: no input"),
    ],
)
def test_another_view_or_a_copy_is_incorrect(right: str, wrong: str, reason: str, captured) -> None:
    text = text_of("fixed sizes")
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert right in candidate.source
    changed = replace(candidate, source=candidate.source.replace(right, wrong))
    assert reason in verified(capture, changed).reason
