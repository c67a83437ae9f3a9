"""The order in which edits are tried, with scripted observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.results import BaselineTime, CompileReport, Ratio, Speed, Timing, Verdict
from mtmc_lsp.core.run import KernelLaunch, Step, StepStatus
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.kernels.actions.catalogue import WHEN_IT_PAYS
from mtmc_lsp.kernels.limits import WITHIN_KERNELS, limit_of, start_of
from mtmc_lsp.kernels.messages import NOT_RUN, CaseTrace, Fault, FaultKind, LaunchWork, TraceCase
from mtmc_lsp.kernels.optimizer import SourceOptimizer
from mtmc_lsp.kernels.refusals import Stage, refusal_of, takes_the_launch
from mtmc_lsp.source.syntax import first_error, parse
from tests.kernels.test_free_blocks import ROWS

CASE = TraceCase({})
LAUNCH = KernelLaunch("rows_kernel", {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"BLOCK_M": 64, "BLOCK_N": 64}, 4, 3)
SOUND = CaseTrace(CASE, launches=(LaunchWork(LAUNCH, (8, 1, 1), 8, 8, 1e6, {"M": 512, "N": 512}),))


def timing(median_us: float, ratio: float = 1.0, host_us: float = 5.0, graph_us: float | None = None) -> Timing:
    speed = Speed.FASTER if ratio > 1.0 else Speed.SAME
    baselines = (BaselineTime("eager", ratio * median_us, Ratio(ratio, ratio, ratio), speed),)
    same = Ratio(1.0, 1.0, 1.0)
    return Timing(median_us, baselines, "eager", same, 25, "", 0.5, host_us=host_us, graph_us=graph_us)


class Silent:
    def on_action(self, index: int, action: MacroAction) -> None: ...

    def on_step(self, step: Step) -> None: ...

    def on_stage(self, stage: str) -> None: ...


class Scripted:
    """Observes nothing: texts that contain a word do not end."""

    has_gpu = False
    compile_seconds = 0.0
    device: DeviceModel = default_model()
    triton = (3, 6)

    def __init__(self, endless: str) -> None:
        self.endless = endless
        self.original: Timing | None = None
        self.others, self.ratio = SOUND, 0.0
        self.settled: list[bytes] = []
        self.timed: list[bytes] = []
        self.observed: list[bytes] = []

    def observe(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        self.observed.append(text)
        return () if self.endless and self.endless.encode() in text else (SOUND,)

    def observe_configurations(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        self.settled.append(text)
        return (self.others,)

    def work(self, text: bytes) -> CaseTrace | None:
        return SOUND

    def compiled(self, text: bytes, trace: CaseTrace) -> CompileReport:
        return CompileReport(())

    def verify(self, text: bytes) -> Verdict | None:
        return None

    def time(self, text: bytes, previous: bytes | None, bound_us: float, least_us: float) -> Timing | None:
        if self.ratio:
            self.timed.append(text)
        return timing(80.0, self.ratio) if self.ratio else None

    def baseline(self, bound_us: float) -> Timing | None:
        return self.original


@pytest.mark.parametrize(
    ("endless", "statuses", "blocks"),
    [
        ("", [StepStatus.ACCEPTED], True),
        ('"BLOCK_M": 128', [StepStatus.FAILED, StepStatus.ACCEPTED], False),
        ("triton.Config", [StepStatus.FAILED, StepStatus.FAILED], False),
    ],
)
def test_block_sizes_that_fail_leave_warps_to_be_tuned(endless: str, statuses: list[StepStatus], blocks: bool) -> None:
    optimizer = SourceOptimizer(
        "model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), Scripted(endless), Silent(), 60.0
    )
    text = optimizer.run().decode()
    tuned = [step for step in optimizer.steps if step.action.params["change"] == "autotune"]
    assert [step.status for step in tuned] == statuses
    assert ('"BLOCK_M"' in text) == blocks
    assert ("triton.autotune" in text) == (StepStatus.ACCEPTED in statuses)


@pytest.mark.parametrize(
    ("seconds_each", "has_gpu", "configurations"), [(0.1, True, 12), (9.0, True, 4), (9.0, False, 12)]
)
def test_kernels_that_compile_slowly_get_fewer_configurations(
    seconds_each: float, has_gpu: bool, configurations: int
) -> None:
    tools = Scripted("")
    tools.has_gpu, tools.compile_seconds = has_gpu, seconds_each
    optimizer = SourceOptimizer("model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), tools, Silent(), 30.0)
    optimizer.run()
    tuned = next(step for step in optimizer.steps if step.action.params["change"] == "autotune")
    assert tuned.candidate is not None
    assert tuned.candidate.source.count("triton.Config(") == configurations


def test_accepted_edits_stay_if_the_processes_end() -> None:
    class Ending(Scripted):
        def work(self, text: bytes) -> CaseTrace | None:
            if text != ROWS.encode():
                raise WorkerFailed("kernels.trace was cancelled", kind=FailureKind.CANCELLED)
            return SOUND

    tools = Ending("")
    tools.has_gpu = True
    optimizer = SourceOptimizer("model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), tools, Silent(), 30.0)
    assert "triton.autotune" in optimizer.run().decode()
    assert optimizer.end_reason == "kernels.trace was cancelled"


def on_gpu(tools: Scripted) -> SourceOptimizer:
    tools.has_gpu = True
    return SourceOptimizer("model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), tools, Silent(), 600.0)


@pytest.mark.parametrize(
    ("original", "reason"),
    [
        (
            timing(20.0, host_us=19.0, graph_us=4.0),
            "the launch takes most of the time: 20.0 us, 4.0 us of them on the GPU",
        ),
        (timing(20.0, host_us=19.0, graph_us=15.0), ""),
        (timing(20.0, host_us=19.0), ""),
        (timing(100.0), ""),
        (None, ""),
    ],
)
def test_edits_of_a_kernel_that_the_launch_hides_are_not_tried(original: Timing | None, reason: str) -> None:
    tools = Scripted("")
    tools.original = original
    optimizer = on_gpu(tools)
    optimizer.run()
    assert optimizer.limit == reason
    assert bool([step for step in optimizer.steps if step.action.params["change"] in WITHIN_KERNELS]) != bool(reason)
    assert reason in optimizer.end_reason


@pytest.mark.parametrize(
    ("memory_us", "is_limit"), [(95.0, True), (104.0, True), (80.0, False), (150.0, False), (0.0, False)]
)
def test_kernels_at_the_bandwidth_of_the_gpu_stay(memory_us: float, is_limit: bool) -> None:
    assert (limit_of(timing(100.0), memory_us) is not None) == is_limit


def test_the_kinds_that_are_left_out_are_edits() -> None:
    assert set(WHEN_IT_PAYS) > WITHIN_KERNELS


@pytest.mark.parametrize(
    ("ratio", "others", "status"),
    [
        (1.5, SOUND, StepStatus.ACCEPTED),
        (1.5, replace(SOUND, faults=(Fault(FaultKind.WRONG_VALUES, 0, "rows_kernel", "wrong"),)), StepStatus.FAILED),
        (1.5, replace(SOUND, refusal=NOT_RUN), StepStatus.ACCEPTED),
        (0.9, SOUND, StepStatus.REJECTED),
    ],
)
def test_other_configurations_are_compared_before_a_faster_version_is_kept(
    ratio: float, others: CaseTrace, status: StepStatus
) -> None:
    tools = Scripted("")
    tools.ratio, tools.others = ratio, others
    optimizer = on_gpu(tools)
    text = optimizer.run()
    first = optimizer.steps[0]
    assert (first.status, len(tools.settled) > 0) == (status, ratio > 1.0)
    assert (text != ROWS.encode()) == (status is StepStatus.ACCEPTED)


@pytest.mark.parametrize(("ratio", "status"), [(0.9, StepStatus.REJECTED), (1.5, StepStatus.ACCEPTED)])
def test_versions_that_are_not_faster_are_not_observed(ratio: float, status: StepStatus) -> None:
    tools = Scripted("")
    tools.ratio = ratio
    optimizer = on_gpu(tools)
    text = optimizer.run()
    assert optimizer.steps[0].status is status
    kept = [
        step.candidate.source.encode()
        for step in optimizer.steps
        if step.status is StepStatus.ACCEPTED and step.candidate
    ]
    assert tools.observed == kept
    assert (text != ROWS.encode()) == (ratio > 1.0)


def test_a_faster_version_with_other_results_is_not_kept() -> None:
    class Wrong(Scripted):
        def observe(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
            return (replace(SOUND, faults=(Fault(FaultKind.WRONG_VALUES, 0, "rows_kernel", "it is wrong"),)),)

    tools = Wrong("")
    tools.ratio = 1.5
    optimizer = on_gpu(tools)
    assert optimizer.run() == ROWS.encode()
    refused = [refusal_of(step) for step in optimizer.steps]
    assert refused and all(item is not None and item.stage is Stage.WRONG for item in refused)
    assert all("it is wrong" in step.reason and step.timing is None for step in optimizer.steps)


@pytest.mark.parametrize(("graph_us", "is_bound"), [(None, True), (4.0, True), (79.0, False)])
def test_the_launch_takes_no_time_that_the_gpu_takes_alone(graph_us: float | None, is_bound: bool) -> None:
    found = timing(80.0, host_us=70.0, graph_us=graph_us)
    assert takes_the_launch(found) == is_bound
    start = start_of(found, memory_us=78.0)
    assert ("direct-launch" in start.excluded) != is_bound
    assert ("bandwidth" in (start.limit.reason if start.limit else "")) != is_bound


def in_rows(ratio: float, speed: Speed, rows: tuple[float, Speed] | None) -> Timing:
    """A timing against the version before, with the ratio in rows of calls."""
    both = [(ratio, speed), *([rows] if rows else [])]
    found = [
        replace(
            timing(80.0, host_us=79.0),
            baselines=tuple(BaselineTime(name, r * 80.0, Ratio(r, r, r), s) for name in ("eager", "previous")),
        )
        for r, s in both
    ]
    return replace(found[0], rows=found[1] if rows else None)


@pytest.mark.parametrize(
    ("ratio", "speed", "rows", "expected"),
    [
        (1.2, Speed.FASTER, None, 1.2),
        (1.2, Speed.FASTER, (1.0, Speed.SAME), 1.2),
        (1.2, Speed.FASTER, (0.5, Speed.SLOWER), None),
        (1.0, Speed.SAME, (1.8, Speed.FASTER), 1.8),
        (1.0, Speed.AMBIGUOUS, (1.8, Speed.FASTER), 1.8),
        (0.9, Speed.SLOWER, (1.8, Speed.FASTER), None),
        (1.0, Speed.SAME, (1.0, Speed.SAME), None),
        (1.0, Speed.SAME, None, None),
    ],
)
def test_a_version_is_faster_by_calls_or_by_rows_and_slower_by_neither(
    ratio: float, speed: Speed, rows: tuple[float, Speed] | None, expected: float | None
) -> None:
    tools = Scripted("")
    found = in_rows(ratio, speed, rows)
    cast(Any, tools).time = lambda *_: found
    optimizer = on_gpu(tools)
    optimizer.run()
    first = optimizer.steps[0]
    assert first.status is (StepStatus.REJECTED if expected is None else StepStatus.ACCEPTED)
    assert first.timing is not None
    if expected is not None:
        against = first.timing.against("eager")
        assert against is not None and against.ratio == expected
        assert first.reason.startswith(f"{expected:.2f}x as fast as before")
    assert ("in rows of calls" in first.reason) == (rows is not None and expected != ratio)


def test_where_the_host_bounds_the_calls_launches_are_made_cheaper_first() -> None:
    tools = Scripted("")
    tools.original = replace(timing(20.0, host_us=8.0), rows=timing(30.0, host_us=29.0))
    optimizer = on_gpu(tools)
    optimizer.seconds = 30.0
    optimizer.run()
    kinds = [step.action.params["change"] for step in optimizer.steps]
    assert kinds[:2] == ["direct-launch", "autotune"]
    tools.original = timing(20.0)
    optimizer = on_gpu(tools)
    optimizer.seconds = 30.0
    optimizer.run()
    kinds = [step.action.params["change"] for step in optimizer.steps]
    assert kinds[0] == "autotune" and "direct-launch" not in kinds


@pytest.mark.parametrize(("seconds_each", "first"), [(0.5, "autotune"), (9.0, "even-blocks")])
def test_a_kernel_that_compiles_slowly_gets_edits_that_compile_once_first(seconds_each: float, first: str) -> None:
    tools = Scripted("")
    tools.has_gpu, tools.compile_seconds = True, seconds_each
    optimizer = SourceOptimizer("model.py", ROWS.encode(), ("rows_kernel",), (CASE,), (SOUND,), tools, Silent(), 30.0)
    optimizer.run()
    kinds = [step.action.params["change"] for step in optimizer.steps]
    assert kinds[0] == first and "autotune" in kinds


@pytest.mark.parametrize(("graph_us", "is_tuned"), [(12.0, True), (4.0, False)])
def test_kernels_are_tuned_once_cheaper_launches_do_not_hide_them_any_more(graph_us: float, is_tuned: bool) -> None:
    tools = Scripted("")
    tools.original = timing(50.0, host_us=49.0, graph_us=graph_us)
    faster = timing(20.0, 2.5, host_us=19.0, graph_us=graph_us)
    cast(Any, tools).time = lambda *_: replace(
        faster, baselines=(*faster.baselines, replace(faster.baselines[0], name="previous"))
    )
    optimizer = on_gpu(tools)
    optimizer.run()
    kinds = [step.action.params["change"] for step in optimizer.steps]
    assert kinds[0] == "direct-launch"
    assert ("autotune" in kinds) == is_tuned


@pytest.mark.parametrize(
    ("graph_us", "excluded", "is_tried"),
    [(30.0, frozenset[str](), True), (30.0, frozenset({"direct-launch"}), False), (60.0, frozenset[str](), False)],
)
def test_an_autotuner_whose_launch_hides_a_faster_kernel_is_tried_with_direct_launches(
    graph_us: float, excluded: frozenset[str], is_tried: bool
) -> None:
    tools = Scripted("")
    # Before, the GPU takes 60 us of a call, so its launches are not made cheaper first.
    tools.original = timing(62.0, host_us=58.0, graph_us=60.0)

    def time(text: bytes, *_: object) -> Timing:
        is_direct = b"class DirectLaunch" in text
        found = timing(40.0, 1.5) if is_direct else timing(90.0, 0.7, host_us=85.0, graph_us=graph_us)
        return replace(found, baselines=(replace(found.baselines[0], graph_us=60.0),))

    cast(Any, tools).time = time
    optimizer = on_gpu(tools)
    optimizer.excluded, optimizer.seconds = excluded, 30.0
    text = optimizer.run().decode()
    kinds = [str(step.action.params["change"]) for step in optimizer.steps]
    assert kinds.count("autotune") == (2 if is_tried else 1) and "direct-launch" not in kinds
    assert ("@DirectLaunch\n@triton.autotune(" in text) == is_tried
    assert first_error(parse(text.encode())) is None


@pytest.mark.parametrize(("seconds", "count"), [(30.0, 1), (600.0, 2)])
def test_in_a_short_run_an_autotuner_that_was_kept_gets_no_further_configurations(seconds: float, count: int) -> None:
    tools = Scripted("")
    faster = timing(80.0, 1.5)
    both = (*faster.baselines, replace(faster.baselines[0], name="previous"))
    cast(Any, tools).time = lambda *_: replace(faster, baselines=both)
    optimizer = on_gpu(tools)
    optimizer.seconds = seconds
    optimizer.run()
    kinds = [step.action.params["change"] for step in optimizer.steps]
    assert kinds.count("autotune") == count


BEGUN = ROWS.replace("import torch\n", "import torch  # launched directly\n", 1)


@pytest.mark.parametrize(("speed", "is_kept"), [(Speed.SAME, True), (Speed.AMBIGUOUS, True), (Speed.SLOWER, False)])
def test_a_version_that_other_inputs_showed_to_be_faster_is_kept_unless_it_is_slower(
    speed: Speed, is_kept: bool
) -> None:
    tools, rivals = Scripted(""), list[bytes | None]()

    def time(text: bytes, previous: bytes | None, *_: object) -> Timing:
        rivals.append(previous)
        found = timing(80.0, 1.0)
        return replace(
            found, baselines=(replace(found.baselines[0], speed=speed if text == BEGUN.encode() else Speed.SAME),)
        )

    cast(Any, tools).time = time
    optimizer = on_gpu(tools)
    optimizer.begun = BEGUN.encode()
    launched = Step(
        1, MacroAction(ActionKind.EDIT, (), (1, 1), {}), StepStatus.ACCEPTED, "", "", timing=timing(9.0, 2.0)
    )
    optimizer.steps.append(launched)
    assert optimizer.run().decode() == (BEGUN if is_kept else ROWS)
    assert (optimizer.steps[0].status is StepStatus.ACCEPTED) == is_kept
    assert ("with the largest inputs: it is not faster" in optimizer.steps[0].reason) != is_kept
    assert rivals[0] is None and len(rivals) > 1
    assert set(rivals[1:]) == {BEGUN.encode() if is_kept else None}


def test_a_version_that_was_begun_with_stays_if_the_time_ends() -> None:
    tools = Scripted("")

    def time(*_: object) -> Timing:
        raise WorkerFailed("kernels.time was cancelled", kind=FailureKind.CANCELLED)

    cast(Any, tools).time = time
    optimizer = on_gpu(tools)
    optimizer.begun = BEGUN.encode()
    optimizer.steps.append(Step(1, MacroAction(ActionKind.EDIT, (), (1, 1), {}), StepStatus.ACCEPTED, "", ""))
    assert optimizer.run().decode() == BEGUN
    assert optimizer.end_reason == "kernels.time was cancelled"


def test_a_version_that_fails_with_the_largest_inputs_is_not_kept() -> None:
    tools = Scripted("")

    def time(text: bytes, *_: object) -> Timing:
        if text == BEGUN.encode():
            raise WorkerFailed("internal error in kernels.time: CUDA error", kind=FailureKind.GPU_CONTEXT_LOST)
        return timing(80.0)

    cast(Any, tools).time = time
    optimizer = on_gpu(tools)
    optimizer.begun = BEGUN.encode()
    optimizer.steps.append(Step(1, MacroAction(ActionKind.EDIT, (), (1, 1), {}), StepStatus.ACCEPTED, "", ""))
    assert optimizer.run() == ROWS.encode()
    assert optimizer.steps[0].status is StepStatus.FAILED and "CUDA error" in optimizer.steps[0].reason
