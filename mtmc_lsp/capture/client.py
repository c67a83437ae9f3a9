"""Find a target's workload, and capture it in a worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtmc_lsp.capture.messages import CaptureRequest
from mtmc_lsp.capture.module_paths import package_of, project_root
from mtmc_lsp.capture.recorded_calls import recorded, recorded_workload
from mtmc_lsp.core.errors import Location, NoWorkload, TargetUnsupported
from mtmc_lsp.core.workload import Capture, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.assigned_names import assigned_names
from mtmc_lsp.source.dependencies import with_definitions
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.workload.directive import parse_directive, suggest_directive, workload_from_annotations


def find_workload(path: str, text: bytes, target: Target, records: Path | None = None) -> Workload:
    """The target's workload: from its directive, jaxtyping annotations, ``get_inputs``, or recorded calls, in this order.

    Raises:
        TargetUnsupported: the target is a kernel.
        NoWorkload: there is none; the remedy is the directive to add.
    """
    if target.kind is TargetKind.KERNEL:
        raise TargetUnsupported(
            f"{target.qualname} is a Triton kernel already, and kernels cannot be optimised yet",
            where=Location(path, target.start_line),
            remedy="Choose the function that calls it, or a PyTorch function.",
        )
    found = parse_directive(text, target, path) or workload_from_annotations(text, target, path)
    if found is None and any(item.qualname == "get_inputs" for item in find_targets(text, path)):
        found = Workload(target, WorkloadSource.GET_INPUTS)
    calls = recorded(target, records) if found is None and records is not None else None
    if calls is not None:
        found = recorded_workload(target, calls)
    if found is None:
        seen = f": its {calls.count} recorded calls cannot be repeated, as {calls.calls[0].unusable}" if calls else ""
        raise NoWorkload(
            f"no example inputs are known for {target.qualname}{seen}",
            where=Location(path, target.start_line),
            remedy=f"Add this line above it, with your own sizes:\n    {suggest_directive(text, target)}\n"
            "  or record real calls: mtmc record -- python your_program.py",
        )
    return found


def run_capture(workload: Workload, source: bytes, worker: Worker, timeout_s: float) -> Capture:
    """Run the target's file in the worker and bring back its graph.

    Raises:
        RequestError: the target or its workload cannot be captured; names file, line and remedy.
    """
    target = workload.target
    first, last = (
        (1, source.count(b"\n") + 1) if target.kind is not TargetKind.FUNCTION else (target.start_line, target.end_line)
    )
    variables = assigned_names(source, first, last)
    capture = worker.call(CaptureRequest(workload, variables, source.decode()), timeout_s)
    path = Path(target.path)
    roots = (str(project_root(path)), str(package_of(path)[1]))
    known = with_definitions(capture.graph.dependencies, target, source, roots)
    return replace(capture, graph=replace(capture.graph, dependencies=known))
