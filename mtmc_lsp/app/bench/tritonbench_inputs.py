"""The inputs of TritonBench: calls by a file's test, and the largest call by its performance script."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import mtmc_lsp
from mtmc_lsp.app.kernels.opening import KernelTarget
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.capture.recorded_calls import RecordedCall, RecordedTarget, merge_records, recorded_workload
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.workload import Target, Workload, WorkloadSource, leaves_of
from mtmc_lsp.kernels.repairs.site import sites_of
from mtmc_lsp.process.fork_server import HIDDEN_GPU
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.triton.drivers import reaching_names, without_driver_calls

RECORD_SECONDS = 120.0
TOO_LONG = "its test takes too long"
NO_INDICES = ("bool", "int8", "uint8")
"""Types of quantised data and of masks, which index nothing."""
MOST_INDICES = 1
"""Integer tensors of a call whose values are generated. Several ones depend on one another, as starts and lengths do."""


def measured_target(
    opened: OpenTarget,
    driver: Target,
    script: Path,
    python: str,
    cache: Path | None = None,
    seconds: float = RECORD_SECONDS,
) -> KernelTarget | None:
    """A file whose test is observed, and the largest call of whose performance script is timed; None if that is not possible.

    Args:
        cache: a file that keeps the recorded calls for later runs.
        seconds: most seconds for recording them.
    """
    kernels = [site.kernel.name for site in sites_of(str(opened.path), opened.text)]
    launching = reaching_names(parse(opened.text), kernels)
    for item in merge_records([_largest_calls(opened, driver, script, python, cache, seconds)]):
        call = item.typical
        # A helper that computes the number of blocks launches nothing.
        if item.qualname in launching and call is not None and _can_be_generated(call):
            workload = _workload(opened, item, call)
            observed = Workload(driver, WorkloadSource.SCRIPT)
            return KernelTarget(opened, driver, workload, None, observed) if workload is not None else None
    return None


def _largest_calls(
    opened: OpenTarget, driver: Target, script: Path, python: str, cache: Path | None, seconds: float
) -> list[dict[str, Any]]:
    if cache is not None and cache.is_file():
        stored: list[dict[str, Any]] = json.loads(cache.read_text(encoding="utf-8"))
        return stored
    recorded = recorded_calls(
        "record_performance", opened.path, [driver.qualname], str(script), python, seconds=seconds
    )
    calls = [] if isinstance(recorded, str) else recorded
    if cache is not None and recorded != TOO_LONG:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(calls), encoding="utf-8")
    return calls


def _workload(opened: OpenTarget, item: RecordedTarget, call: RecordedCall) -> Workload | None:
    path = str(opened.path)
    try:
        target = find_target(opened.text, path, item.qualname)
    except RequestError:
        return None
    assumed = ("the inputs are the largest ones of its performance script",)
    return replace(recorded_workload(target, call, training=False), assumed=assumed)


def _can_be_generated(call: RecordedCall) -> bool:
    """Whether values that the shapes, dtypes and ranges allow are valid inputs."""
    tensors = [leaf.tensor for leaf in leaves_of(call.arguments) if leaf.tensor is not None]
    indices = [tensor for tensor in tensors if not is_float(tensor.dtype) and tensor.dtype not in NO_INDICES]
    return not call.unusable and len(indices) <= MOST_INDICES


def recorded_calls(
    command: str,
    file: Path,
    drivers: Collection[str],
    argument: str,
    python: str,
    variables: dict[str, str] | None = None,
    seconds: float = RECORD_SECONDS,
) -> list[dict[str, Any]] | str:
    """The calls that a command of the workers records on the CPU, or why it does not run.

    Args:
        command: a module of ``mtmc_lsp.kernels.worker``, which gets the file without the calls of its drivers.
    """
    package = str(Path(mtmc_lsp.__file__).parents[1])
    env = os.environ | {
        **(variables or {}),
        **HIDDEN_GPU,
        "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_bytes(without_driver_calls(file.read_bytes(), drivers))
        limit = min(seconds, RECORD_SECONDS)
        line = [python, "-m", f"mtmc_lsp.kernels.worker.{command}", str(copy), argument]
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=limit, check=False, env=env)
        except subprocess.TimeoutExpired:
            return TOO_LONG
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["its test fails"])[-1]
    calls: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return calls
