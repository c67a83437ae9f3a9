"""Runs in float64 on the host, which computes small operations faster than it launches them on a GPU. Runs in workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import on_device
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Target
from mtmc_lsp.process.gpu_lock import unshared
from mtmc_lsp.verify.sizes.interpreter_limits import product_work
from mtmc_lsp.verify.worker.float64_execution import Float64Mode

if TYPE_CHECKING:
    from mtmc_lsp.verify.worker.oracle_runs.runs import CaseRuns

SLOW_SECONDS = 0.2
"""Plain runs that take less stay on the GPU."""
MOST_ELEMENTS, MOST_PRODUCT = 1 << 14, 1 << 20
"""Limits for an iteration on the host: elements of a value, and multiply-adds."""
TIME_LIMIT = 3.0
"""A run on the host may take this many times as long as the plain run on the GPU: about as long as the GPU takes in float64."""
ROUNDING_LIMIT = 10 * TIME_LIMIT
"""The same for runs that round each operation, which take about ten times as long."""

_failed: set[Target] = set()
"""Targets whose runs on the host took too long or failed."""


class _TookTooLong(BaseException):
    """Ends a run on the host. User code that handles exceptions does not catch it."""


class Host:
    """The host as the place for runs of one case."""

    def __init__(self, runs: CaseRuns) -> None:
        self._runs = copy.copy(runs)
        moved: dict[int, torch.Tensor] = {}
        for tensor in runs.inputs.values():
            moved.setdefault(id(tensor), on_device(tensor, "cpu"))
        # Inputs that are one tensor stay one.
        self._runs.inputs = {name: moved[id(tensor)] for name, tensor in runs.inputs.items()}
        self._runs.device = "cpu"
        self._home = runs.device
        self._seconds = runs.seconds

    def run(
        self, run: Callable[[CaseRuns], dict[str, Any]], mode: Float64Mode, *, rounds: bool
    ) -> dict[str, Any] | None:
        """The run with its tensors where those of the case are; None if it takes too long or fails.

        Timings use the GPU meanwhile.

        Args:
            run: runs the code once, under the mode.
            rounds: whether the run rounds each operation.
        """
        end = perf_counter() + (ROUNDING_LIMIT if rounds else TIME_LIMIT) * self._seconds
        between_calls = mode.between_calls

        def end_late_run() -> None:
            if perf_counter() > end:
                raise _TookTooLong

        mode.between_calls = end_late_run
        try:
            with unshared():
                found = run(self._runs)
        except (Exception, _TookTooLong):
            # The code may create tensors on the GPU. Whatever else it raises, it raises there, too.
            _failed.add(self._runs.capture.workload.target)
            return None
        finally:
            mode.between_calls = between_calls
        results = [self._moved_back(value) for value in found["results"]]
        return {**found, "results": results, "after": {n: self._moved_back(t) for n, t in found["after"].items()}}

    def _moved_back(self, value: Any) -> Any:
        return on_device(value, self._home) if isinstance(value, torch.Tensor) else value


def host_of(runs: CaseRuns) -> Host | None:
    """The host if it computes the code faster in float64 than a GPU; None if it does not, or may compute something else."""
    graph = runs.capture.graph
    is_slow = is_on_gpu(runs.device) and runs.seconds >= SLOW_SECONDS
    if not is_slow or runs.capture.uses_random or graph.runs_tf32 or runs.capture.workload.target in _failed:
        return None
    return Host(runs) if has_small_iterations(graph, {**graph.sizes, **runs.case.sizes}) else None


def is_on_gpu(device: str) -> bool:
    """Whether runs are launched on a GPU; tests replace it."""
    return device == "cuda"


def has_small_iterations(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether the code is a loop over time, without gradients, that computes few float32 values in each iteration."""
    loops = [node.loop for node in graph.nodes if node.loop is not None]
    if not loops or graph.backward is not None or graph.autocast:
        return False
    kinds = [kind for node in graph.nodes_and_bodies() for kind in node.outputs]
    kinds += [item.type for item in graph.inputs]
    if any(is_float(kind.dtype) and kind.dtype != "float32" for kind in kinds):
        return False
    values = [kind.numel.value(sizes) for loop in loops for node in loop.nodes for kind in node.outputs]
    work = [product_work(loop.body(graph), sizes) for loop in loops]
    return max(values, default=0) <= MOST_ELEMENTS and max(work) <= MOST_PRODUCT
