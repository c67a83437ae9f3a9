"""Finds a target's workload and captures it in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.capture.messages import CaptureRequest, LocalValuesRequest
from mtmc_lsp.capture.module_paths import package_of, project_root
from mtmc_lsp.capture.recorded_calls import RecordedTarget, find_record, recorded_form, workload_from_record
from mtmc_lsp.capture.regions.runs import Runs
from mtmc_lsp.capture.regions.search import Regions, RegionSearch
from mtmc_lsp.core.errors import Location, NoWorkload, TargetUnsupported
from mtmc_lsp.core.workload import Capture, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.assigned_names import assigned_names
from mtmc_lsp.source.dependencies import with_definitions
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.workload.directive import (
    module_form,
    parse_directive,
    suggest_directive,
    workload_from_annotations,
)
from mtmc_lsp.source.workload.module_usage import module_usage


def find_workload(path: str, text: bytes, target: Target, records: Path | None = None) -> Workload:
    """Find the target's workload in its directive, jaxtyping annotations, ``get_inputs`` or recorded calls, in this order.

    Raises:
        TargetUnsupported: the target is a Triton kernel.
        NoWorkload: the target has no workload; the remedy contains a directive to paste.
    """
    if target.kind is TargetKind.KERNEL:
        raise TargetUnsupported(
            f"{target.qualname} is a Triton kernel, which has no graph of operations",
            where=Location(path, target.start_line),
            remedy="To edit it: mtmc optimize FILE::NAME. To check and repair it: mtmc repair FILE::NAME.",
        )
    record = find_record(target, records) if records is not None else None
    workload = parse_directive(text, target, path) or workload_from_annotations(text, target, path)
    if workload is None and any(item.qualname == "get_inputs" for item in find_targets(text, path)):
        workload = Workload(target, WorkloadSource.GET_INPUTS)
    if workload is None and record is not None:
        workload = workload_from_record(target, record)
    if workload is None:
        raise NoWorkload(
            f"no example inputs are known for {target.qualname}{_unusable_record(record)}",
            where=Location(path, target.start_line),
            remedy=f"Add this line above it, with your sizes:\n    {suggest_directive(text, target)}\n"
            "  or record real calls: mtmc record -- python your_program.py",
        )
    return _with_module_form(workload, path, text, record)


def _unusable_record(record: RecordedTarget | None) -> str:
    """Why the recorded calls are no workload, as the end of a sentence."""
    if record is None:
        return ""
    if not record.calls:
        return ": its recorded calls are inside code of torch.compile, where its inputs are not known"
    return f": none of its {record.count} recorded calls can be repeated: {record.calls[0].unusable}"


def _with_module_form(workload: Workload, path: str, text: bytes, record: RecordedTarget | None) -> Workload:
    """The workload with the dtype and mode of its module: as in the directive, else as recorded, else as in the file's text.

    If none says it, a module that is trained is in training mode, and others are in evaluation mode.
    """
    target = workload.target
    form, notes = module_form(text, target, path), list(workload.assumed)
    observed = [(recorded_form(record), "as in the recorded calls")] if record is not None else []
    usage = module_usage(text, target) if workload.source is not WorkloadSource.GET_INPUTS else None
    if usage is not None:
        observed.append((usage.form, f"as in line {usage.line} of the file"))
    for other, origin in observed:
        completed = form.completed_by(other)
        if completed.dtype not in (form.dtype, "float32"):
            notes.append(f"the parameters of {target.class_name} are {completed.dtype}, {origin}")
        if completed.training != form.training and completed.training:
            notes.append(f"{target.class_name} is in training mode, {origin}")
        form = completed
    if workload.trains and form.training is None and target.class_name and not workload.as_constructed:
        # Programs train in training mode, in which modules are constructed.
        form = replace(form, training=True)
    return replace(workload, module=form, assumed=tuple(notes))


def run_capture(workload: Workload, source: bytes, worker: Worker, timeout_s: float) -> Capture:
    """Run the target's file in the worker and return its graph.

    Raises:
        RequestError: the target cannot be captured with this workload; names file, line and remedy.
    """
    target = workload.target
    first, last = (
        (1, source.count(b"\n") + 1) if target.kind is not TargetKind.FUNCTION else (target.start_line, target.end_line)
    )
    variables = assigned_names(source, first, last)
    capture = worker.call(CaptureRequest(workload, variables, source.decode()), timeout_s)
    path = Path(target.path)
    roots = (str(project_root(path)), str(package_of(path)[1]))
    dependencies = with_definitions(capture.graph.dependencies, target, source, roots)
    return replace(capture, graph=replace(capture.graph, dependencies=dependencies))


def find_regions(
    workload: Workload, source: bytes, open_worker: Callable[[], AbstractContextManager[Worker]], timeout_s: float
) -> Regions:
    """Capture the regions of a target that cannot be captured as a whole; none if it has no body to look at.

    Args:
        source: the file without generated code of earlier runs.
        open_worker: starts a worker; each capture needs a new one.

    Raises:
        MtmcError: the target raises on its workload.
    """
    deadline = time.monotonic() + timeout_s
    text = source.decode()
    try:
        runs = Runs(workload.target, text)
    except ValueError:
        return Regions((), ())
    with open_worker() as worker:
        values = worker.call(LocalValuesRequest(workload, text), timeout_s)

    def capture(region: Workload) -> Capture:
        with open_worker() as worker:
            return run_capture(region, source, worker, max(1.0, deadline - time.monotonic()))

    return RegionSearch(workload, runs, values, capture, deadline).find()
