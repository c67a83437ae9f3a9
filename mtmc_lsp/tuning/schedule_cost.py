"""Predicted cost of a schedule: all kernels and torch calls of its launcher."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph, RowLoop
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import Work
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import CannotFuse, RegionKind
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import Unit, launches
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import ZERO, Cost, tensor_bytes
from mtmc_lsp.tuning.kernel_cost import PROGRAMS_PER_SM, kernel_cost, programs_of
from mtmc_lsp.tuning.torch_cost import torch_cost


def schedule_cost(ir: KernelIR, schedule: Schedule, device: DeviceModel) -> Cost:
    """The sum of the costs of all launches.

    Raises:
        CannotCode: the schedule cannot be executed.
    """
    total = ZERO
    for launch in launches(ir, schedule):
        total = total + launch_cost(ir, launch, device, schedule.loop_kernels)
    return total


def _row_loop_cost(loop: RowLoop, kernels: Sequence[KernelPlan], device: DeviceModel) -> Cost:
    """The cost of all chunks of a loop over rows.

    Args:
        kernels: of all loops.
    """
    body = lower(loop.body)
    plans = tuple(plan for plan in kernels if plan.key in body.graph.named)
    chunk = schedule_cost(body, Schedule(kernels=plans), device)
    sums = [ref for ref, rows in zip(loop.body.outputs, loop.outputs, strict=True) if rows is None]
    # Each chunk reads and writes the sums that it adds to; a product does so while it computes.
    added = sum(tensor_bytes(loop.body.type_of(ref), loop.body.sizes) for ref in sums)
    return Cost(loop.chunks * (chunk.bytes + added), loop.chunks * chunk.flops, loop.chunks * chunk.us)


def launch_cost(
    ir: KernelIR, launch: Sequence[Unit], device: DeviceModel, loop_kernels: Sequence[KernelPlan] = ()
) -> Cost:
    """The cost of a torch call, of a loop over rows, or of the kernels of one launch.

    The kernels run concurrently: their time is that of the longest one, or of all work on a fully used device if that is longer.
    """
    loop = ir.graph.node(launch[0].nodes[0]).row_loop
    if loop is not None:
        return _row_loop_cost(loop, loop_kernels, device)
    costs: list[Cost] = []
    busy: list[float] = []
    for unit in launch:
        if unit.plan is None or unit.region is None:
            return torch_cost(ir, ir.graph.node(unit.nodes[0]), device)
        costs.append(kernel_cost(ir, unit.region, unit.plan.config, device))
        full = device.sm_count if unit.region.kind is RegionKind.MATMUL else PROGRAMS_PER_SM * device.sm_count
        busy.append(min(1.0, programs_of(ir, unit.region, unit.plan.config) / full))
    if len(costs) == 1:
        return costs[0]
    times = [cost.us - device.launch_us for cost in costs]
    us = max(*times, sum(time * share for time, share in zip(times, busy, strict=True))) + device.launch_us
    return Cost(sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs), us)


def estimated_work(graph: Graph, schedule: object, device: DeviceModel) -> Work | None:
    """Bytes and operations of a version per call, from its schedule in JSON; None if the model cannot read it."""
    cost = _estimated_cost(graph, schedule, device)
    return Work(cost.bytes, cost.flops) if cost is not None else None


def estimated_us(graph: Graph, schedule: object, device: DeviceModel) -> float | None:
    """Predicted microseconds of a version per call, from its schedule in JSON; None if the model cannot read it."""
    cost = _estimated_cost(graph, schedule, device)
    return cost.us if cost is not None else None


def _estimated_cost(graph: Graph, schedule: object, device: DeviceModel) -> Cost | None:
    try:
        decoded = from_json(Schedule, schedule)
        return schedule_cost(ir_of(graph, decoded), decoded, device)
    except (TypeError, CannotRewrite, CannotFuse, CannotCode):
        return None
