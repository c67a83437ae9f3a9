"""Find a target's workload, and capture it in a worker."""

from __future__ import annotations

import json
from pathlib import Path

from mtmc_lsp.core.errors import Location, NoWorkload
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.worker import Worker
from mtmc_lsp.core.workload import Capture, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.source.directive import parse_directive, suggest_directive, workload_from_annotations
from mtmc_lsp.source.names import assigned_names
from mtmc_lsp.source.targets import find_targets


def find_workload(path: str, text: bytes, target: Target, records: Path | None = None) -> Workload:
    """The target's workload: from its directive, jaxtyping annotations, ``get_inputs``, or recorded calls, in this order.

    Raises:
        NoWorkload: there is none; the remedy is the directive to add.
    """
    found = parse_directive(text, target, path) or workload_from_annotations(text, target, path)
    if found is None and any(item.qualname == "get_inputs" for item in find_targets(text, path)):
        found = Workload(target, WorkloadSource.GET_INPUTS)
    if found is None and records is not None and records.exists():
        found = recorded_workload(target, records)
    if found is None:
        raise NoWorkload(
            f"no example inputs are known for {target.qualname}",
            where=Location(path, target.start_line),
            remedy=f"Add this line above it, with your own sizes:\n    {suggest_directive(text, target)}",
        )
    return found


def recorded_workload(target: Target, records: Path) -> Workload | None:
    """The most frequent recorded call of the target."""
    best: Workload | None = None
    most = 0
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record["path"] == target.path and record["qualname"] == target.qualname and record["count"] > most:
            most = record["count"]
            best = from_json(Workload, {**record["workload"], "target": to_json(target)})
    return best


def run_capture(
    workload: Workload, source: bytes, worker: Worker, timeout_s: float, *, own: str | None = None
) -> Capture:
    """Run the target's file in the worker and bring back its graph; ``own`` is run in the file's place where given.

    Raises:
        RequestError: the target or its workload cannot be captured; names file, line and remedy.
    """
    target = workload.target
    first, last = (
        (1, source.count(b"\n") + 1) if target.kind is not TargetKind.FUNCTION else (target.start_line, target.end_line)
    )
    variables = assigned_names(source, first, last)
    request = {
        "workload": to_json(workload),
        "variables": {str(line): name for line, name in variables.items()},
        "own": own,
    }
    return from_json(Capture, worker.call("capture.capture", request, timeout_s))
