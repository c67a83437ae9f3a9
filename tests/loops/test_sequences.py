"""Values that depend on no state are computed before the loop; the number of the iteration is a number like others."""

from __future__ import annotations

import pytest

from tests.codegen.harness import verified
from tests.loops.sequence_examples import NAMES, SEQUENCES
from tests.planning.situations import fully_fused, start

READ_AT_INDICES = ("index", "embedding")


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_is_one_node_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(SEQUENCES, name)
    (loop,) = [node for node in capture.graph.nodes if node.loop is not None]
    assert "unrolled" not in " ".join(capture.workload.assumed)
    assert not {node.word for node in loop.loop.nodes} & {*READ_AT_INDICES, "bmm"}
    assert verified(capture, fully_fused(capture, start(capture, SEQUENCES))).reason == ""


def test_a_table_is_read_once_for_all_steps(captured) -> None:
    graph = captured(SEQUENCES, "table_reads").graph
    (read,) = [node for node in graph.nodes if node.word in READ_AT_INDICES]
    assert [str(size) for size in read.type.shape] == ["S", "T", "B"]


def test_a_container_that_the_loop_changes_stays_the_same_object(captured) -> None:
    text = """
import torch


# mtmc: x=f32[B,T] B=3 T=20
def other_name(x):
    states = [torch.zeros_like(x[:, 0]), x[:, 0]]
    same = states
    for t in range(x.shape[1]):
        states[0] = states[0] * 0.5 + x[:, t]
        states[1] = torch.maximum(states[1], states[0])
    return same[0], same[1]
"""
    capture = captured(text, "other_name")
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


def test_a_choice_by_the_number_of_the_iteration_is_still_refused(captured) -> None:
    text = """
import torch


# mtmc: x=f32[B,T] B=2 T=17
def alternating(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = h + x[:, t] if float(t) % 2 else h - x[:, t]
    return h
"""
    capture = captured(text, "alternating")
    assert "looks at the number of the iteration in a way that differs" in " ".join(capture.workload.assumed)
