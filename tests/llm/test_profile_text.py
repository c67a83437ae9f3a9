"""The profile in the planning prompt: measured on a GPU, otherwise marked as estimated."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace

import pytest
from searching import H200, AgreeingMeasurer, quick_settings
from test_model_targets import STAGED

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.chat import Reply
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.profile_text import profile_text
from mtmc_lsp.measure.local_measurer import LocalMeasurer
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch
from mtmc_lsp.timing.messages import ProfileRequest

PRODUCT = """\
import torch


# mtmc: x=f32[256,512] w=f32[512,128]
def product(x, w):
    return torch.relu(x @ w)
"""


def first_version(capture: Capture, source: str) -> Candidate:
    """The user's file after the action that the built-in planner ranks first."""
    root = BuiltinCoder().start(capture, source)
    action = RooflinePlanner().ranked(State(capture, root, (), H200, False))[0]
    return BuiltinCoder().write(capture, root, action)


def test_profiled_kernels_are_listed_with_time_share_and_roofline_fraction(captured) -> None:
    capture = captured(STAGED, "sharp")
    version = first_version(capture, STAGED)
    kernel_times = (
        KernelTime("at::native::bitonicSortKVInPlace<long template>", 2.0, 9.0),
        KernelTime("sharp_y_kernel", 1.0, 3.0),
    )
    text = profile_text(State(capture, version, (), replace(H200, bandwidth=2560e6), True, lambda: kernel_times))
    assert "Kernels of a call, measured on the GPU:" in text
    assert "- at::native::bitonicSortKVInPlace<long template>: 9.0 us in 2 launches, 75% of the time\n" in text
    # 8 x 40 floats are read and written: 2560 bytes, 1 us at that bandwidth.
    assert "- sharp_y_kernel: 3.0 us, 25% of the time, 33% of the roofline\n" in text
    assert "Kernels and torch calls of a call, estimated:" in text


def test_without_a_gpu_every_time_is_called_estimated(captured) -> None:
    capture = captured(STAGED, "sharp")
    text = profile_text(State(capture, BuiltinCoder().start(capture, STAGED), (), H200, False))
    assert "measured" not in text
    calls = [line for line in text.splitlines() if line.startswith("- torch call")]
    assert len(calls) == 4
    assert all("estimated" in line for line in calls)


def test_a_step_that_showed_full_float32_counts_for_the_estimates_too(captured) -> None:
    capture = captured(PRODUCT, "product")
    graph = replace(capture.graph, fp32_matmul="tf32")
    capture = replace(capture, graph=graph)
    root = BuiltinCoder().start(capture, PRODUCT)
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", 3e-4, 1e-6, "values: relative error 0.0003")
    action = MacroAction(ActionKind.FUSE, ("mm",), (6, 6))
    history = (Step(1, action, StepStatus.FAILED, verdict.reason, verdict=verdict),)
    before, after = (profile_text(State(capture, root, steps, H200, True)) for steps in ((), history))
    assert "runs float32 matmuls in tf32" in before
    assert "runs float32 matmuls in ieee" in after


class Watching(AgreeingMeasurer):
    """Measurer that profiles but does not time."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.watched: list[str] = []
        self.fails = fails

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        self.watched.append(candidate.id)
        if self.fails:
            raise WorkerFailed("the process ended with signal SIGSEGV", kind=FailureKind.CRASHED)
        return (KernelTime("sort", 1.0, 5.0),)


class Model:
    """Model that chooses the first action and stores its prompts."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, purpose, messages, *, schema=None, samples=1):
        self.asked.append(messages[1].content)
        return [Reply('{"action": 1, "reason": "r"}')]


@pytest.mark.parametrize("fails", [False, True])
def test_a_version_is_profiled_once_and_only_for_a_planner_that_reads_the_profile(captured, fails: bool) -> None:
    capture = captured(STAGED, "sharp")

    def run(backends: Backends, model: Model | None) -> Watching:
        measurer = Watching(fails=fails)
        planner, coder = backends.open(quick_settings(), model)
        components = SearchComponents(planner, coder, measurer, True, Limits(60.0, 3))
        search = GreedySearch(capture, STAGED, components, Events())
        search.run("run", "hash")
        return measurer

    assert not run(Backends(), None).watched
    model = Model()
    watched = run(Backends(planner="llm"), model).watched
    assert len(watched) == len(set(watched)) == 1, "no step is kept, so there is one version"
    assert len(model.asked) > 1
    assert all(("- sort: 5.0 us, 100% of the time" in text) != fails for text in model.asked)


def test_a_version_is_profiled_as_it_is_and_not_as_the_file_has_it(captured, interpreter_worker) -> None:
    capture = captured(STAGED, "sharp")
    made = first_version(capture, STAGED)
    request = ProfileRequest(capture, STAGED, capture.graph.sizes, 0.03)
    names = [
        {row.name for row in interpreter_worker.call(replace(request, source=source), 120).operators}
        for source in (None, made.source)
    ]
    assert {"aten::relu", "aten::sort"} <= names[0]
    assert "aten::relu" not in names[1], "a kernel does that"


def test_a_profile_loads_and_warms_up_while_others_use_the_gpu(captured, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtmc_lsp.timing.worker import profile_command

    calls: list[str] = []
    state = ["shared"]

    @contextlib.contextmanager
    def exclusively():
        state[0] = "alone"
        yield
        state[0] = "shared"

    monkeypatch.setattr(profile_command, "exclusively", exclusively)
    monkeypatch.setattr(profile_command, "_run_of", lambda request: (lambda: calls.append(state[0]), "cpu"))
    capture = captured(STAGED, "sharp")
    answer = profile_command.profile(ProfileRequest(capture, STAGED, capture.graph.sizes, 0.001))
    assert calls[: profile_command.WARM_CALLS] == ["shared"] * profile_command.WARM_CALLS
    assert set(calls[profile_command.WARM_CALLS :]) == {"alone"}
    assert answer.calls >= 1


@pytest.mark.gpu
@pytest.mark.skipif(
    not os.environ.get("MTMC_TEST_GPU"), reason="without MTMC_TEST_GPU targets are captured for the CPU"
)
def test_kernels_are_profiled_on_a_gpu(captured) -> None:
    capture = captured(STAGED, "sharp")
    measurer = LocalMeasurer(capture, sys.executable, source=STAGED)
    try:
        own = measurer.kernel_times(BuiltinCoder().start(capture, STAGED))
        ours = measurer.kernel_times(first_version(capture, STAGED))
    finally:
        measurer.close()
    assert len(own) >= 3
    assert "sharp_y_kernel" in [time.name for time in ours]
    assert all(time.us > 0 for time in (*own, *ours))
