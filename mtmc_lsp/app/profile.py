"""``mtmc profile``: measured times of a target's operators and kernels, with the work that the graph requires of them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.graph import Node
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.profile import KernelTime, OperatorTime, Profile
from mtmc_lsp.core.results import Work
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.process.fork_server import ENTRY
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.timing.bounds import bound_us
from mtmc_lsp.timing.messages import KernelRow, ProfileAnswer, ProfileRequest
from mtmc_lsp.tuning.torch_cost import torch_cost
from mtmc_lsp.verify.sizes.interpreter_limits import product_work

CALL_SECONDS = 3.0
"""Approximate duration of the measurement."""
WORKER_SECONDS = 180.0
CPU_WORK = 2e10
"""Operations of one call above which sizes are reduced if there is no GPU."""
CPU_ELEMENTS = 1 << 26
"""Elements of all values of the graph above which sizes are reduced if there is no GPU."""
CALLED_AS = {"_to_copy": "to", "_unsafe_view": "reshape"}
"""Graph operations that the profiler reports by another name."""
NCU_METRICS = {
    "dram__bytes.sum": "bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of_memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "of_compute",
}


def profile_calls(target: OpenTarget, capture: Capture, device: DeviceModel, *, ncu: str = "") -> Profile:
    """Measure the time of each operator and kernel of a call with torch's profiler.

    Args:
        target: the file and the target; the file runs as it is, with generated code if there is any.
        device: the limits that the times are compared with.
        ncu: path of Nsight Compute, to measure each kernel's memory traffic too; empty for torch's profiler alone.

    Raises:
        EnvironmentNotAble: Nsight Compute cannot read performance counters.
    """
    sizes, notes = _sizes(capture)
    request = ProfileRequest(capture, target.whole.decode(), sizes, CALL_SECONDS)
    with Worker(target.python, cwd=str(target.project)) as worker:
        answer = worker.call(request, WORKER_SECONDS)
    on_gpu = answer.device == "cuda"
    if not on_gpu:
        notes.append("no GPU: operators are sorted by CPU time; their shares differ on a GPU")
    measured = _by_ncu(ncu, target, request) if ncu else {}
    return Profile(
        device=answer.device,
        calls=answer.calls,
        wall_us=answer.wall_us,
        gpu_us=answer.gpu_us,
        gap_us=answer.gap_us,
        launches=sum(kernel.calls for kernel in answer.kernels),
        operators=_operators(answer, capture, device),
        kernels=_kernels(answer.kernels, measured),
        work=Work(capture.bytes, max(capture.flops, 2 * product_work(capture.graph, capture.graph.sizes))),
        bound_us=bound_us(capture, device) if on_gpu else None,
        sizes=sizes,
        notes=tuple(notes),
    )


def _sizes(capture: Capture) -> tuple[dict[str, int], list[str]]:
    """The workload's sizes; without a GPU, variable sizes are halved, largest first, until the target is fast on a CPU."""
    sizes = dict(capture.graph.sizes)
    if capture.environment.gpu and capture.workload.device == "cuda":
        return sizes, []

    def is_too_large() -> bool:
        kinds = [kind for node in capture.graph.nodes for kind in node.outputs]
        elements = sum(kind.numel.value(sizes) for kind in kinds)
        return elements > CPU_ELEMENTS or 2 * product_work(capture.graph, sizes) > CPU_WORK

    while is_too_large():
        largest = max(capture.variable_sizes, key=lambda name: sizes[name], default=None)
        if largest is None or sizes[largest] <= 4:
            break
        sizes[largest] //= 2
    if sizes == capture.graph.sizes:
        return sizes, []
    shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return sizes, [f"sizes reduced to {shown} for the CPU; bytes and operations are those of the workload's sizes"]


def _operators(answer: ProfileAnswer, capture: Capture, device: DeviceModel) -> tuple[OperatorTime, ...]:
    """Operators that take time; also the kernels, if no operator launched any."""
    nodes: dict[str, list[Node]] = {}
    for node in capture.graph.nodes:
        space, _, rest = node.op.partition(".")
        name = rest.partition(".")[0]
        nodes.setdefault(f"{space}::{CALLED_AS.get(name, name)}", []).append(node)
    on_gpu = answer.device == "cuda"
    result = []
    for row in answer.operators:
        matching = nodes.get(row.name, [])
        work, least = _work(capture, matching, device) if matching else (None, 0.0)
        part = min(1.0, least / row.gpu_us) if on_gpu and matching and row.gpu_us else None
        lines = tuple(sorted({node.line for node in matching} - {0}))
        times = (row.calls, row.cpu_us, row.gpu_us)
        result.append(OperatorTime(row.name, lines, *times, work, part))
    launched = sum(row.gpu_us for row in answer.operators)
    kernels = [kernel for kernel in answer.kernels if kernel.us > 0] if launched == 0 else []
    result += [OperatorTime(kernel.name, (), kernel.calls, 0.0, kernel.us) for kernel in kernels]
    key = (lambda row: (-row.gpu_us, -row.cpu_us)) if on_gpu else (lambda row: -row.cpu_us)
    return tuple(sorted((row for row in result if row.gpu_us or row.cpu_us), key=key))


def _work(capture: Capture, nodes: Sequence[Node], device: DeviceModel) -> tuple[Work, float]:
    """The work of the operators, and the least time that it takes."""
    ir = lower(capture.graph)
    costs = [torch_cost(ir, node, device) for node in nodes]
    moved, flops = sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)
    rate = device.flops.get("tf32" if capture.graph.fp32_matmul == "tf32" else "fp32", 0.0)
    if nodes[0].outputs and nodes[0].outputs[0].dtype in ("float16", "bfloat16"):
        rate = device.flops.get("bf16", rate)
    least = max(moved / device.bandwidth, flops / rate if rate else 0.0) * 1e6
    return Work(moved, flops), least


def _kernels(answer: Sequence[KernelRow], measured: Mapping[str, Mapping[str, float]]) -> tuple[KernelTime, ...]:
    rows = [KernelTime(k.name, k.calls, k.us, **measured.get(k.name, {})) for k in answer]
    return tuple(sorted(rows, key=lambda row: -row.us))


# Nsight Compute ---------------------------------------------------------------------------------------------------


def find_ncu() -> str:
    """The path of Nsight Compute.

    Raises:
        EnvironmentNotAble: it is not installed.
    """
    path = shutil.which("ncu")
    if path is None:
        raise EnvironmentNotAble("Nsight Compute is not installed", remedy="Install it, or leave out --ncu.")
    return path


def _by_ncu(ncu: str, target: OpenTarget, request: ProfileRequest) -> dict[str, dict[str, float]]:
    """The metrics of each kernel of one call, by Nsight Compute."""
    with tempfile.TemporaryDirectory(prefix="mtmc-ncu-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(to_json(request)), encoding="utf-8")
        command = [ncu, "--csv", "--print-units", "base", "--profile-from-start", "off"]
        command += ["--metrics", ",".join(NCU_METRICS), target.python, str(ENTRY), "--profile", str(path)]
        try:
            done = subprocess.run(command, cwd=target.project, capture_output=True, text=True, timeout=WORKER_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentNotAble(f"Nsight Compute does not work here: {error}", remedy="Leave out --ncu.") from None
    metrics = read_ncu(done.stdout)
    if not metrics:
        output = done.stdout + done.stderr
        reason = next((line for line in output.splitlines() if "ERR" in line), "it reported no kernels")
        remedy = "Allow performance counters (NVreg_RestrictProfilingToAdminUsers=0), or leave out --ncu."
        raise EnvironmentNotAble(f"Nsight Compute does not work here: {reason}", remedy=remedy)
    return metrics


def read_ncu(text: str) -> dict[str, dict[str, float]]:
    """The metrics in Nsight Compute's table, by kernel: the sum of the launches' bytes, the mean of their rates."""
    start = text.find('"ID",')
    values: dict[str, dict[str, list[float]]] = {}
    for row in csv.DictReader(io.StringIO(text[start:] if start >= 0 else "")):
        name = NCU_METRICS.get(row["Metric Name"])
        with contextlib.suppress(ValueError):
            if name is not None:
                number = float(row["Metric Value"].replace(",", ""))
                values.setdefault(row["Kernel Name"], {}).setdefault(name, []).append(number)
    return {
        kernel: {
            name: sum(numbers) if name == "bytes" else sum(numbers) / len(numbers) / 100
            for name, numbers in metrics.items()
        }
        for kernel, metrics in values.items()
    }
