"""``mtmc profile``: what a worker saw of a target's calls, beside what the graph says they must do."""

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
from mtmc_lsp.tuning.cost import torch_cost
from mtmc_lsp.verify.cases import product_work

SECONDS = 3.0
"""How long calls are made, about."""
WORKER_SECONDS = 180.0
CPU_WORK = 2e10
"""Operations of one call above which sizes are reduced where there is no GPU."""
CPU_ELEMENTS = 1 << 26
CALLED_AS = {"_to_copy": "to", "_unsafe_view": "reshape"}
"""Operations of a graph that code calls by another name."""
NCU_METRICS = {
    "dram__bytes.sum": "bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "of_memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "of_compute",
}


def profile_calls(target: OpenTarget, capture: Capture, device: DeviceModel, *, ncu: str = "") -> Profile:
    """Where the time of a call goes, by torch's profiler.

    Args:
        target: the file and the target; it runs as the file is, with generated code if there is any.
        device: the limits that the times are compared with.
        ncu: path of Nsight Compute, which then counts each kernel's bytes too; empty for torch's profiler alone.

    Raises:
        EnvironmentNotAble: Nsight Compute cannot count here.
    """
    sizes, notes = _sizes(capture)
    request = ProfileRequest(capture, target.text.decode(), sizes, SECONDS)
    with Worker(target.python, cwd=str(target.project)) as worker:
        seen = worker.call(request, WORKER_SECONDS)
    on_gpu = seen.device == "cuda"
    if not on_gpu:
        notes.append("no GPU: operators by the CPU's time on this machine; on a GPU the time goes elsewhere")
    measured = _by_ncu(ncu, target, request) if ncu else {}
    return Profile(
        device=seen.device,
        calls=seen.calls,
        wall_us=seen.wall_us,
        gpu_us=seen.gpu_us,
        gap_us=seen.gap_us,
        launches=sum(kernel.calls for kernel in seen.kernels),
        operators=_operators(seen, capture, device),
        kernels=_kernels(seen.kernels, measured),
        work=Work(capture.bytes, max(capture.flops, 2 * product_work(capture.graph, capture.graph.sizes))),
        bound_us=bound_us(capture, device) if on_gpu else None,
        sizes=sizes,
        notes=tuple(notes),
    )


def _sizes(capture: Capture) -> tuple[dict[str, int], list[str]]:
    """The workload's sizes; without a GPU the variable ones halved, the largest first, until a CPU can run it often."""
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
    return sizes, [f"sizes reduced to {shown} for the CPU; bytes and operations are those of the workload's own sizes"]


def _operators(seen: ProfileAnswer, capture: Capture, device: DeviceModel) -> tuple[OperatorTime, ...]:
    """Operators, and where these launched nothing, the kernels; what takes no time is left out."""
    nodes: dict[str, list[Node]] = {}
    for node in capture.graph.nodes:
        space, _, rest = node.op.partition(".")
        name = rest.partition(".")[0]
        nodes.setdefault(f"{space}::{CALLED_AS.get(name, name)}", []).append(node)
    on_gpu = seen.device == "cuda"
    result = []
    for row in seen.operators:
        own = nodes.get(row.name, [])
        work, least = _work(capture, own, device) if own else (None, 0.0)
        part = min(1.0, least / row.gpu_us) if on_gpu and own and row.gpu_us else None
        lines = tuple(sorted({node.line for node in own} - {0}))
        times = (row.calls, row.cpu_us, row.gpu_us)
        result.append(OperatorTime(row.name, lines, *times, work, part))
    launched = sum(row.gpu_us for row in seen.operators)
    loose = [kernel for kernel in seen.kernels if kernel.us > 0] if launched == 0 else []
    result += [OperatorTime(kernel.name, (), kernel.calls, 0.0, kernel.us) for kernel in loose]
    key = (lambda row: (-row.gpu_us, -row.cpu_us)) if on_gpu else (lambda row: -row.cpu_us)
    return tuple(sorted((row for row in result if row.gpu_us or row.cpu_us), key=key))


def _work(capture: Capture, nodes: Sequence[Node], device: DeviceModel) -> tuple[Work, float]:
    """What the operators must do, and the least time for it."""
    program = lower(capture.graph)
    costs = [torch_cost(program, node, device) for node in nodes]
    moved, flops = sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)
    rate = device.flops.get("tf32" if capture.graph.fp32_matmul == "tf32" else "fp32", 0.0)
    if nodes[0].outputs and nodes[0].outputs[0].dtype in ("float16", "bfloat16"):
        rate = device.flops.get("bf16", rate)
    least = max(moved / device.bandwidth, flops / rate if rate else 0.0) * 1e6
    return Work(moved, flops), least


def _kernels(seen: Sequence[KernelRow], measured: Mapping[str, Mapping[str, float]]) -> tuple[KernelTime, ...]:
    rows = [KernelTime(k.name, k.calls, k.us, **measured.get(k.name, {})) for k in seen]
    return tuple(sorted(rows, key=lambda row: -row.us))


# Nsight Compute ---------------------------------------------------------------------------------------------------


def find_ncu() -> str:
    """The program of Nsight Compute.

    Raises:
        EnvironmentNotAble: it is not installed.
    """
    found = shutil.which("ncu")
    if found is None:
        raise EnvironmentNotAble("Nsight Compute is not installed", remedy="Install it, or leave out --ncu.")
    return found


def _by_ncu(ncu: str, target: OpenTarget, request: ProfileRequest) -> dict[str, dict[str, float]]:
    """What Nsight Compute counted for each kernel of one call."""
    with tempfile.TemporaryDirectory(prefix="mtmc-ncu-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(to_json(request)), encoding="utf-8")
        command = [ncu, "--csv", "--print-units", "base", "--profile-from-start", "off"]
        command += ["--metrics", ",".join(NCU_METRICS), target.python, str(ENTRY), "--profile", str(path)]
        try:
            done = subprocess.run(command, cwd=target.project, capture_output=True, text=True, timeout=WORKER_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EnvironmentNotAble(f"Nsight Compute does not work here: {error}", remedy="Leave out --ncu.") from None
    found = read_ncu(done.stdout)
    if not found:
        said = next((line for line in (done.stdout + done.stderr).splitlines() if "ERR" in line), "it counted nothing")
        remedy = "Allow performance counters (NVreg_RestrictProfilingToAdminUsers=0), or leave out --ncu."
        raise EnvironmentNotAble(f"Nsight Compute does not work here: {said}", remedy=remedy)
    return found


def read_ncu(text: str) -> dict[str, dict[str, float]]:
    """Nsight Compute's table: bytes of a kernel's launches are added, parts of a rate are their mean."""
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
            for name, numbers in found.items()
        }
        for kernel, found in values.items()
    }
