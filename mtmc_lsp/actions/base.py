"""What every kind of action is given, and what it must be able to do."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import Timing
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import CannotFuse, Region, analyse, lines_of
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.configs import IllegalConfig
from mtmc_lsp.schedule.legality import a_kernel, decoded, reconfigured
from mtmc_lsp.schedule.precision_modes import Precisions
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.tuning.cost import Cost
from mtmc_lsp.tuning.schedule_cost import schedule_cost


class IllegalAction(Exception):
    """The action does not apply in this state; the message says why, for people."""


@dataclass(frozen=True)
class Situation:
    """What proposals are made from."""

    graph: Graph
    """As captured."""
    schedule: Schedule
    device: DeviceModel
    has_gpu: bool = False
    """Whether steps are timed: only then are actions proposed that no model can judge."""
    strict: bool = False
    """Whether actions that change rounding are forbidden."""
    history: Sequence[Step] = field(default=())
    deadline: float | None = None
    """Of the monotonic clock, when proposals end with what was found so far."""

    @property
    def is_late(self) -> bool:
        """Whether the time for proposals is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def timing(self) -> Timing | None:
        """Of the version at hand; None where no kept step was timed."""
        kept = (s.timing for s in reversed(self.history) if s.status is StepStatus.ACCEPTED and s.timing is not None)
        return next(kept, None)

    @property
    def ir(self) -> KernelIR:
        """The graph as the schedule's kernels speak of it."""
        return ir_of(self.graph, self.schedule)

    @cached_property
    def precisions(self) -> Precisions:
        """The precision modes that the history leaves for each product."""
        return self.precisions_of(self.ir)

    def precisions_of(self, ir: KernelIR) -> Precisions:
        """As :attr:`precisions`, for a program that a rewrite would make."""
        return Precisions.of(ir, self.device, self.history, strict=self.strict)

    def search(self, rank: int = 0) -> FusionSearch:
        """The fusions of the schedule's program, each product in the mode of that rank that the history leaves for it."""
        left = self.precisions
        return FusionSearch(
            self.ir,
            self.schedule,
            self.device,
            partial(left.mode, rank=rank),
            left.refused_at(rank, self.schedule),
            left.slow_at(rank, self.schedule),
            deadline=self.deadline,
        )

    def search_in(self, ir: KernelIR, schedule: Schedule) -> FusionSearch:
        """The fusions of what a rewrite would make, each product in the fastest mode that the history leaves for it."""
        left = self.precisions_of(ir)
        return FusionSearch(ir, schedule, self.device, partial(left.mode, rank=0), deadline=self.deadline)

    def kernels(self) -> Iterator[tuple[KernelPlan, Region]]:
        """Every kernel with its region."""
        yield from self._kernels

    def lone_kernels(self) -> Iterator[tuple[KernelPlan, Region]]:
        """Those whose launches run no other kernels."""
        return ((plan, region) for plan, region in self._kernels if not self.schedule.shares_launch(plan))

    @cached_property
    def _kernels(self) -> tuple[tuple[KernelPlan, Region], ...]:
        return tuple((plan, region_of(self.ir, plan)) for plan in self.schedule.kernels)

    @cached_property
    def present(self) -> Cost:
        """Predicted cost of the schedule as it is.

        Raises:
            IllegalAction: it cannot be carried out.
        """
        return self.cost(self.schedule)

    def cost(self, schedule: Schedule) -> Cost:
        """Predicted cost of a whole schedule.

        Raises:
            IllegalAction: it cannot be carried out.
        """
        try:
            return schedule_cost(ir_of(self.graph, schedule), schedule, self.device)
        except (CannotRewrite, CannotFuse, CannotCode) as reason:
            raise IllegalAction(str(reason)) from None


class ActionHandler(Protocol):
    """One kind of action."""

    kind: ActionKind

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule after the action.

        Raises:
            IllegalAction: it does not apply.
        """

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Actions of this kind that are worth trying."""


def region_of(ir: KernelIR, plan: KernelPlan) -> Region:
    """What a kernel computes.

    Raises:
        IllegalAction: its nodes are no kernel.
    """
    return region_at(ir, plan.nodes, plan.recomputed)


def region_at(ir: KernelIR, nodes: Collection[str], recomputed: Collection[str] = ()) -> Region:
    """What a kernel of some nodes would compute.

    Raises:
        IllegalAction: they cannot be one kernel.
    """
    try:
        return analyse(ir, nodes, recomputed)
    except CannotFuse as reason:
        raise IllegalAction(str(reason)) from None


def new_plan(
    ir: KernelIR, nodes: Collection[str], config: object = None, recomputed: tuple[str, ...] = ()
) -> KernelPlan:
    """A new kernel with an explicit configuration.

    Args:
        ir: the primitives.
        nodes: what the kernel computes.
        config: the configuration as JSON data; the default one of these nodes where there is none.
        recomputed: nodes that the kernel computes for itself as well.

    Raises:
        IllegalAction: the nodes cannot be one kernel, or the configuration is not legal for it.
    """
    region = region_at(ir, nodes, recomputed)
    try:
        chosen = decoded(ir, region, config) if config else default_config(ir, region, default_model())
    except IllegalConfig as reason:
        raise IllegalAction(str(reason)) from None
    return KernelPlan(region.nodes, chosen, recomputed)


def ir_for(graph: Graph, schedule: Schedule) -> KernelIR:
    """The rewritten program.

    Raises:
        IllegalAction: a rewrite of the schedule does not apply.
    """
    try:
        return ir_of(graph, schedule)
    except CannotRewrite as reason:
        raise IllegalAction(str(reason)) from None


def kernel_of(schedule: Schedule, action: MacroAction) -> KernelPlan:
    """The kernel that an action is about.

    Raises:
        IllegalAction: no kernel computes its region.
    """
    plan = next((kernel for kernel in schedule.kernels if set(action.region) & set(kernel.nodes)), None)
    if plan is None:
        raise IllegalAction(f"{action.kind.value}: no kernel computes {', '.join(action.region)} yet")
    return plan


def lone_kernel_of(schedule: Schedule, action: MacroAction) -> KernelPlan:
    """As :func:`kernel_of`, for what takes a launch of the kernel's own.

    Raises:
        IllegalAction: likewise, or its launch runs other kernels too.
    """
    plan = kernel_of(schedule, action)
    if schedule.shares_launch(plan):
        raise IllegalAction(f"{action.kind.value}: the launch runs other kernels too")
    return plan


def changes_of(action: MacroAction) -> Mapping[str, object]:
    """The choices of a configuration that an action changes, as JSON data.

    Raises:
        IllegalAction: it has none.
    """
    changes = action.params.get("config")
    if not isinstance(changes, Mapping) or not changes:
        raise IllegalAction(f"{action.kind.value}: the action has no configuration")
    return changes


def changed_plan(
    ir: KernelIR,
    plan: KernelPlan,
    action: MacroAction,
    allowed: Collection[str],
    also: Mapping[str, object] | None = None,
) -> KernelPlan:
    """A kernel with the changes of an action.

    Args:
        ir: the primitives.
        plan: the kernel.
        action: with the changes.
        allowed: the choices that this kind of action may change.
        also: what follows from the changes, where the action does not state it.

    Raises:
        IllegalAction: the kernel has no such choice, the action may not change it, or the value is not legal.
    """
    region, changes = region_of(ir, plan), changes_of(action)
    try:
        if other := [name for name in changes if name not in allowed]:
            choices = f"this action chooses {', '.join(allowed) or 'nothing'} of it"
            raise IllegalConfig(f"{a_kernel(region.kind)} has no {other[0]} to choose; {choices}")
        return reconfigured(ir, region, plan, {**(also or {}), **changes})
    except IllegalConfig as reason:
        raise IllegalAction(f"{action.kind.value}: {reason}") from None


def least_gain_us(device: DeviceModel) -> float:
    """Predicted saving below which an action is not proposed: it is noise of the model."""
    return device.launch_us / 80


def expected(before: Cost, after: Cost) -> Expected:
    """The prediction that two costs make."""
    return Expected(before.us - after.us, before.bytes, after.bytes, before.flops, after.flops)


def with_saving(situation: Situation, action: MacroAction, after: Schedule) -> MacroAction:
    """``action`` with the model's prediction of what it saves.

    Raises:
        IllegalAction: what comes out cannot be carried out.
    """
    return replace(action, expected=expected(situation.present, situation.cost(after)))


def lines_text(lines: tuple[int, int]) -> str:
    """``line 3`` or ``lines 3 to 5``."""
    if lines == (0, 0):
        return "the target"
    return f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} to {lines[1]}"


def size_text(size: float) -> str:
    """Bytes for people."""
    return f"{abs(size) / 1e6:.1f} MB" if abs(size) >= 1e5 else f"{abs(size) / 1e3:.1f} kB"


def operation_names(ir: KernelIR, nodes: Iterable[str]) -> str:
    """The operations of a region in a sentence."""
    names = list(dict.fromkeys(ir.graph.node(n).word for n in nodes))
    shown = names if len(names) <= 5 else [*names[:2], "...", *names[-2:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def where(ir: KernelIR, nodes: Iterable[str]) -> tuple[tuple[int, int], str]:
    """The lines of a region, as numbers and in words."""
    lines = lines_of(ir, nodes)
    return lines, lines_text(lines)
