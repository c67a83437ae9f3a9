"""The predicted cost of a whole schedule: every kernel and every torch call that the launcher would make."""

from __future__ import annotations

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.jsonable import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import Device, Work
from mtmc_lsp.macro.configs import default_config
from mtmc_lsp.macro.cost import ZERO, Cost, kernel_cost, torch_cost
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import CannotFuse
from mtmc_lsp.macro.rewrites import program_of
from mtmc_lsp.macro.rewrites.editing import CannotRewrite
from mtmc_lsp.macro.schedule import Schedule
from mtmc_lsp.macro.units import units


def schedule_cost(program: Program, schedule: Schedule, device: Device) -> Cost:
    """The cost of all units, one after the other.

    Raises:
        CannotCode: the schedule cannot be carried out.
    """
    total = ZERO
    for unit in units(program, schedule):
        if unit.plan is None or unit.region is None:
            total = total + torch_cost(program, program.graph.node(unit.nodes[0]), device)
        else:
            config = unit.plan.config or default_config(program, unit.region)
            total = total + kernel_cost(program, unit.region, config, device)
    return total


def estimated_work(graph: Graph, schedule: object, device: Device) -> Work | None:
    """What a version does per call, from its schedule as JSON data; None where the model does not know its kernels."""
    try:
        known = from_json(Schedule, schedule)
        cost = schedule_cost(program_of(graph, known), known, device)
    except (TypeError, CannotRewrite, CannotFuse, CannotCode):
        return None
    return Work(cost.bytes, cost.flops)
