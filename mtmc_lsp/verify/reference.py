"""The reference process: computes the expected results of each case, once for all candidates, and judges their results.

Of a user's loop that takes long, and of a network, two such processes compute different cases.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import MtmcError, WorkerFailed
from mtmc_lsp.core.results import Check
from mtmc_lsp.core.workload import Capture, WorkloadSource
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.verify.candidate_process import RUN_SECONDS
from mtmc_lsp.verify.cases import AUTOGRAD, Case
from mtmc_lsp.verify.messages import (
    NO_ARGUMENTS,
    CandidateSource,
    CaseRequest,
    ConstructorRequest,
    JudgeAnswer,
    JudgeRequest,
    JudgeUseRequest,
    LoadRequest,
    OracleRequest,
    ReferenceAnswer,
    ReferenceRequest,
    ReproduceRequest,
    ShareInputsRequest,
    UnshareInputsRequest,
    UseReferenceRequest,
    UseScript,
)
from mtmc_lsp.verify.sizes.case_sizes import has_slow_loop, is_network
from mtmc_lsp.verify.sizes.libraries import libraries_of
from mtmc_lsp.verify.trials import Trial

SHARED_BYTES = 1e9
"""Workloads that move more bytes take long to create once more, so their inputs are shared with the timer. Those of smaller ones
may be shared before a version needs them."""


@dataclass(frozen=True)
class PreparedUse:
    """The use script of a case, with the reference's results."""

    data: CaseRequest
    expected: str
    """The file with the reference's results."""
    script: UseScript


@dataclass(frozen=True)
class PreparedCase:
    """A case whose expected results are computed, or will be."""

    data: CaseRequest
    expected: str
    """The file with the expected results."""
    done: Future[ReferenceAnswer]

    @property
    def case(self) -> Case:
        """The case."""
        return self.data.case


class ReferenceStart:
    """The process and the folders of a reference whose capture may not be known yet. A :class:`Reference` takes them over."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        # Candidates may read the inputs but not the expected results, and write to neither.
        self.secret = Path(tempfile.mkdtemp(prefix="mtmc-expected-"))
        self.inputs = Path(tempfile.mkdtemp(prefix="mtmc-inputs-"))


class Reference:
    """The reference of all candidates of one capture. Several threads may use it."""

    def __init__(
        self,
        capture: Capture,
        user_source: str | None,
        python: str,
        *,
        pool: WorkerPool | None = None,
        seed: int | None = None,
        precision: str = "budget",
        run_seconds: float = RUN_SECONDS,
        worker: Worker | None = None,
        fork_server: ForkServer | None = None,
        early: ReferenceStart | None = None,
    ) -> None:
        """Prepare the process, which starts with the first call.

        Args:
            user_source: the user's file; ``None`` reads the file.
            pool: the processes of the task; by default one without a deadline.
            seed: of the inputs; by default one that no candidate can know.
            precision: ``budget`` or ``strict``, as in the settings.
            run_seconds: time limit for one case.
            worker: a process of the caller, who closes it.
            early: a process that starts already, and its folders; this object owns them.
        """
        self.capture, self.user_source, self.python, self.fork_server = capture, user_source, python, fork_server
        self.run_seconds, self.precision = run_seconds, precision
        self.seed = secrets.randbelow(2**31) if seed is None else seed
        self.has_gpu = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        self.pool = pool or WorkerPool(has_gpu=self.has_gpu)
        self._owns_worker = worker is None
        variables = {} if self.has_gpu else {"TRITON_INTERPRET": "1"}
        root = str(project_root(Path(capture.workload.target.path)))
        start = early or ReferenceStart(worker or Worker(python, cwd=root, env=variables, fork_server=fork_server))
        self.worker, self._secret, self._inputs = start.worker, start.secret, start.inputs
        self._workers = [self.worker]
        if worker is None and self.has_gpu and is_host_bound(capture):
            # The host bounds the launches, and most of the GPU is idle.
            self._workers.append(Worker(python, cwd=root, env=variables, fork_server=fork_server))
        for each in self._workers:
            self.pool.share_memory_with(each)
        self._shares_memory = self.has_gpu
        # A thread for each process computes ahead; calls that a candidate waits for go first.
        self._ahead = ThreadPoolExecutor(len(self._workers), initializer=self._take_worker)
        self._free = list(self._workers)
        self._own = threading.local()
        self._homes: dict[str, Worker] = {}
        """By file of expected results: the process that computed them and holds them in its memory."""
        self._lock = threading.Lock()
        self._prepared: dict[tuple[str, str], PreparedCase] = {}
        self._uses: dict[tuple[str, str], PreparedUse] = {}
        self._waiting: Counter[Worker] = Counter()
        """By process: the requests that candidates wait for."""
        self._idle = threading.Condition()
        self._results = 0
        self.waited_seconds = 0.0
        """How long verifications have waited for expected results, which are computed once for all candidates."""
        self._init = ""
        self.counts_operations = False
        """Whether the arithmetic operations of the workload are counted."""
        self._without_oracle = set[str]()
        """The files of expected results for which the float64 oracle did not fit into memory."""
        self._deferred: dict[str, PreparedCase] = {}
        """By file of expected results: cases without an oracle, until their results are judged."""
        self._shared = set[str]()
        """The files of expected results of cases whose inputs are shared already."""
        self._needs_oracles = False
        """Whether results differ from the reference's, so that the oracles of all cases are needed."""

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def without_oracle(self) -> int:
        """The number of cases in which the float64 oracle did not fit into memory."""
        return len(self._without_oracle)

    @property
    def hidden(self) -> str:
        """The folder of the expected results, which candidates must not read."""
        return str(self._secret)

    def start(self) -> None:
        """Start the processes and load the user's file. The first request reports an error."""
        libraries = libraries_of(self.capture.graph, has_oracle=True)
        for worker in self._workers:
            with contextlib.suppress(MtmcError):
                self.pool.call_unlocked(worker, StartRequest(self.has_gpu, libraries=libraries), self.run_seconds)
                load = LoadRequest(self.capture, self.user_source, (None,))
                self.pool.call_unlocked(worker, load, self.run_seconds)

    def constructor(self) -> str:
        """The constructor's arguments, as in :class:`~mtmc_lsp.verify.messages.ConstructorAnswer`; starts the process."""
        with self._lock:
            if not self._init:
                self._init = NO_ARGUMENTS
                if self.capture.workload.source is WorkloadSource.GET_INPUTS:
                    request = ConstructorRequest(self.capture, user_source=self.user_source)
                    self._init = self.pool.call(self.worker, request, self.run_seconds).init
        return self._init

    def prepare(self, trial: Trial, cases: Sequence[Case], *, first: Case | None) -> list[PreparedCase]:
        """Start computing the expected results of cases, in this order, unless that has started already.

        Args:
            trial: the sizes of the parameters.
            first: the case that is the workload itself.
        """
        return [self._prepare(trial, case, is_first=case == first) for case in cases]

    def _prepare(self, trial: Trial, case: Case, *, is_first: bool) -> PreparedCase:
        key = (f"{trial.init} {trial.is_full}", repr(case))
        with self._lock:
            if key not in self._prepared or (is_first and _process_failed(self._prepared[key].done)):
                number = len(self._prepared)
                data = self._request(trial, case, f"inputs-{number}.pt", is_first=is_first)
                expected = str(self._secret / f"expected-{number}.pt")
                defers = self._defers_oracle(data)
                done = Future[ReferenceAnswer]()
                self._prepared[key] = PreparedCase(data, expected, done)
                if defers:
                    self._deferred[expected] = self._prepared[key]
                computing = self._ahead.submit(self._run_ahead, self._prepared[key], defers)
                computing.add_done_callback(lambda ended: done.cancel() if ended.cancelled() else None)
            return self._prepared[key]

    def _run_ahead(self, prepared: PreparedCase, defers_oracle: bool) -> None:
        try:
            prepared.done.set_result(self._compute(prepared.data, prepared.expected, defers_oracle))
        except BaseException as error:
            prepared.done.set_exception(error)
            return
        if defers_oracle and prepared.data.is_first:
            # Before this process computes other cases: this one is judged first.
            self._compute_oracle(prepared)

    def _defers_oracle(self, data: CaseRequest) -> bool:
        """Whether the oracle of a case is left out at first, because it takes long.

        The results of most cases are probably the reference's, bit for bit: outside its guard, a version runs the user's code,
        and the first version of a network often launches the same library kernels from a CUDA graph. The oracle of a network's
        workload is computed while the version runs on it.
        """
        case = data.case
        if self.counts_operations or case.has_all_draws or not case.has_oracle:
            return False
        takes_long = self.has_gpu and is_network(data.call.graph)
        if data.is_first:
            return takes_long
        return case.kind == AUTOGRAD or (takes_long and not self._needs_oracles)

    def compute_oracles(self) -> None:
        """Start to compute the oracles that were left out, because a candidate's results are not the reference's."""
        with self._lock:
            if self._needs_oracles:
                return
            self._needs_oracles = True
            for prepared in self._deferred.values():
                if prepared.case.kind != AUTOGRAD:
                    self._ahead.submit(self._compute_oracle, prepared)

    def _compute_oracle(self, prepared: PreparedCase) -> None:
        worker = self._homes.get(prepared.expected)
        if worker is None or prepared.expected not in self._deferred:
            return
        with self._idle:
            self._idle.wait_for(lambda: not self._waiting[worker])
        # The judge reports an error.
        with contextlib.suppress(MtmcError):
            answer = self._call(OracleRequest(prepared.data, prepared.expected), worker)
            self._note_oracle(prepared.expected, has_oracle=answer.has_oracle)

    def _note_oracle(self, expected: str, *, has_oracle: bool) -> None:
        with self._lock:
            if not has_oracle:
                self._without_oracle.add(expected)

    def _request(self, trial: Trial, case: Case, file: str, *, is_first: bool) -> CaseRequest:
        return CaseRequest(
            trial.capture,
            user_source=self.user_source,
            case=case,
            inputs=str(self._inputs / file),
            is_first=is_first,
            init=trial.init,
            shares_memory=self._shares_memory,
        )

    def _take_worker(self) -> None:
        with self._lock:
            self._own.worker = self._free.pop(0)

    def _compute(self, data: CaseRequest, expected: str, defers_oracle: bool) -> ReferenceAnswer:
        worker: Worker = self._own.worker
        self._homes[expected] = worker
        with self._idle:
            self._idle.wait_for(lambda: not self._waiting[worker])
        counts_operations = self.counts_operations and data.is_first
        # The oracle follows at once, and the version must not wait for it to get the inputs.
        shares_inputs = defers_oracle and data.is_first and self.capture.bytes < SHARED_BYTES
        request = ReferenceRequest(data, expected, counts_operations, defers_oracle, shares_inputs)
        answer = self._call(request, worker)
        if shares_inputs and answer.is_large:
            self._shared.add(expected)
        self._note_oracle(expected, has_oracle=answer.has_oracle or not data.case.has_oracle)
        return answer

    def _call(self, request: Request[Answer], worker: Worker) -> Answer:
        try:
            return self.pool.call(worker, request, self.run_seconds)
        except MtmcError as error:
            # A process that starts again has shared nothing.
            self._shared.clear()
            if error.kind.is_gpu_failure:
                # A failed kernel makes every later GPU call of the process fail. The next one computes lost results again.
                worker.close()
            raise

    def _call_first(self, request: Request[Answer], prepared: PreparedCase | None = None) -> Answer:
        """The answer to a request that a candidate waits for: no further case is computed before it.

        Args:
            prepared: the case whose process answers; by default the first process does.
        """
        worker = self.worker if prepared is None else self._homes.get(prepared.expected, self.worker)
        with self._idle:
            self._waiting[worker] += 1
        try:
            return self._call(request, worker)
        finally:
            with self._idle:
                self._waiting[worker] -= 1
                self._idle.notify_all()

    def wait_for(self, prepared: PreparedCase) -> None:
        """Wait for the expected results of a case.

        Raises:
            MtmcError: the reference fails on the case.
        """
        began = time.monotonic()
        try:
            prepared.done.result()
        finally:
            self.waited_seconds += time.monotonic() - began

    def share_inputs(self, prepared: PreparedCase) -> None:
        """Make the inputs of a case available to the candidate process until its results are judged."""
        if prepared.data.shares_memory and prepared.done.result().is_large:
            if prepared.expected in self._shared:
                self._shared.discard(prepared.expected)
                return
            self._call_first(ShareInputsRequest(prepared.data, prepared.data.inputs), prepared)

    def without_shared_memory(self, prepared: PreparedCase) -> PreparedCase:
        """The case with its inputs in a file; new cases use files as well."""
        self._shares_memory = False
        changed = replace(prepared, data=replace(prepared.data, shares_memory=False))
        self._call_first(ReferenceRequest(changed.data, prepared.expected), prepared)
        with self._lock:
            self._prepared = {key: changed if case is prepared else case for key, case in self._prepared.items()}
        return changed

    def share_memory_again(self) -> None:
        """Let new cases use GPU memory again, because it was not the reason of a failure."""
        self._shares_memory = self.has_gpu

    @contextlib.contextmanager
    def sharing_workload(self, first: PreparedCase) -> Iterator[str]:
        """The path under which another process finds the workload's inputs meanwhile; empty if creating them is as fast."""
        first.done.result()
        if not self._shares_memory or self.capture.bytes < SHARED_BYTES:
            yield ""
            return
        path = str(self._inputs / "workload.pt")
        self._call_first(ShareInputsRequest(first.data, path), first)
        try:
            yield path
        finally:
            self._call_first(UnshareInputsRequest(path), first)

    def path_for_results(self) -> Path:
        """A path for a candidate's results, which candidates cannot access."""
        with self._lock:
            self._results += 1
            return self._secret / f"results-{self._results}.pt"

    def judge(
        self,
        prepared: PreparedCase,
        results: Path,
        *,
        is_exact: bool,
        differing: tuple[int, ...],
        finds_trivial: bool,
    ) -> JudgeAnswer:
        """Compare a candidate's results with the expected ones.

        Args:
            results: the candidate's results; the file is removed afterwards.
            is_exact: whether the reference computes whole numbers without rounding.
            differing: numbers of the results that differ between the candidate's calls.
            finds_trivial: whether to find the trivial answers that would pass.

        Raises:
            TensorSharingFailed: the results cannot be read.
        """
        request = JudgeRequest(
            prepared.data,
            expected=prepared.expected,
            results=str(results),
            precision=self.precision,
            is_exact=is_exact,
            differing=differing,
            finds_trivial=finds_trivial,
        )
        with self._lock:
            self._deferred.pop(prepared.expected, None)
        try:
            answer = self._call_first(request, prepared)
        finally:
            results.unlink(missing_ok=True)
        self._note_oracle(prepared.expected, has_oracle=answer.has_oracle or not prepared.case.has_oracle)
        if not answer.is_identical:
            self.compute_oracles()
        return answer

    def use_script(self, trial: Trial, case: Case) -> PreparedUse:
        """The steps of the use script on a case; computed once for all candidates.

        Raises:
            MtmcError: the reference cannot be used on this case.
        """
        key = (trial.init, repr(case))
        with self._lock:
            if key not in self._uses:
                number = len(self._uses)
                data = replace(self._request(trial, case, f"uses-{number}.pt", is_first=False), shares_memory=False)
                expected = str(self._secret / f"expected-uses-{number}.pt")
                script = self._call_first(UseReferenceRequest(data, expected))
                self._uses[key] = PreparedUse(data, expected, script)
            return self._uses[key]

    def judge_use(self, prepared: PreparedUse, results: Path) -> tuple[Check, ...]:
        """Compare a candidate's results of all steps with the reference's; the file is removed afterwards.

        Raises:
            MtmcError: the results cannot be read.
        """
        request = JudgeUseRequest(prepared.script.uses, prepared.expected, str(results), self.precision)
        try:
            return self._call_first(request).checks
        finally:
            results.unlink(missing_ok=True)

    def reproduce(
        self, prepared: PreparedCase, candidate: CandidateSource, path: Path, *, reason: str, calls: int
    ) -> str:
        """Write a case as a file that runs with torch and Triton alone; returns its path."""
        prepared.done.result()
        return self._call_first(
            ReproduceRequest(prepared.data, candidate, str(path), reason=reason, calls=calls, precision=self.precision),
            prepared,
        ).path

    def close(self) -> None:
        """End the process and remove its files."""
        self._ahead.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers if self._owns_worker else ():
            worker.kill()
            worker.close()
        for folder in (self._secret, self._inputs):
            shutil.rmtree(folder, ignore_errors=True)


def is_host_bound(capture: Capture) -> bool:
    """Whether the launches of a long loop or of a network take most of a call's time, on tensors that are not large.

    Processes that compare with TF32 products do not count: the one that ran the workload knows whether these ran in TF32.
    """
    is_small = capture.bytes < SHARED_BYTES and not capture.graph.runs_tf32
    return is_small and (has_slow_loop(capture.graph) or is_network(capture.graph))


def _process_failed(done: Future[ReferenceAnswer]) -> bool:
    """Whether the process failed, not the user's code: nothing can be verified without the first case, so it is tried again."""
    return done.done() and not done.cancelled() and isinstance(done.exception(), WorkerFailed)
