"""The reference's side of a pair: its process, and what it gave for each case, kept for every candidate judged against it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.workload import Capture, WorkloadSource
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.gpu_lock import shared
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.verify.candidate_process import RUN_SECONDS
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.pair_sizes import Trial

NO_ARGUMENTS = "[[], {}]"


@dataclass(frozen=True)
class Prepared:
    """A case whose reference is computed, or will be."""

    case: Case
    request: dict[str, object]
    """What the candidate's process is told of the case, but for the candidate."""
    expected: str
    """The file with the reference's and the oracle's results."""
    done: Future[Any]


class Reference:
    """What is right: made once, however many candidates are judged against it, one after the other or at a time."""

    def __init__(
        self,
        capture: Capture,
        own: str,
        python: str,
        *,
        seed: int | None = None,
        precision: str = "budget",
        run_seconds: float = RUN_SECONDS,
        worker: Worker | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Prepare the process; it starts when first used.

        Args:
            capture: of the reference.
            own: its file's text.
            python: the user's interpreter.
            seed: of the inputs; by default one that no candidate can know.
            precision: ``budget`` or ``strict``, as in the settings.
            run_seconds: limit for one case.
            worker: the caller's, where several references share one; it is left running.
            template: what the process becomes a copy of, where there is one.
        """
        self.capture, self.own, self.python, self.fork_server = capture, own, python, fork_server
        self.run_seconds = run_seconds
        self.seed = secrets.randbelow(2**31) if seed is None else seed
        self.has_gpu = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        self.gpu = ""
        """The GPU's UUID, once a candidate's process found it; what runs there shares it with nothing that is timed."""
        self._precision = precision
        self._secret = Path(tempfile.mkdtemp(prefix="mtmc-expected-"))
        self._inputs = Path(tempfile.mkdtemp(prefix="mtmc-inputs-"))
        root = str(project_root(Path(capture.workload.target.path)))
        variables = {} if self.has_gpu else {"TRITON_INTERPRET": "1"}
        self._is_own = worker is None
        self._worker = worker or Worker(python, cwd=root, env=variables, fork_server=fork_server)
        # The next case is computed while a candidate runs.
        self._ahead = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._prepared: dict[tuple[str, str], Prepared] = {}
        self._results = 0
        self._init = ""

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hidden(self) -> str:
        """The folder of the expected results, which candidates may not even read."""
        return str(self._secret)

    def constructor(self) -> str:
        """The constructor's arguments as text of Python literals; starts the process."""
        with self._lock:
            if not self._init:
                self._init = NO_ARGUMENTS
                if self.capture.workload.source is WorkloadSource.GET_INPUTS:
                    request = {"capture": to_json(self.capture), "own": self.own, "widened": not self.has_gpu}
                    self._init = str(self._call("measure.constructor", request)["init"])
        return self._init

    def prepared(self, trial: Trial, case: Case) -> Prepared:
        """Have the reference computed on a case, unless it is."""
        key = (f"{trial.init} {trial.is_full}", repr(case))
        with self._lock:
            if key not in self._prepared:
                number = len(self._prepared)
                request: dict[str, object] = {
                    "capture": to_json(trial.capture),
                    "own": self.own,
                    "widened": not self.has_gpu,
                    "init": trial.init,
                    "precision": self._precision,
                    "case": {**to_json(case), "label": case.label},
                    "inputs": str(self._inputs / f"inputs-{number}.pt"),
                }
                expected = str(self._secret / f"expected-{number}.pt")
                done = self._ahead.submit(self._computed, {**request, "expected": expected})
                self._prepared[key] = Prepared(case, request, expected, done)
            return self._prepared[key]

    def _computed(self, request: Mapping[str, object]) -> dict[str, Any]:
        try:
            return self._call("measure.reference", request)
        except MtmcError as error:
            if error.kind.is_gpu_failure:
                # A failed kernel leaves the process's GPU context unusable.
                self._worker.close()
            raise

    def place_for_results(self) -> Path:
        """Where to put a candidate's results to be judged: it cannot write there, nor read."""
        with self._lock:
            self._results += 1
            return self._secret / f"results-{self._results}.pt"

    def judged(
        self, prepared: Prepared, results: Path, *, exact: bool, other: str, differing: list[int]
    ) -> dict[str, Any]:
        """The checks of a case's results.

        Args:
            prepared: the case.
            results: what the candidate gave; removed afterwards.
            exact: whether the reference keeps whole numbers exactly.
            other: the file of what is expected of another case of the same sizes, or empty.
            differing: numbers of results that differed between the candidate's calls.
        """
        files = {"expected": prepared.expected, "results": str(results), "other": other}
        asked = {**prepared.request, **files, "exact": exact, "differing": differing}
        try:
            return self._call("measure.judge", asked)
        finally:
            results.unlink(missing_ok=True)

    def reproduced(self, prepared: Prepared, request: Mapping[str, object]) -> str:
        """Write a case as a file that runs by itself; gives its path."""
        return str(self._call("measure.reproduce", {**prepared.request, **request})["path"])

    def _call(self, command: str, request: Mapping[str, object]) -> dict[str, Any]:
        with on_gpu(self.gpu):
            return self._worker.call_untyped(command, request, self.run_seconds)

    def close(self) -> None:
        """End the process and remove its files."""
        self._ahead.shutdown(wait=False, cancel_futures=True)
        if self._is_own:
            self._worker.kill()
            self._worker.close()
        for folder in (self._secret, self._inputs):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def on_gpu(gpu: str) -> Iterator[None]:
    """Use a GPU beside others, while nothing is timed; without one there is nothing to wait for."""
    with shared(gpu) if gpu else contextlib.nullcontext():
        yield
