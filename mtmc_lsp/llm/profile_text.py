"""The profile of the current version as text for a model: GPU measurements, compiler statistics and cost model estimates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtmc_lsp.actions.titles import operation_names
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
from mtmc_lsp.tuning.cost import Cost
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.torch_cost import torch_cost

MAX_UNITS = 40
"""Maximum number of kernels and torch calls to list, slowest first."""
MAX_NAME_LENGTH = 80
"""Maximum length of a kernel name in characters: template arguments of library kernels are not informative."""


def profile_text(state: State) -> str:
    """Where the time of one call goes. Estimates are marked as estimates."""
    accepted = [step for step in state.history if step.status is StepStatus.ACCEPTED]
    schedule = from_json(Schedule, state.candidate.schedule)
    # Use the same graph as the action ranking: earlier steps may have shown in which precision the reference matmuls run.
    graph = as_run(state.capture.graph, schedule, state.history)
    lines = [_lower_bound(state.capture, graph, state.device)]
    if accepted:
        lines += _measured_time(accepted[-1])
    try:
        ir = ir_of(graph, schedule)
        unit_costs = [(unit, _cost(ir, unit, state.device)) for unit in units(ir, schedule)]
    except (CannotCode, CannotRewrite) as reason:
        lines.append(f"The work of its kernels is unknown: {reason}")
        ir, unit_costs = None, []
    kernel_times = state.kernel_times()
    if kernel_times:
        lines += ["Kernels of a call, measured on the GPU:", *_kernel_times(state, kernel_times, unit_costs)]
    if ir is not None:
        lines += ["Kernels and torch calls of a call, estimated:", *_estimates(ir, unit_costs, state.device)]
    if accepted and accepted[-1].report is not None:
        lines.append("Kernels as the compiler sees them:")
        lines += [f"- {kernel.kernel} on {kernel.arch}: {kernel.summary}" for kernel in accepted[-1].report.kernels]
    return "\n".join(lines)


def _kernel_times(state: State, times: Sequence[KernelTime], unit_costs: Sequence[tuple[Unit, Cost]]) -> Iterator[str]:
    """One line for each kernel that ran: its time, its share of the total, and its fraction of the roofline."""
    roofline_us = _roofline_us(state, unit_costs)
    total = sum(time.us for time in times)
    for time in times[:MAX_UNITS]:
        launches = f" in {time.calls:g} launches" if time.calls > 1 else ""
        fraction = (
            f", {min(1.0, roofline_us[time.name] / time.us):.0%} of the roofline" if time.name in roofline_us else ""
        )
        yield f"- {time.name[:MAX_NAME_LENGTH]}: {time.us:.1f} us{launches}, {time.us / total:.0%} of the time{fraction}"
    if len(times) > MAX_UNITS:
        yield f"- and {len(times) - MAX_UNITS} more"


def _roofline_us(state: State, unit_costs: Sequence[tuple[Unit, Cost]]) -> dict[str, float]:
    """Roofline time in microseconds of each generated kernel, by name; empty unless each launch unit is exactly one kernel."""
    names = [launch.kernel for launch in state.candidate.launches]
    costs = [cost for unit, cost in unit_costs if unit.plan is not None]
    if len(names) != len(costs) or len(set(names)) < len(names):
        # Some units run in two passes, or one kernel runs several units: the costs cannot be assigned to kernels.
        return {}
    peak_flops = max(state.device.flops.values(), default=0.0)
    return {
        name: max(cost.bytes / state.device.bandwidth, cost.flops / peak_flops if peak_flops else 0.0) * 1e6
        for name, cost in zip(names, costs, strict=True)
    }


def _lower_bound(capture: Capture, graph: Graph, device: DeviceModel) -> str:
    memory_us = capture.bytes / device.bandwidth * 1e6
    peak_flops = max(device.flops.values(), default=0.0)
    compute_us = capture.flops / peak_flops * 1e6 if peak_flops else 0.0
    bound = "memory" if memory_us >= compute_us else "arithmetic"
    return (
        f"One call moves at least {capture.bytes / 1e6:.3g} MB and computes {capture.flops / 1e9:.3g} GFLOP of matmuls: "
        f"no version is faster than {max(memory_us, compute_us):.2g} us ({bound})."
        + (
            f" The reference runs float32 matmuls in {graph.fp32_matmul}, convolutions in {graph.fp32_convolution}."
            if capture.flops
            else ""
        )
    )


def _measured_time(step: Step) -> Iterator[str]:
    timing = step.timing
    if timing is None:
        return
    others = ", ".join(f"{b.name} {b.median_us:.1f} us" for b in timing.baselines if b.speedup)
    yield f"Measured: this version {timing.median_us:.1f} us, {timing.roofline:.0%} of the roofline; {others}."


def _estimates(ir: KernelIR, unit_costs: Sequence[tuple[Unit, Cost]], device: DeviceModel) -> list[str]:
    slowest = sorted((pair for pair in unit_costs if pair[1].us), key=lambda pair: -pair[1].us)
    lines = [_line(ir, unit, cost, device) for unit, cost in slowest[:MAX_UNITS]]
    return lines + ([f"- and {len(slowest) - MAX_UNITS} more"] if len(slowest) > MAX_UNITS else [])


def _cost(ir: KernelIR, unit: Unit, device: DeviceModel) -> Cost:
    if unit.plan is None or unit.region is None:
        return torch_cost(ir, ir.graph.node(unit.nodes[0]), device)
    return kernel_cost(ir, unit.region, unit.plan.config, device)


def _line(ir: KernelIR, unit: Unit, cost: Cost, device: DeviceModel) -> str:
    kind = "kernel" if unit.plan is not None else "torch call"
    operations = [name for name in unit.nodes if ir.graph.node(name).op.split(".")[1] not in VIEWS]
    memory_us = cost.bytes / device.bandwidth * 1e6
    bound = "launch" if cost.us < 2 * device.launch_us else "memory" if memory_us > 0.5 * cost.us else "arithmetic"
    flops = f", {cost.flops / 1e9:.3g} GFLOP" if cost.flops else ""
    work = f"{cost.bytes / 1e6:.3g} MB{flops}"
    return f"- {kind} of {operation_names(ir, operations)}: estimated {cost.us:.1f} us, {work}, bound by {bound}"
