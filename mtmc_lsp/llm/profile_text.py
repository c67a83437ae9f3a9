"""A profile of the present version in words: what a GPU was seen doing, and what the compiler and the model of costs say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtmc_lsp.actions.base import operation_names
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import Unit, units
from mtmc_lsp.schedule.precision_modes import as_run
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import Cost, kernel_cost, torch_cost

MOST_UNITS = 40
"""Kernels and torch calls that are listed, the slowest ones."""
LONGEST_NAME = 80
"""Characters of a kernel's name: a library's template arguments tell little."""


def profile_text(state: State) -> str:
    """What is known of where the time goes; what is estimated says so."""
    kept = [step for step in state.history if step.status is StepStatus.ACCEPTED]
    schedule = from_json(Schedule, state.candidate.schedule)
    # As the ranking of the actions sees it: steps may have shown in which precision the user's own products run.
    graph = as_run(state.capture.graph, schedule, state.history)
    lines = [_floor(state.capture, graph, state.device)]
    if kept:
        lines += _has_gpu(kept[-1])
    try:
        ir = ir_of(graph, schedule)
        todo = [(unit, _cost(ir, unit, state.device)) for unit in units(ir, schedule)]
    except (CannotCode, CannotRewrite) as reason:
        lines.append(f"What its kernels do is not known: {reason}")
        ir, todo = None, []
    times = state.kernel_times()
    if times:
        lines += ["Kernels of a call, measured on the GPU:", *_watched(state, times, todo)]
    if ir is not None:
        lines += ["Kernels and torch calls of a call, estimated:", *_estimates(ir, todo, state.device)]
    if kept and kept[-1].report is not None:
        lines.append("Kernels as the compiler sees them:")
        lines += [f"- {kernel.kernel} on {kernel.arch}: {kernel.summary}" for kernel in kept[-1].report.kernels]
    return "\n".join(lines)


def _watched(state: State, times: Sequence[KernelTime], todo: Sequence[tuple[Unit, Cost]]) -> Iterator[str]:
    """A line for each kernel that ran: its time, its share, and how near it is to what the device can do."""
    least = _least_us(state, todo)
    total = sum(time.us for time in times)
    for time in times[:MOST_UNITS]:
        launches = f" in {time.calls:g} launches" if time.calls > 1 else ""
        part = f", {min(1.0, least[time.name] / time.us):.0%} of the roofline" if time.name in least else ""
        yield f"- {time.name[:LONGEST_NAME]}: {time.us:.1f} us{launches}, {time.us / total:.0%} of the time{part}"
    if len(times) > MOST_UNITS:
        yield f"- and {len(times) - MOST_UNITS} more"


def _least_us(state: State, todo: Sequence[tuple[Unit, Cost]]) -> dict[str, float]:
    """The least time of each of our kernels, by its name, where each part of the schedule is one kernel."""
    names = [launch.kernel for launch in state.candidate.launches]
    costs = [cost for unit, cost in todo if unit.plan is not None]
    if len(names) != len(costs) or len(set(names)) < len(names):
        # Parts in two passes, or one kernel for several parts: whose share a pass has is not known.
        return {}
    rate = max(state.device.flops.values(), default=0.0)
    return {
        name: max(cost.bytes / state.device.bandwidth, cost.flops / rate if rate else 0.0) * 1e6
        for name, cost in zip(names, costs, strict=True)
    }


def _floor(capture: Capture, graph: Graph, device: DeviceModel) -> str:
    memory = capture.bytes / device.bandwidth * 1e6
    rate = max(device.flops.values(), default=0.0)
    compute = capture.flops / rate * 1e6 if rate else 0.0
    bound = "memory" if memory >= compute else "arithmetic"
    return (
        f"One call moves at least {capture.bytes / 1e6:.3g} MB and computes {capture.flops / 1e9:.3g} GFLOP of products: "
        f"no version is faster than {max(memory, compute):.2g} us ({bound})."
        + (
            f" The user's own float32 products run in {graph.fp32_matmul}, convolutions in {graph.fp32_convolution}."
            if capture.flops
            else ""
        )
    )


def _has_gpu(step: Step) -> Iterator[str]:
    timing = step.timing
    if timing is None:
        return
    others = ", ".join(f"{b.name} {b.median_us:.1f} us" for b in timing.baselines if b.speedup)
    yield f"Measured: this version {timing.median_us:.1f} us, {timing.roofline:.0%} of the roofline; {others}."


def _estimates(ir: KernelIR, todo: Sequence[tuple[Unit, Cost]], device: DeviceModel) -> list[str]:
    found = sorted((pair for pair in todo if pair[1].us), key=lambda pair: -pair[1].us)
    lines = [_line(ir, unit, cost, device) for unit, cost in found[:MOST_UNITS]]
    return lines + ([f"- and {len(found) - MOST_UNITS} more"] if len(found) > MOST_UNITS else [])


def _cost(ir: KernelIR, unit: Unit, device: DeviceModel) -> Cost:
    if unit.plan is None or unit.region is None:
        return torch_cost(ir, ir.graph.node(unit.nodes[0]), device)
    return kernel_cost(ir, unit.region, unit.plan.config, device)


def _line(ir: KernelIR, unit: Unit, cost: Cost, device: DeviceModel) -> str:
    what = "kernel" if unit.plan is not None else "torch call"
    working = [name for name in unit.nodes if ir.graph.node(name).op.split(".")[1] not in VIEWS]
    moving = cost.bytes / device.bandwidth * 1e6
    bound = "launch" if cost.us < 2 * device.launch_us else "memory" if moving > 0.5 * cost.us else "arithmetic"
    flops = f", {cost.flops / 1e9:.3g} GFLOP" if cost.flops else ""
    work = f"{cost.bytes / 1e6:.3g} MB{flops}"
    return f"- {what} of {operation_names(ir, working)}: estimated {cost.us:.1f} us, {work}, bound by {bound}"
