"""Launch-bound calls: one CUDA graph for all launches, as the last step."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtmc_lsp.actions.base import Situation
from mtmc_lsp.codegen.module.cuda_graph import GRAPHS, MAX_GRAPHS, RUN_CUDA_GRAPH
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.search.acceptance import BASE_RATIO, Judge
from mtmc_lsp.verify.source_scan import scan
from tests.codegen.harness import fused
from tests.planning.situations import H200, act, fully_fused, schedule_of, start, timing

TEXT = """import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24))
    def forward(self, x):
        return torch.softmax(x * self.weight, -1)
def get_inputs():
    return [torch.randn(6, 24)]
def get_init_inputs():
    return []
"""
REFUSED = {
    "changes its arguments": ("x.add_(1.0)\n    return x * 2.0", "the call changes"),
    "random": ("return torch.nn.functional.dropout(x, 0.5) * 2.0", "draws new random numbers"),
    "a view": ("return (x * 2.0).sum(), x.t()", "view of an argument"),
}


def kernels(capture: Capture, text: str) -> Candidate:
    return fully_fused(capture, start(capture, text))


def test_the_launcher_is_replayed_and_the_compiler_still_traces_it(captured) -> None:
    capture = captured(TEXT, "Model")
    replayed = act(capture, kernels(capture, TEXT), ActionKind.CUDA_GRAPH, launches=1)
    assert schedule_of(replayed).cuda_graph
    text = replayed.source
    assert RUN_CUDA_GRAPH in text and GRAPHS in text
    assert "return _run_cuda_graph(model_launch, (x,), (weight,))" in text
    assert "(model_triton if torch.compiler.is_compiling() else model_cuda_graph)(x, self.weight)" in text
    compile(text, "model.py", "exec")
    with pytest.raises(CannotCode, match="replayed already"):
        act(capture, replayed, ActionKind.CUDA_GRAPH)


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_cannot_be_replayed_are_rejected(name: str, captured) -> None:
    body, reason = REFUSED[name]
    text = f"import torch\n# mtmc: x=f32[N,M] N=6 M=5\ndef f(x):\n    {body}\n"
    capture = captured(text, "f")
    with pytest.raises(CannotCode, match=reason):
        act(capture, kernels(capture, text), ActionKind.CUDA_GRAPH)


@pytest.mark.parametrize(("graph_us", "is_proposed"), [(20.0, True), (95.0, False), (None, False)])
def test_it_is_proposed_if_launch_overhead_dominates(graph_us: float | None, is_proposed: bool, captured) -> None:
    capture = captured(TEXT, "Model")
    candidate = fused(capture, TEXT)
    action = MacroAction(ActionKind.FUSE, ("mul",), (0, 0))
    step = Step(1, action, StepStatus.ACCEPTED, "", candidate=candidate, timing=timing(100.0, 2.0, graph_us))
    ranked = RooflinePlanner().ranked(State(capture, candidate, (step,), H200, True))
    assert (ActionKind.CUDA_GRAPH in {each.kind for each in ranked}) is is_proposed
    if is_proposed:
        assert ranked[0].kind is ActionKind.CUDA_GRAPH, "it saves most"


@pytest.mark.parametrize(("graph_us", "status"), [(30.0, StepStatus.ACCEPTED), (60.0, StepStatus.REJECTED)])
def test_a_launch_bound_first_kernel_is_accepted_as_a_base(graph_us: float, status: StepStatus) -> None:
    step = Step(1, MacroAction(ActionKind.FUSE, ("mul",), (0, 0)), StepStatus.FAILED, "")
    judged = Judge().timed(step, timing(100.0, 0.5, graph_us), base=BASE_RATIO)
    assert judged.status is status
    assert ("base for a CUDA graph" in judged.reason) is (status is StepStatus.ACCEPTED)


def test_only_the_generated_replay_code_passes_the_scan() -> None:
    def refused(text: str) -> list[str]:
        return [check.detail for check in scan(f"import torch\n\n{text}", "c.py") if check.status is CheckStatus.FAILED]

    assert not refused(f"{GRAPHS}\n\n{RUN_CUDA_GRAPH}")
    without_copies = RUN_CUDA_GRAPH.replace("        static.copy_(argument)\n", "        pass\n")
    assert without_copies != RUN_CUDA_GRAPH
    assert refused(f"{GRAPHS}\n\n{without_copies}")


class FakeStream:
    """Hashable, like torch's streams."""

    def wait_stream(self, other: Any) -> None:
        pass


class FakeCuda:
    """Graphs that record the calls during capture and repeat them."""

    def __init__(self) -> None:
        self.capturing: list[Callable[[], None]] | None = None
        self.captures = 0
        self.current = FakeStream()

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_stream(self) -> Any:
        return self.current

    Stream = staticmethod(lambda: types.SimpleNamespace(wait_stream=lambda other: None))
    stream = staticmethod(lambda other: contextlib.nullcontext())
    CUDAGraph = staticmethod(lambda: types.SimpleNamespace(calls=[]))

    @contextlib.contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        self.capturing, self.captures = graph.calls, self.captures + 1
        graph.replay = lambda: [call() for call in graph.calls]
        yield
        self.capturing = None


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("is_current_stream_capturing", "current_stream", "Stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def replayed() -> tuple[Callable[..., Any], dict[Any, Any]]:
    namespace: dict[str, Any] = {"torch": torch}
    exec(GRAPHS + RUN_CUDA_GRAPH, namespace)
    return namespace["_run_cuda_graph"], namespace["_GRAPHS"]


def launcher(cuda: FakeCuda) -> Callable[..., torch.Tensor]:
    """``x * w`` by one launch into newly allocated memory."""

    def launch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.mul(x, w, out=out)
        if cuda.capturing is not None:
            cuda.capturing.append(lambda: torch.mul(x, w, out=out))
        return out

    return launch


def test_each_call_computes_from_its_own_arguments_and_keeps_its_own_results(cuda: FakeCuda) -> None:
    function, _ = replayed()
    launch, w = launcher(cuda), torch.tensor([2.0, 3.0])
    inputs = [torch.randn(4, 2) for _ in range(3)]
    results = [function(launch, (x,), (w,)) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, x * w)
    w.mul_(5.0)
    assert torch.equal(function(launch, (inputs[0],), (w,)), inputs[0] * w), "parameters are read where they lie"
    assert cuda.captures == 1


def test_other_shapes_layouts_and_parameters_have_separate_graphs(cuda: FakeCuda) -> None:
    function, graphs = replayed()
    launch, w = launcher(cuda), torch.tensor([2.0, 3.0])
    for x in (torch.randn(4, 2), torch.randn(5, 2), torch.randn(2, 4).t(), torch.randn(4, 2).double()):
        assert torch.equal(function(launch, (x,), (w,)), x * w)
    other = torch.tensor([7.0, 11.0])
    x = torch.randn(4, 2)
    assert torch.equal(function(launch, (x,), (other,)), x * other)
    assert cuda.captures == 5
    assert len(graphs) == MAX_GRAPHS, "the oldest was dropped"


def test_another_stream_or_gpu_has_a_separate_graph(cuda: FakeCuda) -> None:
    function, _ = replayed()
    launch, w, x = launcher(cuda), torch.tensor([2.0, 3.0]), torch.randn(4, 2)
    for _ in range(2):
        assert torch.equal(function(launch, (x,), (w,)), x * w)
        cuda.current = FakeStream()
    assert cuda.captures == 2


def test_one_graph_serves_inside_and_outside_inference_mode(cuda: FakeCuda) -> None:
    function, _ = replayed()
    launch, w, x = launcher(cuda), torch.tensor([2.0, 3.0]), torch.randn(4, 2)
    with torch.inference_mode():
        assert torch.equal(function(launch, (x,), (w,)), x * w)
    assert torch.equal(function(launch, (x,), (w,)), x * w)
    assert cuda.captures == 1


def counting(cuda: FakeCuda) -> Callable[..., torch.Tensor]:
    """``count += 1`` and ``x + count``, one launch each."""

    def launch(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)

        def kernels() -> None:
            count.add_(1)
            torch.add(x, count, out=out)

        if cuda.capturing is not None:
            cuda.capturing.append(kernels)
        else:
            kernels()
        return out

    return launch


def test_every_call_including_the_first_applies_its_changes_once(cuda: FakeCuda) -> None:
    function, _ = replayed()
    launch, count, x = counting(cuda), torch.tensor(0.0), torch.randn(3)
    for calls in (1, 2, 3):
        assert torch.equal(function(launch, (x,), (count,), (0,)), x + calls)
        assert count == calls
    assert cuda.captures == 1


def test_tensors_of_inference_mode_are_changed_by_plain_launches(cuda: FakeCuda) -> None:
    function, graphs = replayed()
    with torch.inference_mode():
        count, x = torch.tensor(0.0), torch.randn(3)
        assert torch.equal(function(counting(cuda), (x,), (count,), (0,)), x + 1)
    assert count == 1 and not graphs and not cuda.captures


def test_during_a_capture_by_the_user_launches_are_not_replayed(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, graphs = replayed()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, w = torch.randn(4, 2), torch.tensor([2.0, 3.0])
    assert torch.equal(function(launcher(cuda), (x,), (w,)), x * w)
    assert not graphs and not cuda.captures


def test_a_schedule_stays_replayed_through_other_steps(captured) -> None:
    capture = captured(TEXT, "Model")
    candidate = act(capture, kernels(capture, TEXT), ActionKind.CUDA_GRAPH)
    plan = schedule_of(candidate).kernels[-1]
    tuned = act(capture, candidate, ActionKind.AUTOTUNE, *plan.nodes, config={"rows": 2})
    assert schedule_of(tuned).cuda_graph
    assert replace(schedule_of(tuned), cuda_graph=False) != schedule_of(candidate)


@pytest.mark.parametrize(("tried", "first"), [(False, ActionKind.FUSE), (True, ActionKind.CUDA_GRAPH)])
def test_fusions_come_before_a_cuda_graph_unless_they_were_rejected(tried: bool, first: ActionKind, captured) -> None:
    capture = captured(TEXT, "Model")
    candidate = kernels(capture, TEXT)
    accepted = MacroAction(ActionKind.FUSE, ("mul",), (0, 0))
    steps = [Step(1, accepted, StepStatus.ACCEPTED, "", candidate=candidate, timing=timing(100.0, 2.0, 20.0))]
    if tried:
        steps.append(Step(2, MacroAction(ActionKind.FUSE, ("softmax",), (0, 0)), StepStatus.REJECTED, ""))
    ranked = RooflinePlanner().ranked(State(capture, candidate, tuple(steps), H200, True))
    assert {ActionKind.FUSE, ActionKind.CUDA_GRAPH} <= {each.kind for each in ranked}
    assert ranked[0].kind is first


def test_a_call_with_other_numbers_than_the_graphs_launches_directly(cuda: FakeCuda) -> None:
    function, graphs = replayed()

    def launch(x: torch.Tensor, scale: float) -> torch.Tensor:
        out = x * scale
        if cuda.capturing is not None:
            cuda.capturing.append(lambda: torch.mul(x, scale, out=out))
        return out

    x = torch.tensor([2.0, -3.0])
    for scale in (0.5, 2.0, 0.0, -0.0, 0.5):
        result = function(launch, (x,), (), numbers=(scale,))
        assert torch.equal(1 / result, 1 / (x * scale)), "zeros keep their sign"
    assert cuda.captures == 1
    assert len(graphs) == 1


NETWORK = """import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range({layers})])
    # mtmc: x=f32[B,32] B={rows}
    def forward(self, x):
        return self.layers(x)
"""


@pytest.mark.parametrize(("layers", "rows", "is_first"), [(16, 8, True), (16, 4_000_000, False), (2, 8, False)])
def test_a_network_of_many_short_operations_begins_with_the_graph(
    layers: int, rows: int, is_first: bool, captured
) -> None:
    text = NETWORK.format(layers=layers, rows=rows)
    capture = captured(text, "Net")
    root = start(capture, text)
    ranked = RooflinePlanner().ranked(State(capture, root, (), H200, True))
    assert (ranked[0].kind is ActionKind.CUDA_GRAPH) is is_first
    if is_first:
        replayed = act(capture, root, ActionKind.CUDA_GRAPH, *ranked[0].region, launches=48)
        assert not schedule_of(replayed).kernels
        assert "torch.nn.functional.gelu(" in replayed.source
        fusions = RooflinePlanner().ranked(State(capture, replayed, (), H200, True))
        assert fusions[0].kind is ActionKind.FUSE
        fused_later = act(capture, replayed, ActionKind.FUSE, *fusions[0].region, **fusions[0].params)
        assert schedule_of(fused_later).cuda_graph and schedule_of(fused_later).kernels


def test_the_step_that_opens_a_run_is_proposed_without_a_search_around_products(
    captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a search takes seconds in a network, and the first step must be verified early. Later steps are searched as always."""
    text = NETWORK.format(layers=16, rows=8)
    capture = captured(text, "Net")
    root = start(capture, text)
    state = State(capture, root, (), H200, True)
    first = RooflinePlanner().ranked(state)[0]
    searches: list[int] = []
    search = Situation.search

    def noting(self: Situation, rank: int = 0) -> FusionSearch:
        searches.append(rank)
        return search(self, rank)

    monkeypatch.setattr(Situation, "search", noting)
    assert RooflinePlanner().propose(state) == first and not searches
    assert RooflinePlanner(exclude=("cuda-graph",)).propose(state).kind is ActionKind.FUSE and searches
    step = Step(1, first, StepStatus.FAILED, "it was not captured", candidate=None)
    second = RooflinePlanner().propose(replace(state, history=(step,)))
    assert second.kind is ActionKind.CUDA_GRAPH and "kernels" not in second.params
