"""Verifies and times a foreign candidate: ``mtmc verify``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import GpuInUse, MeasurementRejected, MtmcError
from mtmc_lsp.core.results import Timing, Verdict, VerdictStatus
from mtmc_lsp.measure.timer import Timer
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.timing.timekeeper import TIME_SECONDS
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.messages import CandidateSource
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.sanitizer import Sanitizer


@dataclass(frozen=True)
class ForeignVerdict:
    """The verdict on a foreign candidate, with its timing."""

    verdict: Verdict
    reproduction: str = ""
    """Path of the file that reproduces a failure."""
    timing: Timing | None = None
    untimed: str = ""
    """Why there is no timing."""

    @property
    def speed(self) -> str:
        """``FASTER``, ``SAME``, ``SLOWER``, ``AMBIGUOUS`` or ``unmeasured``."""
        speed = self.timing.speed_over("best") if self.timing is not None else None
        return speed.value if speed is not None else "unmeasured"


def verify_foreign(
    candidate: ForeignCandidate,
    reference: Reference,
    *,
    needs_sandbox: bool = False,
    process: CandidateProcess | None = None,
    reproduction: Path | None = None,
    on_case: Callable[[Case], None] = lambda _: None,
    far: bool = False,
    sanitizer: Sanitizer | None = None,
) -> tuple[ForeignVerdict, CandidateSource]:
    """Verify a candidate without timing it; returns also how it was loaded.

    Args:
        reference: of the candidate's capture; several candidates may use it.
        needs_sandbox: whether to refuse candidates without a complete sandbox.
        process: the candidate's process, if it needs other limits; the caller closes it.
        reproduction: where to write the smallest failing case.
        on_case: called with each case before it runs.
        far: whether a correct candidate also runs where element offsets exceed 2^31.
        sanitizer: runs a correct candidate under ``compute-sanitizer``.
    """
    with contextlib.ExitStack() as stack:
        if process is None:
            process = CandidateProcess(
                reference.python,
                str(project_root(Path(candidate.target.path))),
                candidate.capture.environment,
                has_gpu=reference.has_gpu,
                hidden=reference.hidden,
                fork_server=reference.fork_server,
                needs_sandbox=needs_sandbox,
            )
            stack.callback(process.close)
        engine = VerificationEngine(reference, process)
        result = engine.verify(candidate, reproduction=reproduction, on_case=on_case, far=far, sanitizer=sanitizer)
        return ForeignVerdict(result.verdict, result.reproduction), candidate.source(engine.trial)


def with_timing(
    result: ForeignVerdict,
    candidate: CandidateSource,
    reference: Reference,
    *,
    baselines: tuple[str, ...],
    fresh: bool,
) -> ForeignVerdict:
    """The verdict with a timing, if there is a GPU and the candidate is correct.

    Args:
        baselines: what to time besides the reference in eager mode.
        fresh: whether to ignore cached timings.
    """
    capture = reference.capture
    if not result.verdict.is_correct:
        return replace(result, untimed="only correct candidates are timed")
    if not capture.environment.gpu:
        return replace(result, untimed="no CUDA GPU")
    if capture.workload.device != "cuda":
        return replace(result, untimed="the workload's device is the CPU")
    root = str(project_root(Path(capture.workload.target.path)))
    with contextlib.closing(WorkerPool(has_gpu=True)) as pool:
        process = pool.add(CandidateProcess(reference.python, root, capture.environment, has_gpu=True))
        timer = Timer(
            capture, reference.user_source, pool, process, baselines=baselines, fresh=fresh, seconds=TIME_SECONDS
        )
        try:
            process.start()
            pool.set_gpu(process.gpu)
            return replace(result, timing=timer.time(candidate))
        except GpuInUse as error:
            return replace(result, untimed=error.message)
        except MeasurementRejected as error:
            # A candidate that deceives the timing may deceive the verification as well.
            reason = f"its timing cannot be true: {error.message}"
            verdict = replace(result.verdict, status=VerdictStatus.UNCERTIFIABLE, reason=reason)
            return replace(result, verdict=verdict, untimed=error.message)
        except MtmcError as error:
            return replace(result, untimed=f"it could not be timed: {error.message}")
