"""What is observed, compared and timed on a machine with a GPU, with scripted processes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtmc_lsp.app.kernels import tools as tools_module
from mtmc_lsp.app.kernels.tools import KernelTools
from mtmc_lsp.core.errors import FailureKind, GpuInUse, MtmcError, WorkerFailed
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.workload import WorkloadSource
from mtmc_lsp.kernels.comparison import compared
from mtmc_lsp.kernels.messages import VARIES, CaseTrace, Configs, Fault, FaultKind, TraceAnswer, TraceCase
from mtmc_lsp.timing.messages import TimeAnswer

ORIGINAL, VERSION = b"original", b"version"
CASES = [TraceCase({"N": 1}), TraceCase({"N": 2}), TraceCase({"N": 3})]
WRONG = Fault(FaultKind.WRONG_VALUES, 0, "kernel", "a result has a relative error of 1.0e-01 on the GPU")


class Session:
    """Answers from a script; notes which text each of them observed."""

    def __init__(self, *, is_too_long: bool = False, faults: tuple[Fault, ...] = ()) -> None:
        workload = SimpleNamespace(source=WorkloadSource.DIRECTIVE)
        opened = SimpleNamespace(text=ORIGINAL)
        self.target = SimpleNamespace(opened=opened, workload=workload, observed_workload=workload)
        self.is_too_long, self.faults = is_too_long, faults
        self.interpreted: list[bytes] = []
        self.checked: list[bytes] = []
        self.configs: list[Configs] = []
        self.zeroed: list[bool] = []
        self.started = False

    def trace(self, text: bytes, cases: Sequence[TraceCase], **options: Any) -> Sequence[CaseTrace]:
        self.interpreted.append(text)
        if self.is_too_long:
            raise WorkerFailed("it took too long", kind=FailureKind.TIMEOUT)
        return [CaseTrace(case) for case in cases]

    def start_interpreter(self) -> None:
        self.started = True

    def spent(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def check(
        self,
        text: bytes,
        cases: Sequence[TraceCase],
        lock: object,
        seconds: float,
        configs: Configs,
        *,
        has_zero_indices: bool,
    ) -> TraceAnswer:
        self.checked.append(text)
        self.zeroed.append(has_zero_indices)
        self.configs.append(configs)
        faults = self.faults if text == VERSION else ()
        return TraceAnswer(tuple(CaseTrace(case, faults) for case in cases))


def tools_of(session: Session, monkeypatch: pytest.MonkeyPatch) -> KernelTools:
    monkeypatch.setattr(KernelTools, "has_gpu", True)
    monkeypatch.setattr(KernelTools, "_gpu", "")
    return KernelTools(cast(Any, session))


def test_what_the_interpreter_cannot_run_in_time_is_observed_on_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(is_too_long=True)
    tools = tools_of(session, monkeypatch)
    before = tools.observe(ORIGINAL, CASES)
    assert not tools.is_interpreted
    assert session.started, "starting the process takes none of the interpreter's time"
    assert compared(before, tools.observe(VERSION, CASES)).is_correct
    assert session.interpreted == [ORIGINAL], "versions do not wait for the interpreter again"
    assert session.checked == [ORIGINAL, VERSION]


@pytest.mark.parametrize(
    ("seconds", "limits"), [(None, [6.0, 6.0]), (100.0, [6.0, 6.0]), (20.0, [3.0, 2.5]), (2.0, [1.0, 1.0])]
)
def test_the_interpreter_takes_a_small_share_of_a_short_run(
    seconds: float | None, limits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given = [0.0], list[float]()

    class Slow(Session):
        def trace(self, text: bytes, cases: Sequence[TraceCase], *, seconds: float = 0.0, **_: Any) -> Any:
            given.append(seconds)
            now[0] += 0.5
            return [CaseTrace(case) for case in cases]

    monkeypatch.setattr(tools_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    session = Slow()
    session.target.workload = session.target.observed = SimpleNamespace(
        source=WorkloadSource.DIRECTIVE, sizes={}, arguments=()
    )
    monkeypatch.setattr(tools_module, "elements_of", lambda workload, sizes: 1)
    monkeypatch.setattr(KernelTools, "has_gpu", True)
    monkeypatch.setattr(KernelTools, "_gpu", "")
    tools = KernelTools(cast(Any, session), **({} if seconds is None else {"seconds": seconds}))
    tools.observe(ORIGINAL, CASES)
    tools.work(ORIGINAL)
    assert given == pytest.approx(limits)


@pytest.mark.parametrize("helps", [True, False])
def test_a_file_that_loses_the_gpu_is_checked_with_indices_of_zero(
    helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    class Losing(Session):
        def check(self, *args: Any, has_zero_indices: bool, **options: Any) -> TraceAnswer:
            answer = super().check(*args, has_zero_indices=has_zero_indices, **options)
            if not (helps and has_zero_indices):
                raise MtmcError(
                    "internal error in kernels.check: AcceleratorError: CUDA error: an illegal memory access"
                )
            return answer

        def plain_worker(self) -> Any:
            return SimpleNamespace(close=lambda: closed.append(True))

    session = Losing()
    tools = tools_of(session, monkeypatch)
    before = tools.observe(ORIGINAL, CASES)
    assert session.zeroed == [False, True]
    assert len(closed) == (1 if helps else 2), "a process that lost the GPU ends"
    if helps:
        assert compared(before, tools.observe(VERSION, CASES)).is_correct
        assert session.zeroed == [False, True, True], "a version gets the same indices"
    else:
        with pytest.raises(MtmcError):
            tools.observe(VERSION, CASES)
        assert session.zeroed[2:] == [False]


def test_a_version_that_differs_on_the_gpu_is_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(faults=(WRONG,))
    tools = tools_of(session, monkeypatch)
    before = tools.observe(ORIGINAL, CASES)
    verdict = compared(before, tools.observe(VERSION, CASES))
    assert not verdict.is_correct
    assert "on the GPU" in verdict.reason
    assert (session.interpreted, session.checked) == ([ORIGINAL], [ORIGINAL, VERSION])


def test_a_file_is_interpreted_while_it_runs_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Session):
        both = threading.Barrier(2, timeout=30.0)

        def trace(self, text: bytes, cases: Sequence[TraceCase], **options: Any) -> Sequence[CaseTrace]:
            self.both.wait()
            return super().trace(text, cases, **options)

        def check(self, *args: Any, **options: Any) -> TraceAnswer:
            self.both.wait()
            raise WorkerFailed("the test needs more memory", kind=FailureKind.GPU_OUT_OF_MEMORY)

    tools = tools_of(Waiting(), monkeypatch)
    assert [trace.is_sound for trace in tools.observe(ORIGINAL, CASES)] == [True] * 3
    assert tools.is_interpreted


def test_the_end_of_the_time_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(Session):
        def check(self, *args: Any, **options: Any) -> TraceAnswer:
            raise WorkerFailed("kernels.check was cancelled", kind=FailureKind.CANCELLED)

    with pytest.raises(WorkerFailed, match="was cancelled"):
        tools_of(Ending(), monkeypatch).observe(ORIGINAL, CASES)


def test_a_file_that_does_not_run_on_the_gpu_is_known_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Session):
        def check(self, text: bytes, cases: Sequence[TraceCase], *args: Any, **options: Any) -> TraceAnswer:
            fault = Fault(FaultKind.RAISES, 0, "", "OutOfResources: out of resource: shared memory")
            return TraceAnswer(tuple(CaseTrace(case, (fault,)) for case in cases), compile_seconds=2.5)

    tools = tools_of(Failing(), monkeypatch)
    assert all(trace.is_sound for trace in tools.observe(ORIGINAL, CASES)), "the interpreter runs it"
    assert tools.gpu_problem == "OutOfResources: out of resource: shared memory"
    assert tools.compile_seconds == 2.5
    sound = tools_of(Session(), monkeypatch)
    sound.observe(ORIGINAL, CASES)
    assert not sound.gpu_problem


def test_other_configurations_run_only_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    tools = tools_of(session, monkeypatch)
    tools.observe(VERSION, CASES)
    assert session.configs == [Configs.FIRST]
    assert len(tools.observe_configurations(VERSION, CASES)) == len(CASES)
    assert session.configs == [Configs.FIRST, Configs.OTHERS]


def test_a_sound_version_is_also_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    tools = tools_of(session, monkeypatch)
    before = tools.observe(ORIGINAL, CASES)
    assert compared(before, tools.observe(VERSION, CASES)).is_correct
    assert session.interpreted == [ORIGINAL, VERSION]


def test_a_disturbed_timing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [GpuInUse("another program"), "timing"]

    class Clock:
        def time(self, request: object) -> object:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    session = Session()
    cast(Any, session).importable = lambda text: text.decode()
    session.target.workload = session.target.observed_workload
    tools = tools_of(session, monkeypatch)
    tools._timekeeper = cast(Any, Clock())
    assert cast(Any, tools.time(VERSION, None, 1.0, 0.0)) == "timing"
    assert not answers


def test_the_test_is_timed_where_the_kernels_do_not_accept_generated_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[object] = []

    class Clock:
        def time(self, request: Any) -> object:
            timed.append(request.workload)
            if request.workload is generated:
                raise MtmcError("internal error in kernels.time: AcceleratorError: CUDA error")
            return "timing"

    session, closed = Session(), list[bool]()
    extra: Any = session
    extra.importable = lambda text: text.decode()
    extra.plain_worker = lambda: SimpleNamespace(close=lambda: closed.append(True))
    generated, test = (SimpleNamespace(source=source) for source in (WorkloadSource.DIRECTIVE, WorkloadSource.SCRIPT))
    session.target.workload, session.target.observed, session.target.observed_workload = generated, test, test
    tools = tools_of(session, monkeypatch)
    tools._timekeeper = cast(Any, Clock())
    assert cast(Any, tools.time(VERSION, None, 1.0, 0.0)) == "timing"
    assert cast(Any, tools.time(VERSION, ORIGINAL, 1.0, 0.0)) == "timing"
    assert timed == [generated, generated, test, test], "the file as it stands fails, too"
    assert closed == [True, True], "a process that lost the GPU ends"


@pytest.mark.parametrize("is_timed_first", [True, False])
def test_a_version_that_fails_on_inputs_of_the_original_does_not_change_the_inputs(
    is_timed_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        def time(self, request: Any) -> object:
            if request.source == VERSION.decode():
                raise MtmcError("internal error in kernels.time: ValueError: out of range")
            return request.workload

    session = Session()
    extra: Any = session
    extra.importable = lambda text: text.decode()
    generated, test = (SimpleNamespace(source=source) for source in (WorkloadSource.DIRECTIVE, WorkloadSource.SCRIPT))
    session.target.workload, session.target.observed, session.target.observed_workload = generated, test, test
    tools = tools_of(session, monkeypatch)
    tools._timekeeper = cast(Any, Clock())
    if is_timed_first:
        assert cast(Any, tools.baseline(1.0)) is generated
    with pytest.raises(MtmcError, match="out of range"):
        tools.time(VERSION, None, 1.0, 0.0)
    assert not tools.times_test


def test_the_seconds_of_a_timing_tell_how_long_it_waited_and_used_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    answer = TimeAnswer(cast(Any, "timing"), (10.0, 13.0), 2.5)
    extra: Any = session
    extra.seconds = defaultdict(float)
    extra.plain_worker = lambda: SimpleNamespace(call=lambda *_: answer)
    tools = tools_of(session, monkeypatch)
    for _ in range(2):
        assert tools._ask(cast(Any, "request"), is_locked=True) is answer
    # The window begins after the wait.
    assert extra.seconds == {"wait for the GPU": 5.0, "GPU alone": 6.0}


def test_results_that_vary_from_run_to_run_certify_nothing() -> None:
    before = [CaseTrace(CASES[0])]
    verdict = compared(before, [CaseTrace(CASES[0], refusal=VARIES)])
    assert verdict.status is VerdictStatus.UNCERTIFIABLE
    assert verdict.reason == VARIES
    assert compared(
        [*before, CaseTrace(CASES[1])], [CaseTrace(CASES[0], refusal=VARIES), CaseTrace(CASES[1])]
    ).is_correct
