"""Why a region cannot be captured: the line inside it, and memory that its results share."""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Sequence

import torch

from mtmc_lsp.capture.regions.liveness import names_set
from mtmc_lsp.core.errors import Location, MtmcError, TargetUnsupported
from mtmc_lsp.core.workload import CodeRegion, Target
from mtmc_lsp.process.worker.failures import exception_chain


def in_region(error: MtmcError, target: Target) -> MtmcError:
    """The error with the line of the region that was running, instead of a line in a function that it calls."""
    region = target.region
    if region is None:
        return error
    for each in exception_chain(error):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if frame.filename == target.path and region.start_line <= (frame.lineno or 0) <= region.end_line:
                error.where = Location(target.path, frame.lineno or 0)
                return error
    return error


def refuse_shared_memory(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], target: Target) -> None:
    """Refuse a region whose results are views of its inputs or of each other, if other statements write into tensors.

    The results of kernels have memory of their own, so such a write would not reach the other tensor.

    Raises:
        TargetUnsupported: names the variable, and the line that assigns it.
    """
    region = target.region
    if region is None or not region.writes_follow:
        return
    passed = {id(tensor) for tensor in inputs}
    taken = {_memory(tensor) for tensor in inputs}
    for result in {id(item): item for item in results if id(item) not in passed}.values():
        if _memory(result) in taken:
            # Outputs that are containers have several results.
            index = next(i for i, item in enumerate(results) if item is result)
            name = region.outputs[index] if len(region.outputs) == len(results) else ""
            raise TargetUnsupported(
                f"{target.qualname} has a result{f', {name},' if name else ''} that is a view of another tensor, "
                "and writes into tensors elsewhere",
                where=Location(target.path, _last_assignment(target.path, region, name)),
                remedy="Use .clone() or .contiguous() for the view.",
            )
        taken.add(_memory(result))


def _last_assignment(path: str, region: CodeRegion, name: str) -> int:
    """The last line of a region that assigns a variable; the region's first line if none does."""
    tree = ast.parse("".join(linecache.getlines(path)))
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and region.start_line <= node.lineno <= region.end_line
        if name in names_set(node)
    ]
    return max(lines, default=region.start_line)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
