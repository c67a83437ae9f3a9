"""Recurrent layers in the planner: which actions are proposed, and in which precision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.regions import CannotFuse, RegionKind, analyse
from mtmc_lsp.planners.roofline import RooflinePlanner
from tests.planning.situations import H200, act, schedule_of, situation, start

TEXT = """import torch


# mtmc: x=f32[T,B,128] T=128 B=10 init: hidden=256
class Net(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layer = torch.nn.{layer}
        self.head = torch.nn.Linear(hidden, 3)

    def forward(self, x):
        out, state = self.layer(x)
        return self.head(out[-1])
"""
LSTM, BOTH = "LSTM(128, hidden, 6)", "GRU(128, hidden, 6, bidirectional=True)"


def layers_of(capture: Capture) -> str:
    return next(node.name for node in capture.graph.nodes if len(node.outputs) > 1)


def planned(capture: Capture, text: str, history: tuple[Step, ...] = (), *, strict: bool = False) -> list[MacroAction]:
    """The actions that are proposed for the layers."""
    state = replace(situation(capture, start(capture, text), strict=strict, device=H200), history=history)
    return [action for action in proposals(state) if layers_of(capture) in action.region]


@pytest.mark.parametrize("layer", [LSTM, BOTH])
def test_layers_are_one_step_with_a_rationale(captured, layer: str) -> None:
    text = TEXT.format(layer=layer).replace("Linear(hidden", f"Linear({2 if layer == BOTH else 1} * hidden")
    capture = captured(text, "Net")
    action = planned(capture, text)[0]
    launches = 128 + 5 if layer == LSTM else 128 * 6
    assert action.kind is ActionKind.TENSOR_CORE and action.changes_rounding
    assert action.region == (layers_of(capture),)
    assert f"{launches} in all" in action.rationale
    assert action.expected.saved_us > 3e3, "the library's steps take tens of milliseconds"


def test_strict_runs_use_fp32_units(captured) -> None:
    text = TEXT.format(layer=LSTM)
    capture = captured(text, "Net")
    actions = planned(capture, text, strict=True)
    assert [(action.kind, action.params["config"]["precision"]) for action in actions] == [(ActionKind.FUSE, "ieee")]
    assert not actions[0].changes_rounding


def test_after_an_accuracy_failure_on_tensor_cores_fp32_units_are_tried(captured) -> None:
    text = TEXT.format(layer=LSTM)
    capture = captured(text, "Net")
    first = planned(capture, text)[0]
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", 4e-6, 1e-7, "too inexact")
    failed = Step(1, first, StepStatus.FAILED, "too inexact", verdict=verdict)
    second = planned(capture, text, (failed,))[0]
    assert (second.kind, second.params["config"]["precision"]) == (ActionKind.FUSE, "ieee")
    assert not planned(capture, text, (failed, replace(failed, action=second)))


def test_the_launches_can_be_a_cuda_graph(captured) -> None:
    text = TEXT.format(layer=LSTM)
    capture = captured(text, "Net")
    candidate = act(capture, start(capture, text), ActionKind.FUSE, layers_of(capture))
    replayed = act(capture, candidate, ActionKind.CUDA_GRAPH)
    # The input alone is copied; weights are read where they lie.
    assert "_run_cuda_graph(net_launch,(x,),(layer_weight_ih_l0," in "".join(replayed.source.split())
    with pytest.raises(CannotCode, match="a recurrent kernel has no persist"):
        act(capture, candidate, ActionKind.AUTOTUNE, layers_of(capture), config={"persist": 132})


def test_layers_do_not_fuse_with_other_operations(captured) -> None:
    capture = captured(TEXT.format(layer=LSTM), "Net")
    ir, layers = lower(capture.graph), layers_of(capture)
    assert analyse(ir, (layers,)).kind is RegionKind.RECURRENT
    with pytest.raises(CannotFuse, match="need a separate kernel"):
        analyse(ir, (layers, capture.graph.readers(layers)[0].name))


def test_layers_with_projected_states_stay_torch_calls(captured) -> None:
    """Projected states are a different recurrence, which has no kernel."""
    text = (
        TEXT.format(layer="LSTM(128, hidden, proj_size=32)")
        .replace("Linear(hidden", "Linear(32")
        .replace("128 B", "3 B")
    )
    ir = lower(captured(text, "Net").graph)
    assert not any(prim.op is PrimOp.RECURRENT for prim in ir.prims.values())


@pytest.mark.parametrize(("layer", "launches"), [(LSTM, 133), ("GRU(128, hidden)", 128)])
def test_the_first_step_on_a_gpu_replays_the_launches_as_a_cuda_graph(layer: str, launches: int, captured) -> None:
    """The host takes longer for a launch than the GPU for a step. Few steps, and a machine without a GPU, begin without the graph."""
    text = TEXT.format(layer=layer)
    capture = captured(text, "Net")
    first = start(capture, text)
    action = RooflinePlanner().propose(State(capture, first, (), H200, True))
    assert isinstance(action, MacroAction) and action.kind is ActionKind.CUDA_GRAPH
    assert (
        action.text == "Run each step of the recurrent layer as one launch, and replay all launches as one CUDA graph"
    )
    assert action.params["launches"] == launches
    candidate = BuiltinCoder().write(capture, first, action)
    assert "_run_cuda_graph(" in candidate.code.block
    assert schedule_of(candidate).cuda_graph
    short = replace(capture, graph=replace(capture.graph, sizes={**capture.graph.sizes, "T": 4}))
    for known, has_gpu in ((short, True), (capture, False)):
        other = RooflinePlanner().propose(State(known, first, (), H200, has_gpu))
        assert isinstance(other, MacroAction) and other.kind is not ActionKind.CUDA_GRAPH
