"""Times any candidate against any reference, by the timer that ``optimize`` uses."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import GpuInUse, MeasurementRejected, MtmcError
from mtmc_lsp.core.results import Timing, Verdict, VerdictStatus
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model
from mtmc_lsp.process.cache_files import cache_folder
from mtmc_lsp.process.gpu_lock import alone
from mtmc_lsp.timing.bounds import bound_us, least_us
from mtmc_lsp.timing.messages import CalibrationRequest, SeparateCandidate, TimeAnswer, TimeRequest
from mtmc_lsp.timing.timekeeper import TIME_SECONDS, Timekeeper, TimingCache
from mtmc_lsp.verify.candidate_process import RUN_SECONDS, CandidateProcess
from mtmc_lsp.verify.pair import Pair, PairVerdict


def with_timing(
    found: PairVerdict, pair: Pair, init: str, python: str, *, baselines: tuple[str, ...], fresh: bool
) -> PairVerdict:
    """The verdict with times, where there is a GPU and the candidate is correct.

    Args:
        found: the verdict without times.
        pair: what was compared.
        init: the reference's constructor arguments, as text of Python literals.
        python: the user's interpreter.
        baselines: what is timed beside the reference in eager mode.
        fresh: whether what was timed before is timed again.
    """
    if not found.verdict.is_correct:
        return replace(found, untimed="only what is correct is timed")
    if not pair.capture.environment.gpu:
        return replace(found, untimed="no CUDA GPU")
    if pair.capture.workload.device != "cuda":
        return replace(found, untimed="the workload's device is the CPU")
    try:
        return replace(found, timing=time_pair(pair, init, python, baselines=baselines, fresh=fresh))
    except GpuInUse as error:
        return replace(found, untimed=error.message)
    except MeasurementRejected as error:
        # Right results that come from where they are not timed are no kernel to rely on.
        reason = f"its timing cannot be true: {error.message}"
        return replace(found, verdict=_uncertifiable(found.verdict, reason), untimed=error.message)
    except MtmcError as error:
        return replace(found, untimed=f"it could not be timed: {error.message}")


def _uncertifiable(verdict: Verdict, reason: str) -> Verdict:
    return replace(verdict, status=VerdictStatus.UNCERTIFIABLE, reason=reason)


def time_pair(pair: Pair, init: str, python: str, *, baselines: tuple[str, ...], fresh: bool) -> Timing:
    """Time the candidate against the reference in eager mode and under ``torch.compile``, in one process that is locked in.

    Raises:
        MeasurementRejected: the timing cannot be true.
        MtmcError: the process failed.
    """
    capture = pair.capture
    root = project_root(Path(capture.workload.target.path))
    with contextlib.closing(CandidateProcess(python, str(root), capture.environment, has_gpu=True)) as worker:
        worker.start()
        gpu = worker.gpu
        device = _device(pair, worker, gpu)
        request = TimeRequest(
            capture,
            own=pair.own,
            source=pair.source,
            baselines=baselines,
            bound_us=bound_us(capture, device),
            least_us=least_us(capture, device),
            separate=SeparateCandidate(pair.target, init),
        )

        def ask(asked: TimeRequest) -> TimeAnswer:
            return worker.call(asked, TIME_SECONDS)

        return Timekeeper(ask, gpu, cache=TimingCache(cache_folder(), fresh)).time(request)


def _device(pair: Pair, worker: CandidateProcess, gpu: str) -> DeviceModel:
    environment = pair.capture.environment
    device = cached_device(environment)
    if device is None:
        with alone(gpu):
            device = calibrated_model(environment, worker.call(CalibrationRequest(), RUN_SECONDS))
        remember_device(environment, device)
    return device
