"""Unrolled loops over time steps: planning time is linear in their length and limited, and the kernels stay small."""

from __future__ import annotations

import pytest

from mtmc_lsp.actions import base
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind, Node, Ref
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.fusion import search as fusion
from mtmc_lsp.fusion.search import LONGEST, FusionSearch
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.planners.roofline import CUT_SHORT, RooflinePlanner
from mtmc_lsp.rewrites.graph_editing import contiguous_type
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.harness import fused, verified
from tests.planning.situations import H200, act, start

EULER = """import torch
# mtmc: x=f32[N,2] N=70
def f(x, dt: float = 0.1):
    for _ in range({steps}):
        a, b = x[:, 0], x[:, 1]
        x = x + dt * torch.stack([a - a * b, a * b - b], dim=1)
    return x
"""
STATEMENT = "    x = torch.sin(x)\n"
DEEP = f"""import torch
# mtmc: x=f32[N] N=70
def f(x):
{STATEMENT * 400}    return x
"""
CHOSEN = """import torch
# mtmc: x=f32[N] N=70
def f(x):
    return torch.stack([x + 1.0, x * 2.0, x - 3.0], dim=1)[:, 1] * 0.5
"""


def time_steps(count: int) -> Graph:
    """``h = tanh(h * x[:, t])`` and ``y = y + h * h`` for each step; returns the last h and y."""
    row, whole = contiguous_type((Size.of(64),), "float32"), contiguous_type((Size.of(64), Size.of(count)), "float32")
    nodes: list[Node] = []

    def add(op: str, *args: Ref | int) -> Ref:
        nodes.append(Node(f"n{len(nodes)}", f"aten.{op}", args, {}, (row,)))
        return Ref(nodes[-1].name)

    h, y = Ref("h"), Ref("h")
    for step in range(count):
        h = add("tanh.default", add("mul.Tensor", h, add("select.int", Ref("x"), 1, step)))
        y = add("add.Tensor", y, add("mul.Tensor", h, h))
    inputs = (GraphInput("h", "h", InputKind.ARGUMENT, row), GraphInput("x", "x", InputKind.ARGUMENT, whole))
    return Graph(inputs, tuple(nodes), (h, y), "tuple", {})


def searched(count: int, monkeypatch) -> tuple[int, list[fusion.Fusion]]:
    """The total number of nodes that a search analyses, and its fusions."""
    analysed_sizes: list[int] = []
    region_or_none = fusion.region_or_none

    def counted(ir, nodes, recomputed=()):
        analysed_sizes.append(len(nodes))
        return region_or_none(ir, nodes, recomputed)

    with monkeypatch.context() as patch:
        patch.setattr(fusion, "region_or_none", counted)
        fusions = FusionSearch(lower(time_steps(count)), Schedule(), H200).best()
    return sum(analysed_sizes), fusions


def test_a_loop_of_four_times_the_steps_takes_little_more_than_four_times_the_work(monkeypatch) -> None:
    short, _ = searched(60, monkeypatch)
    long, _ = searched(240, monkeypatch)
    assert long < 6 * short


def test_a_long_loop_becomes_few_kernels_that_end_with_a_step(monkeypatch) -> None:
    """Each kernel except the last passes only h and y to the next."""
    _, fusions = searched(240, monkeypatch)
    graph = time_steps(240)
    work = [sum("select" not in graph.named[name].op for name in each.nodes) for each in fusions]
    assert len(fusions) < 12 and max(work) <= LONGEST
    assert sum(work) == 240 * 4
    assert all(len(each.region.outputs) <= 2 for each in fusions)


def test_a_short_loop_is_one_kernel(monkeypatch) -> None:
    _, fusions = searched(30, monkeypatch)
    assert [len(each.nodes) for each in fusions] == [len(time_steps(30).nodes)]


class Clock:
    """A clock that advances by one second per call."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def test_planning_stops_at_its_deadline_and_reports_that(captured, monkeypatch) -> None:
    text = EULER.format(steps=8)
    capture = captured(text, "f")
    clock = Clock()
    for module in (fusion, base):
        monkeypatch.setattr(module, "time", clock)
    state = State(capture, start(capture, text), (), H200, False, deadline=20.0)
    actions = RooflinePlanner().ranked(state)
    assert actions and all(action.rationale.endswith(CUT_SHORT) for action in actions)
    assert max(len(action.region) for action in actions) < len(capture.graph.nodes)
    assert clock.now < 100.0
    unlimited = RooflinePlanner().ranked(State(capture, start(capture, text), (), H200, False))
    assert not any(CUT_SHORT in action.rationale for action in unlimited)


def test_steps_that_stack_and_unstack_their_state_become_kernels_of_bounded_size(captured) -> None:
    """In one kernel each element would need every element of the previous step: the code would double per step."""
    text = EULER.format(steps=24)
    capture = captured(text, "f")
    action = RooflinePlanner().ranked(State(capture, start(capture, text), (), H200, False))[0]
    candidate = act(capture, start(capture, text), action.kind, *action.region, **action.params)
    assert len(candidate.source.splitlines()) < 20_000
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_only_the_selected_part_of_a_stack_is_computed(captured) -> None:
    capture = captured(CHOSEN, "f")
    candidate = fused(capture, CHOSEN)
    assert "tl.where" not in candidate.source and "out_ptr + cols, x * 2.0 * 0.5" in candidate.source
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_a_chain_too_long_for_one_kernel_is_planned_as_several_and_rejected_as_one(captured) -> None:
    capture = captured(DEEP, "f")
    names = [node.name for node in capture.graph.nodes]
    with pytest.raises(CannotCode, match="fuse fewer operations"):
        act(capture, start(capture, DEEP), ActionKind.FUSE, *names)
    action = RooflinePlanner().ranked(State(capture, start(capture, DEEP), (), H200, False))[0]
    candidate = act(capture, start(capture, DEEP), action.kind, *action.region, **action.params)
    assert verified(capture, candidate).is_correct
