"""``out[1:-1] += y`` is a single write: the assignment after the in-place addition changes nothing."""

from __future__ import annotations

import pytest

from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

TEXT = """
import torch


# mtmc: x=f32[N,M] N=12 M=9
def added(x):
    out = x.clone()
    out[1:-1] += x[2:] * 0.5
    return out


# mtmc: x=f32[N,M] N=12 M=9
def inner(x):
    out = x.clone()
    out[1:-1, 2:] *= x[:-2, 2:]
    return out


# mtmc: x=f32[N,M] N=12 M=9
def twice(x):
    out = x.clone()
    out[0] += 1
    out[0] -= x[1]
    return out, out[0]


# mtmc: x=f32[N,M] N=12 M=9
def in_place(x):
    x[:, 1] += x[:, 2]
    return x


# mtmc: x=f32[N,M] N=12 M=9
def moved(x):
    out = x.clone()
    out[1:] = x[:-1]
    out[:-1] = out[1:].clone()
    return out
"""
WRITES = {"added": 1, "inner": 2, "twice": 2, "in_place": 1, "moved": 2}
"""Expected scatter nodes. A write into a part of a part needs one per level."""


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_change_nothing_are_removed(name: str, captured) -> None:
    capture = captured(TEXT, name)
    assert sum("_scatter" in node.op for node in capture.graph.nodes) == WRITES[name]
    assert verified(capture, fully_fused(capture, start(capture, TEXT))).reason == ""
