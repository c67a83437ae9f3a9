"""Measures the user's GPU once, so that plans use its own numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.interpreter import checked_python, find_python
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.device.calibration_cache import remember_device
from mtmc_lsp.device.choice import calibrated_model, model_of_gpu
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
        with alone(worker.call(StartRequest(gpu=True), SECONDS).gpu):
            measured = worker.call(CalibrationRequest(), SECONDS)
    device = calibrated_model(environment, measured)
    data = model_of_gpu(environment.gpu, environment.capability)
    return CalibratedDevice(environment, data, device, remember_device(environment, device))
