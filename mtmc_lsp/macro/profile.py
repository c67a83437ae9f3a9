"""A profile of the present version in words: what was measured where there is a GPU, else what the compiler and the model say."""

from __future__ import annotations

from collections.abc import Iterator

from mtmc_lsp.core.jsonable import from_json
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import Device
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.macro.actions.base import operation_names
from mtmc_lsp.macro.configs import default_config
from mtmc_lsp.macro.cost import Cost, kernel_cost, torch_cost
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import VIEWS
from mtmc_lsp.macro.rewrites import program_of
from mtmc_lsp.macro.rewrites.editing import CannotRewrite
from mtmc_lsp.macro.schedule import Schedule
from mtmc_lsp.macro.units import Unit, units

MOST_UNITS = 40
"""Kernels and torch calls that are listed, the slowest by estimate."""


def profile_text(state: State) -> str:
    """What is known of where the time goes; what is estimated says so."""
    kept = [step for step in state.history if step.status is StepStatus.ACCEPTED]
    lines = [_floor(state.capture, state.device)]
    if kept:
        lines += _measured(kept[-1])
    lines += ["Kernels and torch calls of a call, by estimate:", *_estimates(state)]
    if kept and kept[-1].report is not None:
        lines.append("Kernels as the compiler sees them:")
        lines += [f"- {kernel.kernel} on {kernel.arch}: {kernel.facts}" for kernel in kept[-1].report.kernels]
    return "\n".join(lines)


def _floor(capture: Capture, device: Device) -> str:
    memory = capture.bytes / device.bandwidth * 1e6
    rate = max(device.flops.values(), default=0.0)
    compute = capture.flops / rate * 1e6 if rate else 0.0
    bound = "memory" if memory >= compute else "arithmetic"
    return (
        f"One call moves at least {capture.bytes / 1e6:.3g} MB and computes {capture.flops / 1e9:.3g} GFLOP of products: "
        f"no version is faster than {max(memory, compute):.2g} us ({bound})."
    )


def _measured(step: Step) -> Iterator[str]:
    timing = step.timing
    if timing is None:
        return
    others = ", ".join(f"{b.name} {b.median_us:.1f} us" for b in timing.baselines if b.speedup)
    yield f"Measured: this version {timing.median_us:.1f} us, {timing.roofline:.0%} of the roofline; {others}."


def _estimates(state: State) -> list[str]:
    schedule = from_json(Schedule, state.candidate.schedule)
    try:
        program = program_of(state.capture.graph, schedule)
        found = [(unit, _cost(program, unit, state.device)) for unit in units(program, schedule)]
    except (CannotCode, CannotRewrite) as reason:
        return [f"- not known: {reason}"]
    found = sorted((pair for pair in found if pair[1].us), key=lambda pair: -pair[1].us)
    lines = [_line(program, unit, cost, state.device) for unit, cost in found[:MOST_UNITS]]
    return lines + ([f"- and {len(found) - MOST_UNITS} more"] if len(found) > MOST_UNITS else [])


def _cost(program: Program, unit: Unit, device: Device) -> Cost:
    if unit.plan is None or unit.region is None:
        return torch_cost(program, program.graph.node(unit.nodes[0]), device)
    return kernel_cost(program, unit.region, unit.plan.config or default_config(program, unit.region), device)


def _line(program: Program, unit: Unit, cost: Cost, device: Device) -> str:
    what = "kernel" if unit.plan is not None else "torch call"
    working = [name for name in unit.nodes if program.graph.node(name).op.split(".")[1] not in VIEWS]
    moving = cost.bytes / device.bandwidth * 1e6
    bound = "launch" if cost.us < 2 * device.launch_us else "memory" if moving > 0.5 * cost.us else "arithmetic"
    flops = f", {cost.flops / 1e9:.3g} GFLOP" if cost.flops else ""
    work = f"{cost.bytes / 1e6:.3g} MB{flops}"
    return f"- {what} of {operation_names(program, working)}: {cost.us:.1f} us, {work}, bound by {bound}"
