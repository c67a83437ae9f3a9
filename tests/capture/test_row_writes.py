"""Loops that write a result row by row become a stack, and each row is computed once."""

from __future__ import annotations

import pytest

from mtmc_lsp.verify.cases import verification_cases
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

TEXT = """
import torch


# mtmc: rewards=f32[B,T] values=f32[B,T] B=6 T=5
def gae(rewards, values):
    adv = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[0], device=rewards.device)
    for t in reversed(range(rewards.shape[1])):
        last = rewards[:, t] - values[:, t] + 0.9 * last
        adv[:, t] = last
    return adv, adv + values


# mtmc: x=f32[T,B] B=6 T=4
def reads_back(x):
    out = torch.empty_like(x)
    out[0] = x[0]
    for t in range(1, x.shape[0]):
        out[t] = out[t - 1] * 0.5 + x[t]
    return out


# mtmc: x=f32[T,B] B=6 T=4
def twice(x):
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        out[t] = x[t] * 2
    out[1] = out[2] + 1
    out[-1] += out[0]
    return out


# mtmc: x=f32[T,B] B=6 T=4
def some_rows(x):
    out = x.clone()
    for t in range(1, x.shape[0]):
        out[t] = out[t - 1] * 0.5 + x[t]
    return out


# mtmc: x=f32[T,B] B=6 T=3
def in_place(x):
    for t in range(x.shape[0]):
        x[t] = x[t] * 2 + x[0]
    return x


# mtmc: x=f32[T,B] B=6 T=2
def both(x):
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        early = out * 1
        out[t] = x[-1 - t] * 2
    return early, out, out[:]


# mtmc: x=f32[B,T] B=5 T=7
def from_the_end(x):
    out = x.clone()
    out[:, 2] = x[:, 0].exp()
    return out[:, -1] * 2, out[:, x.shape[1] - 2] + out[:, 2]


# mtmc: x=f32[B,T] B=5 T=2
def of_two(x):
    out = x.clone()
    out[:, 0] = x[:, 1] * 3
    out[:, -1] = out[:, 0].sin()
    out[:, 1] = out[:, -1] * 2
    return out[:, -1] + out[:, 1], out
"""
WRITES = {"gae": 0, "reads_back": 0, "twice": 0, "some_rows": 3, "in_place": 0, "both": 1}


@pytest.mark.parametrize("name", WRITES)
def test_a_result_whose_rows_are_all_written_becomes_a_stack(name: str, captured) -> None:
    capture = captured(TEXT, name)
    operations = [node.op.split(".")[1] for node in capture.graph.nodes]
    assert operations.count("select_scatter") == WRITES[name], operations
    assert ("stack" in operations) == (name != "some_rows")
    assert verified(capture, fully_fused(capture, start(capture, TEXT))).reason == ""


@pytest.mark.parametrize("name", ["from_the_end", "of_two"])
def test_a_row_counted_from_the_end_can_be_any_row(name: str, captured) -> None:
    """For three rows, the last row is the third. The smallest sizes that the conditions allow test this."""
    capture = captured(TEXT, name)
    assert verified(capture, fully_fused(capture, start(capture, TEXT))).reason == ""
    if name == "from_the_end":
        assert any(case.sizes["T"] == 3 for case in verification_cases(capture, interpreted=True, seed=0))
