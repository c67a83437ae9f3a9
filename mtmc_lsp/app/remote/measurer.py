"""Compiles, verifies and times versions on the workers of a cluster, several at the same time.

Everything that is compared with each other is timed by one request, so on one GPU: a version, the version before and the
baselines; the configurations of a kernel and the version that they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError
from typing import TypeVar

from mtmc_lsp.app.remote.messages import (
    CompileRequest,
    DeviceRequest,
    IsolationRequest,
    KernelTimesRequest,
    OffsetsRequest,
    RankRequest,
    RecompilationsRequest,
    TimeAllRequest,
    TimeRequest,
    Tried,
    TryRequest,
    UntimedRequest,
    VerifyRequest,
)
from mtmc_lsp.app.remote.target import Pending, RemoteTarget
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed, error_from_json
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import BaselineTime, Check, CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.sandbox import Isolation

T = TypeVar("T")
POLL_SECONDS = 0.2
"""Between two questions whether a verification is still wanted."""


class RemoteMeasurer:
    """A :class:`~mtmc_lsp.core.protocols.Measurer` whose stages run in services on workers."""

    def __init__(
        self, target: RemoteTarget, captures: Sequence[Capture], index: int, deadline: float | None = None
    ) -> None:
        """Prepare.

        Args:
            captures: the graphs of the target.
            index: the one whose versions are measured.
            deadline: time of the monotonic clock after which nothing continues.
        """
        self._target, self._index, self._deadline = target, index, deadline
        capture = captures[index]
        self.has_gpu = bool(capture.environment.gpu) and capture.workload.device == "cuda"
        self._device: DeviceModel | None = None
        self._ahead: dict[tuple[str, str], Pending] = {}
        """Trials by the sources of the version and the version before."""
        self._medians: dict[str, float | None] = {}
        """Microseconds of configurations by their source."""

    # A measurer --------------------------------------------------------------------------------------------------

    def isolation(self) -> Isolation:
        """The level of the candidates' sandbox on a worker.

        Raises:
            EnvironmentNotAble: it is incomplete and a complete one is required.
        """
        return self._call(IsolationRequest(self._index))

    def device(self) -> DeviceModel:
        """The calibrated GPU of a worker, or without a GPU the model of a data file."""
        if self._device is None:
            self._device = self._call(DeviceRequest(self._index))
        return self._device

    @property
    def verifies_beside(self) -> bool:
        """Whether a version is verified on another worker while further ones are timed."""
        return self.has_gpu and self._target.count > 1

    def compile(self, candidate: Candidate) -> CompileReport:
        """Compile each kernel for each configured architecture."""
        report = self._stage(lambda tried: tried.report, candidate)
        return report or self._call(CompileRequest(self._index, candidate))

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        """Verify that the candidate computes the same results as the user's code.

        Raises:
            WorkerFailed: of kind ``CANCELLED`` if the verification is no longer wanted; its worker still ends it.
        """
        ahead = self._stage(lambda tried: tried.verdict, candidate, verifies=True)
        if ahead is not None:
            return ahead
        pending = self._target.submit(VerifyRequest(self._index, candidate), self._deadline)
        while not _is_done(pending):
            if not is_wanted():
                raise WorkerFailed("the verification was abandoned", kind=FailureKind.CANCELLED)
        verdict: Verdict = self._target.result(pending, self._deadline)
        return verdict

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        """Time a candidate for a short time, against the version before; ``None`` without a GPU. Errors as on one machine."""
        if not self.has_gpu:
            return None
        timing = self._stage(lambda tried: tried.timing, candidate, previous)
        return timing or self._call(TimeRequest(self._index, candidate, previous)).timing

    def time_with_baselines(
        self, candidate: Candidate, previous: Candidate | None, wait: float | None
    ) -> Timing | None:
        """Time a candidate against its baselines and the version before on one worker; ``None`` without a GPU."""
        if not self.has_gpu:
            return None
        return self._call(TimeAllRequest(self._index, candidate, previous, wait)).timing

    def untimed_baselines(self) -> tuple[BaselineTime, ...]:
        """The baselines that could have been timed, with the reasons why they were not."""
        return self._call(UntimedRequest(self._index)).baselines if self.has_gpu else ()

    def recompilations(self) -> tuple[int, float]:
        """How often ``torch.compile`` compiles again for the other sizes that are verified, and the seconds that takes."""
        answer = self._call(RecompilationsRequest(self._index))
        return answer.count, answer.seconds

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of one call, the slowest first; none without a GPU."""
        return self._call(KernelTimesRequest(self._index, candidate)).times if self.has_gpu else ()

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        """Verify an accepted version on tensors with more elements than 32-bit offsets can address."""
        return self._call(OffsetsRequest(self._index, candidate))

    def close(self) -> None:
        """Cancel trials that are not needed any more."""
        for pending in list(self._ahead.values()):
            pending.future.cancel()
        self._ahead.clear()

    # Several at the same time ------------------------------------------------------------------------------------

    def compile_variants(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        """Compile and time configurations. Each worker gets a share of them; :meth:`quick` returns the times.

        Args:
            candidates: the first is the version that the others change. Each worker times it too, so times of several GPUs
                are compared by their ratio to it.
        """
        base, *others = candidates
        count = max(1, min(self._target.count, len(others)))
        shares = [[base, *others[first::count]] for first in range(count)]
        requests = [self._target.submit(RankRequest(self._index, tuple(share)), self._deadline) for share in shares]
        reports: dict[str, CompileReport] = {}
        reference: float | None = None
        for share, pending in zip(shares, requests, strict=True):
            try:
                ranked = self._target.result(pending, self._deadline)
            except WorkerFailed as error:
                if error.kind is FailureKind.DEADLINE:
                    raise
                continue
            reports |= {version.source: report for version, report in zip(share, ranked.reports, strict=True)}
            first = ranked.medians[0]
            reference = reference or first
            # Without a time of the version before, there is nothing to compare the times of two GPUs with.
            factor = reference / first if reference and first else None
            for version, median in zip(share, ranked.medians, strict=True):
                self._medians[version.source] = median * factor if median is not None and factor is not None else None
        return [reports.get(candidate.source, CompileReport()) for candidate in candidates]

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        """The median microseconds of configurations that :meth:`compile_variants` timed; None for a configuration that failed.

        Times are those of the first worker's GPU: a time on another one is scaled by the time of the version before on both.
        """
        return [self._medians.get(candidate.source) for candidate in candidates]

    @property
    def spare(self) -> int:
        """How many further trials can begin now; with a GPU, one worker is left for verifications."""
        # Verifications use the trials in another thread.
        running = sum(not pending.future.done() for pending in list(self._ahead.values()))
        return max(0, self._target.count - self.has_gpu - running)

    def try_ahead(self, candidate: Candidate, previous: Candidate, *, verifies: bool) -> None:
        """Begin to try a version that may be the next one.

        Args:
            previous: the version that it changes.
            verifies: whether it is verified before it is timed.
        """
        key = (candidate.source, previous.source)
        if key not in self._ahead:
            request = TryRequest(self._index, candidate, previous, verifies=verifies, times=self.has_gpu)
            self._ahead[key] = self._target.submit(request, self._deadline)

    def _stage(
        self,
        result_of: Callable[[Tried], T | None],
        candidate: Candidate,
        previous: Candidate | None = None,
        *,
        verifies: bool = False,
    ) -> T | None:
        """The result of a stage of a trial that began ahead; None if there is none.

        Args:
            previous, verifies: those of :meth:`_tried`.

        Raises:
            MtmcError: a stage up to this one failed.
        """
        tried = self._tried(candidate, previous, verifies=verifies)
        result = result_of(tried) if tried is not None else None
        if result is None and tried is not None and tried.error is not None:
            raise error_from_json(tried.error)
        return result

    def _tried(
        self, candidate: Candidate, previous: Candidate | None = None, *, verifies: bool = False
    ) -> Tried | None:
        """The result of a trial that began ahead; None if there is none.

        Args:
            previous: the version before, if the result depends on it.
            verifies: whether only a trial with a verification counts.
        """
        for (source, before), pending in list(self._ahead.items()):
            request: TryRequest = pending.request  # type: ignore[assignment]
            fits = previous is None or before == previous.source
            if source == candidate.source and fits and (request.verifies or not verifies):
                try:
                    tried: Tried = self._target.result(pending, self._deadline)
                except MtmcError as error:
                    if error.kind is FailureKind.DEADLINE:
                        raise
                    # It is tried again, by itself.
                    self._ahead.pop((source, before), None)
                    return None
                return tried
        return None

    def _call(self, request: Request[Answer]) -> Answer:
        return self._target.call(request, self._deadline)


def _is_done(pending: Pending) -> bool:
    """Whether a request ended within a short time."""
    try:
        pending.future.exception(POLL_SECONDS)
    except TimeoutError:
        return False
    return True
