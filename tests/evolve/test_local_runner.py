"""Trials on this machine: scores, failures and the verification, with measurers that answer as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from accepting import H200

from mtmc_lsp.capture.recorded_calls import RecordedCall, RecordedTarget
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import CompileReport, KernelReport, Verdict, VerdictStatus
from mtmc_lsp.core.run import Author, Candidate
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Capture, TensorSpec
from mtmc_lsp.evolve.estimates import estimate_us, launches_of, memory_of
from mtmc_lsp.evolve.local_runner import Here, LocalRunner
from mtmc_lsp.evolve.trials import Stage, TrialRequest, TrialResult
from mtmc_lsp.evolve.workloads import Workloads, at_sizes, workloads_of
from mtmc_lsp.explore.judgement import Judgement
from mtmc_lsp.explore.measuring import Place
from mtmc_lsp.planners.roofline import RooflinePlanner

CHAIN = """\
import torch


# mtmc: x=f32[N,256] N=512
def chain(x):
    y = torch.sort(torch.relu(x) + 1).values
    return torch.softmax(y * 2, -1)
"""


@dataclass
class Measurer:
    """Answers with planned judgements."""

    place: Place
    has_gpu: bool
    judgement: Judgement
    report: CompileReport
    judged: list[str] = field(default_factory=list)
    most_at_once = 2

    def device(self) -> DeviceModel:
        return H200

    def compile(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        return [self.report for _ in candidates]

    def judge(self, before: Candidate, groups: Sequence[Sequence[Candidate]]) -> list[list[Judgement]]:
        self.judged += [candidate.id for group in groups for candidate in group]
        return [[self.judgement for _ in group] for group in groups]

    def close(self) -> None:
        """Nothing to end."""


class Verifier:
    """Gives a planned verdict."""

    def __init__(self, verdict: Verdict | WorkerFailed) -> None:
        self.verdict, self.calls = verdict, 0

    def verify(self, candidate: Candidate) -> Verdict:
        self.calls += 1
        if isinstance(self.verdict, WorkerFailed):
            raise self.verdict
        return self.verdict


GOOD = Verdict(VerdictStatus.CORRECT, (), "gpu")
OK = CompileReport((KernelReport("chain_kernel", "sm_90", registers=32),))


@pytest.fixture
def capture(captured) -> Capture:
    value: Capture = captured(CHAIN, "chain")
    return value


@pytest.fixture
def tried(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[TrialResult, list[Measurer], Verifier]]:
    """Tries a first kernel on two workloads."""

    def go(
        judgement: Judgement,
        *,
        has_gpu: bool = True,
        report: CompileReport = OK,
        verdict: Verdict | WorkerFailed = GOOD,
        stage: Stage = Stage.SCORE,
    ) -> tuple[TrialResult, list[Measurer], Verifier]:
        machine = replace(
            capture.environment, gpu="NVIDIA H200" if has_gpu else "", capability="sm_90" if has_gpu else ""
        )
        on_machine = replace(capture, environment=machine)
        measurers: list[Measurer] = []

        def open_measurer(place: Place) -> Measurer:
            measurers.append(Measurer(place, has_gpu, judgement, report))
            return measurers[-1]

        monkeypatch.setattr("mtmc_lsp.evolve.local_runner.open_measurer", open_measurer)
        workloads = Workloads((("N=512", {"N": 512}), ("N=64", {"N": 64})))
        verifier: Any = Verifier(verdict)
        here = Here(on_machine, CHAIN, "python", ("sm_90",), workloads, 1e9, needs_sandbox=True)
        runner = LocalRunner(here, verifier)
        root = BuiltinCoder(H200).start(on_machine, CHAIN)
        action = RooflinePlanner().ranked(State(on_machine, root, (), H200, False))[0]
        version = BuiltinCoder(H200).write(on_machine, root, action)
        (result,) = runner.run([TrialRequest(root, version, stage)])
        runner.close()
        return result, measurers, verifier

    return go


def test_on_a_gpu_a_version_is_timed_on_every_workload_and_verified(tried) -> None:
    timed = Judgement(Outcome.FASTER, before_us=20.0, after_us=10.0, ratio=2.0, ratio_error=0.01)
    result, measurers, verifier = tried(timed)
    assert result.outcome is Outcome.CORRECT
    assert all(measurer.place.needs_sandbox for measurer in measurers)
    assert [(item.us, item.ratio, item.error) for item in result.workloads] == [(10.0, 2.0, 0.01)] * 2
    assert [measurer.place.capture.graph.sizes["N"] for measurer in measurers] == [512, 64]
    assert verifier.calls == 1
    assert result.launches == 4
    assert "32 registers" in result.compiled


def test_on_a_gpu_a_version_with_a_wrong_verdict_has_no_score(tried) -> None:
    timed = Judgement(Outcome.FASTER, before_us=20.0, after_us=10.0, ratio=2.0)
    wrong = Verdict(VerdictStatus.INCORRECT, (), "gpu", reason="values differ at N=37")
    result, _, _ = tried(timed, verdict=wrong)
    assert (result.outcome, result.detail, result.workloads) == (Outcome.WRONG, "values differ at N=37", ())
    crashed = WorkerFailed("the process ended with signal SIGSEGV", kind=FailureKind.CRASHED)
    result, _, _ = tried(timed, verdict=crashed)
    assert result.outcome is Outcome.WRONG
    assert "SIGSEGV" in result.detail


def test_a_version_that_is_slower_everywhere_is_not_verified(tried) -> None:
    result, _, verifier = tried(Judgement(Outcome.SLOWER, before_us=10.0, after_us=20.0, ratio=0.5, ratio_error=0.01))
    assert (result.outcome, len(result.workloads), verifier.calls) == (Outcome.SLOWER, 2, 0)
    # One that may be as fast is.
    _, _, verifier = tried(Judgement(Outcome.SLOWER, before_us=10.0, after_us=10.3, ratio=0.97, ratio_error=0.02))
    assert verifier.calls == 1


def test_the_end_of_the_time_is_no_fault_of_a_version(tried) -> None:
    timed = Judgement(Outcome.FASTER, before_us=20.0, after_us=10.0, ratio=2.0)
    with pytest.raises(WorkerFailed, match="over"):
        tried(timed, verdict=WorkerFailed("the time is over", kind=FailureKind.DEADLINE))


def test_a_version_that_fails_on_one_workload_is_not_verified(tried) -> None:
    result, measurers, verifier = tried(Judgement(Outcome.WRONG, "the results differ"))
    assert (result.outcome, result.detail) == (Outcome.WRONG, "the results differ")
    assert [len(measurer.judged) for measurer in measurers] == [1, 0]
    assert verifier.calls == 0


def test_without_a_gpu_one_process_verifies_and_every_workload_is_estimated(tried) -> None:
    result, measurers, verifier = tried(Judgement(Outcome.CORRECT), has_gpu=False)
    assert len(measurers) == 1
    assert verifier.calls == 0
    assert len(result.workloads) == 2
    assert result.workloads[0].us > result.workloads[1].us
    assert all(item.ratio > 1.0 and item.error == 0.0 for item in result.workloads)


def test_a_version_that_does_not_compile_is_not_judged(tried) -> None:
    broken = CompileReport((KernelReport("chain_kernel", "sm_90", error="too many registers"),))
    result, measurers, _ = tried(Judgement(Outcome.CORRECT), report=broken)
    assert result.outcome is Outcome.COMPILE_ERROR
    assert result.detail == "chain_kernel does not compile for sm_90: too many registers"
    assert measurers[0].judged == []


def test_the_stages_end_where_they_should(tried) -> None:
    timed = Judgement(Outcome.FASTER, before_us=20.0, after_us=10.0, ratio=2.0)
    result, measurers, verifier = tried(timed, stage=Stage.COMPILE)
    assert (result.outcome, verifier.calls, measurers[0].judged) == (Outcome.CORRECT, 0, [])
    result, measurers, verifier = tried(timed, stage=Stage.VERIFY)
    assert (verifier.calls, len(measurers[0].judged), measurers[1].judged) == (1, 1, [])


def recorded_tensor(name: str, dtype: str, *shape: int) -> ArgumentSpec:
    return ArgumentSpec(name, TensorSpec(tuple(Size.of(size) for size in shape), dtype))


# Workloads and estimates ----------------------------------------------------------------------------------------------


def test_free_sizes_are_halved_and_doubled_if_nothing_was_recorded(capture: Capture) -> None:
    assert workloads_of(capture).points == (("N=512", {"N": 512}), ("N=256", {"N": 256}), ("N=1024", {"N": 1024}))


def test_a_target_without_free_sizes_has_one_workload(captured) -> None:
    fixed = captured(CHAIN.replace("[N,256] N=512", "[512,256]"), "chain")
    fixed = replace(fixed, variable_sizes=())
    assert [name for name, _ in workloads_of(fixed).points] == ["as captured"]


def test_recorded_calls_give_the_workloads_and_others_are_named(capture: Capture) -> None:
    def call(dtype: str, *shape: int, count: int = 1) -> RecordedCall:
        return RecordedCall(count, (recorded_tensor("x", dtype, *shape),))

    calls = (
        call("float32", 100, 256),
        call("float32", 7, 256),
        call("bfloat16", 100, 256, count=3),
        call("float32", 4, 4, 256),
    )
    recorded = workloads_of(capture, RecordedTarget("model.py", "chain", calls))
    assert recorded.names == ["N=512", "N=100", "N=7"]
    assert recorded.notes[0].startswith("4 recorded calls have other dtypes, ranks, constants or fixed sizes")


def test_recorded_calls_with_other_constants_or_layouts_are_left_out(captured) -> None:
    text = "import torch\n\n\n# mtmc: x=f32[N,256] rows=True N=512\ndef f(x, rows):\n    return torch.softmax(x, -1 if rows else 0)\n"
    flagged = captured(text, "f")

    def call(rows: bool, **changes: object) -> RecordedCall:
        x = recorded_tensor("x", "float32", 64, 256)
        assert x.tensor is not None
        return RecordedCall(1, (replace(x, tensor=replace(x.tensor, **changes)), ArgumentSpec("rows", constant=rows)))

    transposed = call(True, stride=(Size.of(1), Size.of(64)))
    recorded = workloads_of(flagged, RecordedTarget("model.py", "f", (call(True), call(False), transposed)))
    assert recorded.names == ["N=512", "N=64"]
    assert recorded.notes[0].startswith("2 recorded calls have")


def test_a_capture_at_other_sizes_has_their_traffic(capture: Capture) -> None:
    half = at_sizes(capture, {"N": 256})
    assert half.bytes == pytest.approx(capture.bytes / 2)
    assert half.graph.sizes == {"N": 256}
    assert capture.graph.sizes == {"N": 512}


def test_estimates_of_a_models_version_count_the_launches_that_it_saves(capture: Capture) -> None:
    coder = BuiltinCoder(H200)
    root = coder.start(capture, CHAIN)
    listed = RooflinePlanner().ranked(State(capture, root, (), H200, False))
    version = coder.write(capture, root, listed[0])
    assert [launches_of(capture.graph, item) for item in (root, version)] == [5, 4]
    assert 0 < memory_of(capture.graph, version) < memory_of(capture.graph, root)
    # The same text by a model on the schedule of the user's code: it saves launches, and no traffic is known.
    by_model = replace(version, author=Author.MODEL, schedule=root.schedule)
    estimates = [estimate_us(capture, item, H200) for item in (root, by_model, version)]
    assert estimates[0] is not None and estimates[1] is not None and estimates[2] is not None
    assert estimates[2] < estimates[1] < estimates[0]
    saved = launches_of(capture.graph, root) - launches_of(capture.graph, by_model)
    assert estimates[0] - estimates[1] == pytest.approx(H200.launch_us * saved)
