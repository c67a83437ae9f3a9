"""The timing worker's commands on real workloads, timed by a clock that counts sleeps; and what the measurer does with its time."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import SleepClock
from handwritten import RMS
from pairs import MODEL

from mtmc_lsp.core.errors import FailureKind, MeasurementRejected, WorkerFailed
from mtmc_lsp.core.results import Timing, Verdict, VerdictStatus
from mtmc_lsp.core.workload import Capture, Target, TargetKind
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict, with_timing
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.process.worker import tensor_ipc
from mtmc_lsp.timing.messages import BaselinesRequest, TimeRequest
from mtmc_lsp.timing.worker import timing_commands as in_timer
from mtmc_lsp.verify.messages import CandidateSource, SeparateCandidate
from mtmc_lsp.verify.reference import Reference

SLOW = "import time\nimport torch\n\n\ndef fast(inp, weight, eps=1e-5):\n    time.sleep(0.002)\n    return {result}\n"
RIGHT = "inp * torch.rsqrt(inp.pow(2).mean(-1, keepdim=True) + eps) * weight"


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timing worker's state of the test's own; compiling is put off to where there is a GPU."""

    def compiler(function: Any, *, mode: str) -> Any:
        if mode == "max-autotune":
            raise RuntimeError("no")
        return function

    SleepClock().install(monkeypatch)
    monkeypatch.setattr(torch, "compile", compiler)


def request(capture: Capture, source: str, user_source: str, **more: Any) -> TimeRequest:
    given = {"baselines": ("compile",), "bound_us": 1.0, "least_us": 0.0, "seconds": 0.0, **more}
    return TimeRequest(capture, user_source, source, **given)


def asked(data: TimeRequest) -> Timing:
    answer = in_timer.time_candidate(data)
    began, ended = answer.window
    assert began < ended <= time.monotonic()
    return answer.timing


def test_a_version_of_the_users_file_is_timed_against_eager_the_compiler_and_the_version_before(
    capture_of: Callable[..., Capture],
) -> None:
    capture = capture_of(RMS)
    slow = RMS.text.replace("    return x *", "    import time\n    time.sleep(0.002)\n    return x *")
    timing = asked(
        request(capture, slow, user_source=RMS.text, previous=RMS.text, baselines=("compile", "max-autotune"))
    )
    assert timing.against("eager").high < 0.5
    assert timing.median_us > 2000
    assert [b.name for b in timing.baselines] == ["eager", "compile", "max-autotune", "previous"]
    assert timing.against("previous").high < 0.5
    assert timing.against("max-autotune") is None
    assert timing.baselines[2].note.startswith("torch.compile failed: RuntimeError: ")
    assert timing.baselines[1].compile_seconds is not None


def test_inputs_that_another_process_left_are_tensors_of_their_own(
    capture_of: Callable[..., Capture], tmp_path: Path
) -> None:
    """As parts of one, of which some change, torch.compile would treat them otherwise, or fail."""
    capture, path = capture_of(RMS), str(tmp_path / "given.pt")
    given = {
        item.name: torch.rand([s.value(capture.graph.sizes) for s in item.type.shape]) for item in capture.graph.inputs
    }
    tensor_ipc.export_(given, path, in_memory=False)
    in_timer.compile_baselines(BaselinesRequest(capture, RMS.text, ("compile",), inputs=path))
    held = in_timer._state["inputs"]
    assert all(torch.equal(held[name], value) for name, value in given.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in held.values()}) == len(given)


def test_a_candidate_in_a_file_of_its_own_is_timed_against_the_reference(
    capture_of: Callable[..., Capture], tmp_path: Path
) -> None:
    capture = capture_of(RMS)
    path = tmp_path / "fast.py"
    target = Target(str(path), "fast", TargetKind.FUNCTION, 5, 7)
    path.write_text(SLOW.format(result=RIGHT))
    more: Any = {"user_source": RMS.text, "separate": SeparateCandidate(target, "[[], {}]")}
    timing = asked(request(capture, path.read_text(), **more))
    assert timing.against("eager").high < 0.5
    assert timing.best in ("eager", "compile")
    with pytest.raises(MeasurementRejected, match="before timing"):
        in_timer.time_candidate(request(capture, SLOW.format(result=f"2 * ({RIGHT})"), **more))


def test_a_module_in_a_file_of_its_own_gets_the_references_parameters(
    captured: Callable[[str, str], Capture], tmp_path: Path
) -> None:
    """The reference's gain is moved away from its initial ones, so a candidate with its own would differ."""
    capture = captured(MODEL, "Model")
    source = MODEL.replace("class Model(", "class ModelNew(")
    (tmp_path / "new.py").write_text(source)
    target = Target(str(tmp_path / "new.py"), "ModelNew", TargetKind.MODULE, 5, 13)
    data = request(capture, source, user_source=MODEL, separate=SeparateCandidate(target, "[[32, 2.0], {}]"))
    assert asked(data).samples >= 25
    assert not torch.equal(in_timer._state["inputs"]["gain"], torch.ones(32))


# What is timed at all ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_a_foreign_candidate_is_unmeasured_and_says_why(capture_of: Callable[..., Capture]) -> None:
    with Reference(capture_of(RMS), RMS.text, sys.executable) as reference:
        for status, why in (
            (VerdictStatus.CORRECT, "no CUDA GPU"),
            (VerdictStatus.INCORRECT, "only correct candidates are timed"),
        ):
            result = ForeignVerdict(Verdict(status, (), "interpreter"))
            source = CandidateSource(RMS.text)
            timed = with_timing(result, source, reference, baselines=("compile",), fresh=False)
            assert (timed.speed, timed.untimed, timed.timing) == ("unmeasured", why, None)


def test_a_measurer_ends_what_is_under_way_when_its_time_is_up(capture_of: Callable[..., Capture]) -> None:
    """Also what would be cut short must not count as verified."""
    measurer = LocalMeasurer(
        capture_of(RMS), sys.executable, MeasureOptions(archs=("sm_90",), deadline=time.monotonic() + 1.0)
    )
    try:
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="time limit of the whole run") as failed:
            measurer.verify(RMS.candidate())
        assert failed.value.kind is FailureKind.DEADLINE
        assert time.monotonic() - began < 10
        with pytest.raises(WorkerFailed, match="time limit of the whole run"):
            measurer.compile(RMS.candidate())
    finally:
        measurer.close()


def test_a_lock_is_held_while_a_compiled_graph_runs_and_not_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.output_code import CompiledFxGraph

    held: list[str] = []
    seen: list[list[str]] = []

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        held.append("lock")
        yield
        held.pop()

    def run(graph: CompiledFxGraph, inputs: list[int]) -> int:
        seen.append([*held])
        return sum(inputs)

    class Made(CompiledFxGraph):
        def __init__(self) -> None:
            self.compiled_fn_runner = None

    monkeypatch.setattr(CompiledFxGraph, "__call__", run)
    graph = Made()
    with in_timer.running_within(lock):
        assert not held, "compiling"
        assert graph([1, 2]) == 3
        assert not held
    assert graph([3]) == 3
    assert seen == [["lock"], []], "what is timed has nothing of ours around it"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler of C++ here")
def test_torch_runs_what_it_compiled_by_what_is_locked(timer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    entered: list[int] = []

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        entered.append(1)
        yield

    compiled = torch.compile(lambda x: x.sin().sum())
    x = torch.linspace(0, 1, 8)
    with in_timer.running_within(lock):
        assert torch.allclose(compiled(x), x.sin().sum())
    assert entered == [1]
    compiled(x)
    assert entered == [1]
