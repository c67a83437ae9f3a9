"""Measures the user's GPU once, so that plans use its own numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.interpreter import checked_python, find_python, query_gpus, versions
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.device.calibration import Calibration
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import calibrated_model, model_of_gpu
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.gpu_lock import alone
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.timing.messages import CalibrationRequest, EnvironmentRequest

SECONDS = 120.0
"""Most for each request; torch's import is most of the first."""


@dataclass(frozen=True)
class CalibratedDevice:
    """The measured numbers of a GPU, with those of its data file."""

    environment: Environment
    data: DeviceModel
    measured: DeviceModel
    is_stored: bool
    """Whether later plans on this machine use it; False where the cache cannot be written."""


def calibrate(python: str = "", cwd: Path | None = None) -> CalibratedDevice:
    """Measure this machine's GPU and store the result for its driver and torch version.

    Args:
        python: the user's interpreter; else that of the project at ``cwd``.
        cwd: the current folder.

    Raises:
        EnvironmentNotAble: there is no GPU that torch can use, or no interpreter with torch.
        WorkerFailed: the measurement broke off.
    """
    folder = cwd or Path.cwd()
    here = folder / "x.py"
    interpreter = checked_python(python or find_python(here, read_settings(folder)))
    with Worker(interpreter, cwd=str(folder)) as worker:
        environment = worker.call(EnvironmentRequest(), SECONDS)
        if not environment.gpu:
            raise EnvironmentNotAble(
                "there is no GPU to calibrate",
                remedy="Run `mtmc calibrate` on a machine with a CUDA GPU; `mtmc doctor` says what torch sees. "
                "Without a GPU, plans use the data file of the architecture in --arch.",
            )
        measured = _measured(worker)
    device = calibrated_model(environment, measured)
    data = model_of_gpu(environment.gpu, environment.capability)
    return CalibratedDevice(environment, data, device, remember_device(environment, device))


def calibrate_first(python: str, devices: Sequence[str], fork_server: ForkServer | None = None) -> list[str]:
    """Measure new GPUs, so that no run's budget pays for it. Errors are ignored here; the runs report them.

    Args:
        devices: values of ``CUDA_VISIBLE_DEVICES`` that select one GPU each.
        fork_server: starts the workers.

    Returns:
        The names of the GPUs that were measured.
    """
    names: list[str] = []
    with contextlib.suppress(MtmcError):
        gpus = set(query_gpus("name,driver_version")) if devices else set()
        if gpus and all(_is_known(gpu, versions(python).get("torch", "")) for gpu in gpus):
            return names
        # Equal GPUs share one calibration.
        for device in devices[:1] if len(gpus) == 1 else devices:
            env = {"CUDA_VISIBLE_DEVICES": device}
            with Worker(python, cwd=str(Path.cwd()), env=env, fork_server=fork_server) as worker:
                environment = worker.call(EnvironmentRequest(), SECONDS)
                if environment.gpu and cached_device(environment) is None:
                    remember_device(environment, calibrated_model(environment, _measured(worker)))
                    names.append(environment.gpu)
    return names


def _is_known(gpu: str, torch: str) -> bool:
    """Whether a GPU was measured. Its name and driver, as ``nvidia-smi`` prints them, tell that without a CUDA context."""
    name, _, driver = gpu.rpartition(", ")
    return cached_device(Environment("", torch, "", name, "", driver)) is not None


def _measured(worker: Worker) -> Calibration:
    """The measured numbers of a worker's GPU, while nothing else uses it."""
    gpu = worker.call(StartRequest(gpu=True), SECONDS).gpu
    with alone(gpu):
        return worker.call(CalibrationRequest(), SECONDS)
