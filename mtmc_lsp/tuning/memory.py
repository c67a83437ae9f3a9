"""Predicted device memory of a call: what its launchers allocate. Estimates, not measurements.

A launcher keeps all its tensors until it returns. After the forward pass, results and saved values remain.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.graph import Graph, Ref
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.output_aliasing import replaced_product
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.saved_values import split
from mtmc_lsp.schedule.launch_units import units
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import tensor_bytes


def peak_bytes(graph: Graph, schedule: Schedule) -> float:
    """The most memory that a call allocates, results included.

    Args:
        graph: as captured.

    Raises:
        CannotCode: the schedule cannot be executed.
        CannotRewrite: a rewrite of the schedule does not apply.
    """
    rewritten = ir_of(graph, schedule).graph
    if rewritten.backward is None or rewritten.backward.in_forward:
        return _allocated(rewritten, schedule.kernels, schedule.loop_kernels)
    both = split(rewritten)
    forward = _allocated(both.forward, schedule.kernels, schedule.loop_kernels)
    kept = sum(_bytes(both.forward, ref) for ref in both.forward.outputs if ref.name in both.forward.named)
    return max(forward, kept + _allocated(both.backward, schedule.kernels, schedule.loop_kernels))


def _allocated(graph: Graph, kernels: Sequence[KernelPlan], loop_kernels: Sequence[KernelPlan]) -> float:
    """Bytes of all values that the launcher of a graph writes to memory."""
    ir = lower(graph)
    plans = tuple(plan for plan in kernels if plan.key in graph.named)
    total = largest_chunk = 0.0
    for unit in units(ir, Schedule(kernels=plans)):
        if unit.region is not None:
            total += sum(_bytes(graph, ref) for ref in unit.region.outputs)
            continue
        node = graph.node(unit.nodes[0])
        if node.op.split(".")[1] not in VIEWS:
            total += sum(_bytes(graph, Ref(node.name, i)) for i in range(len(node.outputs)))
        if node.row_loop is not None:
            largest_chunk = max(largest_chunk, _allocated_by_chunk(node.row_loop.body, loop_kernels))
    return total + largest_chunk


def _allocated_by_chunk(body: Graph, kernels: Sequence[KernelPlan]) -> float:
    """Bytes of the values of a chunk. Results are the loop's, and gradients overwrite products where that is possible."""
    ir = lower(body)
    plans = tuple(plan for plan in kernels if plan.key in body.named)
    total, done = 0.0, set[str]()
    for unit in units(ir, Schedule(kernels=plans)):
        region = unit.region
        refs = region.outputs if region is not None else [Ref(unit.nodes[0])]
        for ref in refs:
            is_view = region is None and body.node(ref.name).op.split(".")[1] in VIEWS
            is_stored = region is not None and replaced_product(ir, region, ref, done) is not None
            if not is_view and not is_stored and ref not in body.outputs:
                total += _bytes(body, ref)
        done |= set(unit.nodes)
    return total


def _bytes(graph: Graph, ref: Ref) -> float:
    return tensor_bytes(graph.type_of(ref), graph.sizes)
