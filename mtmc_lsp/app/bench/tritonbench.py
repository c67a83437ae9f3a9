"""TritonBench-G (github.com/thunlp/TritonBench): 184 files with kernels, a wrapper and a test, optimised as existing Triton.

Each file ends with a test behind a line of number signs. The test is the workload: its results in the file as it stands are
those that every edit must keep. Their evaluation runs the delivered file as a program (call accuracy), and compares what it
prints with what the original prints (execution accuracy).

Times are those of the largest inputs of the suite's performance script, where they can be generated: tests are so small that the
launch takes the whole time.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mtmc_lsp
from mtmc_lsp.app.bench.tritonbench_inputs import measured_target
from mtmc_lsp.app.kernels.optimize import KernelOptimization
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.errors import FailureKind, MtmcError, RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import RunResult, StepStatus
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.kernels.limits import decisive
from mtmc_lsp.kernels.messages import ROW_METHOD, FaultKind, ProgramRequest
from mtmc_lsp.kernels.reading import read_kernels
from mtmc_lsp.kernels.refusals import refusal_of
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.gpu_lock import lock_folder
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.triton.drivers import find_driver
from mtmc_lsp.timing.messages import SAMPLING_SECONDS

FOLDERS = ("data/TritonBench_G_v1", "TritonBench_G_v1", ".")
SCRIPTS = "performance_metrics/perf_G/golden_metrics"
"""The scripts by which the suite measures a file, each at several sizes."""
SEPARATOR = "#" * 146
EVALUATION_SECONDS = 120.0
TIME_ENDED = "the time limit was reached"
RECORD_SHARE = 0.5
"""Most of a file's time that the largest inputs may take to describe."""
SAMPLING_SHARE = 0.02
"""Share of a file's time for the samples of one timing."""
END_SECONDS = 1.0
"""Time to end before the processes are ended."""
CERTAIN = (FaultKind.READ_OUTSIDE, FaultKind.WRITE_OUTSIDE, FaultKind.RACE, FaultKind.UNDEFINED_LANES)
"""Faults that are reported of originals. A test may leave elements unwritten, or pass NaN, on purpose."""


@dataclass(frozen=True)
class KernelProblem:
    """One file of the suite."""

    name: str
    file: Path
    has_test: bool
    script: Path | None = None
    """The script by which the suite measures it."""

    @property
    def level(self) -> str:
        """The suite has no levels."""
        return "g"


def kernel_problems(path: Path) -> list[KernelProblem]:
    """The files of the suite in a copy of its repository, or in its folder of files.

    Raises:
        RequestError: there are none.
    """
    folder = next((path / name for name in FOLDERS if any((path / name).glob("*.py"))), None)
    files = sorted(folder.glob("*.py")) if folder is not None else []
    found = [(file, SEPARATOR in file.read_text(encoding="utf-8")) for file in files]
    if not any(has_test for _, has_test in found):
        raise RequestError(
            f"{path} holds no files of TritonBench-G",
            remedy="Name a copy of github.com/thunlp/TritonBench, or its folder data/TritonBench_G_v1.",
        )
    scripts = {file.name: file for file in (path / SCRIPTS).glob("*.py")}
    return [KernelProblem(file.stem, file, has_test, scripts.get(f"{file.stem}_perf.py")) for file, has_test in found]


@dataclass
class KernelRecord:
    """What came of one file; the fields are those of its line in the results."""

    problem: str
    read: bool = False
    """Whether its kernels were read without an error."""
    kernels: list[str] = field(default_factory=list)
    test: str = ""
    inputs: str = ""
    """The function that is timed with the largest inputs of the suite's performance script; empty if the test's launches are."""
    runs: bool = False
    """Whether the original's test runs, here or by the interpreter."""
    reason: str = ""
    """Why it does not run, or why nothing was tried."""
    fault: str = ""
    """A fault of the original with its smallest case."""
    compiled: bool = False
    """Whether all launched kernels compile."""
    compile_error: str = ""
    accesses: int = 0
    tried: list[str] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    """Kinds of the accepted edits."""
    refused: list[dict[str, object]] = field(default_factory=list)
    """Edits that were not kept: kind, kernel, stage, reason, and the ratio and time if they were timed."""
    limit: str = ""
    """What bounds the file as it stands, so that kinds of edits were not tried."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on; calls to two processes may overlap."""
    status: str = ""
    end_reason: str = ""
    call: bool | None = None
    """Whether the delivered file runs as a program (their call accuracy); None if the original does not run either."""
    execution: bool | None = None
    """Whether it prints what the original prints (their execution accuracy); None if the original varies from run to run."""
    speedup: float | None = None
    median_us: float | None = None
    by_rows: bool = False
    """Whether both are of rows of calls, which the host bounds, and not of single calls."""
    in_test: bool = False
    """Whether both are of the test's launches, and the version is no faster with the largest inputs."""
    wall_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The record as JSON data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class _Place:
    """Where files are optimised."""

    settings: Settings
    python: str
    delivered: Path
    fork_server: ForkServer | None
    compiling_server: ForkServer | None


def solve_kernels(
    problem: KernelProblem,
    settings: Settings,
    python: str,
    seconds: float,
    delivered: Path,
    *,
    tries_all: bool = True,
    deadline: float = math.inf,
    fork_server: ForkServer | None = None,
    compiling_server: ForkServer | None = None,
) -> KernelRecord | None:
    """Read, compile, optimise and evaluate one file.

    Args:
        delivered: the folder for delivered files.
        tries_all: whether edits that only a measurement can judge are verified without a GPU, too.
        seconds: for inputs, observation and edits; the evaluation of a delivered file comes after it.
        deadline: value of the monotonic clock at which all processes end.
        fork_server: starts the processes of all files that interpret kernels.
        compiling_server: starts those that compile kernels, or run on a GPU.

    Returns:
        The record; None if the deadline came first.
    """
    began = time.monotonic()
    record = KernelRecord(problem.name)
    if began >= deadline:
        return None
    try:
        place = _Place(settings, python, delivered, fork_server, compiling_server)
        _solve(record, problem, place, min(began + seconds, deadline), deadline, tries_all=tries_all)
    except MtmcError as error:
        is_ended = error.kind is FailureKind.CANCELLED
        record.reason = f"{TIME_ENDED} before the original had run" if is_ended else error.message
    if time.monotonic() >= deadline:
        return None
    record.wall_seconds = round(time.monotonic() - began, 1)
    return record


def _solve(
    record: KernelRecord,
    problem: KernelProblem,
    place: _Place,
    end: float,
    deadline: float,
    *,
    tries_all: bool,
) -> None:
    settings, python, delivered = place.settings, place.python, place.delivered
    text = problem.file.read_bytes()
    readings = read_kernels(str(problem.file), text)
    record.kernels = [reading.name for reading in readings]
    record.read = bool(readings)
    driver = find_driver(text, str(problem.file), record.kernels)
    if driver is None:
        record.reason = "no test calls its kernels"
        return
    record.test = driver.qualname
    opened = open_target(parse_request(f"{problem.file}::{driver.qualname}", settings, python))
    target = None
    if problem.script is not None:
        cache = delivered.with_suffix(".inputs") / f"{problem.name}.json"
        began = time.monotonic()
        target = measured_target(opened, driver, problem.script, python, cache, RECORD_SHARE * (end - began))
        record.seconds["inputs"] = round(time.monotonic() - began, 2)
        record.inputs = target.workload.target.qualname if target is not None else ""
    seconds = end - time.monotonic()
    run = KernelOptimization(
        opened,
        is_stored=False,
        tries_all=tries_all,
        target=target,
        fork_server=place.fork_server,
        compiling_server=place.compiling_server,
        sampling=min(SAMPLING_SECONDS, SAMPLING_SHARE * seconds),
    )
    # Observing a kernel may take minutes, and only its processes can be ended.
    with at_deadline(run.kill, end):
        try:
            result = run.run(seconds - END_SECONDS)
        finally:
            _note_original(record, run)
            record.seconds |= {name: round(spent, 2) for name, spent in run.seconds.items()}
    _note(record, result)
    if run.times_test:
        record.inputs, record.in_test = "", run.gains_in_test
    record.limit = run.limit
    if result.final.diff:
        began = time.monotonic()
        has_gpu = bool(result.environment.gpu)
        runner = _programs(place, problem, deadline) if has_gpu else _interpreted(python, deadline)
        evaluate(record, problem, result.final.source, delivered, runner)
        record.seconds["evaluation"] = round(time.monotonic() - began, 2)


@contextlib.contextmanager
def at_deadline(action: Callable[[], None], deadline: float) -> Iterator[None]:
    """From a value of the monotonic clock on, run an action every second until the context ends."""
    ended = threading.Event()

    def watch() -> None:
        if not ended.wait(max(0.0, deadline - time.monotonic())):
            action()
            while not ended.wait(1.0):
                action()

    if deadline < math.inf:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _note_original(record: KernelRecord, run: KernelOptimization) -> None:
    """What the original showed: whether its test runs, its faults, and whether its kernels compile."""
    trace = next(iter(run.traces), None)
    if trace is None:
        return
    raised = next((fault for fault in trace.faults if fault.kind is FaultKind.RAISES), None)
    record.runs, record.accesses = raised is None and not trace.refusal and not run.gpu_problem, len(trace.accesses)
    if run.gpu_problem:
        # The reason of the refusal names it.
        record.compile_error = run.gpu_problem[:300]
        return
    if raised is not None or trace.refusal:
        record.reason = raised.place_and_detail if raised is not None else trace.refusal
        return
    certain = [fault for fault in trace.faults if fault.kind in CERTAIN]
    record.fault = certain[0].place_and_detail if certain else ""
    if not trace.launches:
        record.reason = "its test launches no kernel"
    errors = [f"{kernel.kernel}: {kernel.error}" for kernel in run.reports if kernel.error]
    record.compiled = (run.has_gpu or bool(run.reports)) and not errors
    record.compile_error = errors[0][:300] if errors else ""


def _note(record: KernelRecord, result: RunResult) -> None:
    record.status, record.end_reason = result.status.value, result.end_reason
    for step in result.steps:
        change = str(step.action.params["change"])
        record.tried.append(change)
        if step.status is StepStatus.ACCEPTED:
            record.applied.append(change)
        refusal = refusal_of(step)
        if refusal is not None:
            record.refused.append(to_json(refusal))
    timings = [step.timing for step in result.steps if step.status is StepStatus.ACCEPTED and step.timing is not None]
    if timings:
        timing = decisive(timings[-1], "eager") or timings[-1]
        ratio = timing.against("eager")
        record.speedup = ratio.ratio if ratio is not None else None
        record.median_us, record.by_rows = timing.median_us, timing.method == ROW_METHOD


class Runner(Protocol):
    """Runs a file as a program."""

    def __call__(self, file: Path, *, tunes: bool = True) -> str | None:
        """What it prints; None if it fails.

        Args:
            tunes: whether autotuners choose among their configurations; otherwise the first one runs.
        """


def evaluate(record: KernelRecord, problem: KernelProblem, text: str, delivered: Path, run: Runner) -> None:
    """Their evaluation: the delivered file runs as a program, and prints what the original prints.

    The original's autotuners use their first configurations, since compiling the others takes most of the time. If the
    delivered file prints something else, the original runs again as it is.
    """
    delivered.mkdir(parents=True, exist_ok=True)
    file = delivered.absolute() / problem.file.name
    file.write_text(text, encoding="utf-8")
    original = problem.file.absolute()
    # One after the other: the second one uses kernels that the first one compiled.
    ours, theirs = run(file), run(original, tunes=False)
    if ours is not None and ours != theirs:
        theirs = run(original)
    if theirs is None and ours is None:
        # Without the address ranges of observation, accesses outside a tensor may end the process.
        record.call = None
        return
    record.call = ours is not None
    if ours is not None and theirs is not None:
        record.execution = ours == theirs
        if not record.execution and theirs != run(original):
            # A test without a seed prints something else each time.
            record.execution = None


def _programs(place: _Place, problem: KernelProblem, deadline: float) -> Runner:
    """Runs each file in a new process, which shares the GPU."""

    def run(file: Path, *, tunes: bool = True) -> str | None:
        server = place.compiling_server or place.fork_server
        with Worker(place.python, cwd=str(problem.file.parent), fork_server=server) as worker:
            try:
                gpu = worker.call(StartRequest(gpu=True), EVALUATION_SECONDS, end=deadline).gpu
                lock = GpuLock(gpu, lock_folder(gpu)) if gpu else None
                answer = worker.call(ProgramRequest(str(file), tunes), EVALUATION_SECONDS, lock, deadline)
            except MtmcError:
                return None
        return None if answer.problem else answer.output

    return run


def _interpreted(python: str, deadline: float) -> Runner:
    """Runs each file under Triton's interpreter, where there is no GPU."""
    package = str(Path(mtmc_lsp.__file__).parents[1])
    paths = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}

    def run(file: Path, *, tunes: bool = True) -> str | None:
        command = [python, "-m", "mtmc_lsp.kernels.worker.run_on_cpu", str(file)]
        seconds = min(EVALUATION_SECONDS, max(0.0, deadline - time.monotonic()))
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False, env=env, cwd=file.parent
            )
        except subprocess.TimeoutExpired:
            return None
        return done.stdout if done.returncode == 0 else None

    return run
