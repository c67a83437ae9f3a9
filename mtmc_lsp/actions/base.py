"""The state that actions are proposed from, the protocol of action handlers, and their common helpers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import Timing
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.known_regions import known_region
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import CannotFuse, Region
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.configs import IllegalConfig
from mtmc_lsp.schedule.legality import a_kernel, decoded, reconfigured
from mtmc_lsp.schedule.precision_modes import Precisions
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.tuning.cost import Cost
from mtmc_lsp.tuning.loop_forms import form_of
from mtmc_lsp.tuning.schedule_cost import schedule_cost

SITES = "sites"
"""The parameter of an action at several places of the target: nodes and configuration of each kernel."""


class IllegalAction(Exception):
    """The action does not apply in this state; the message tells users why."""


@dataclass(frozen=True)
class Situation:
    """The state that actions are proposed from."""

    graph: Graph
    """As captured."""
    schedule: Schedule
    device: DeviceModel
    target: str = "the target"
    """Name of the target in titles: ``Block.forward``."""
    has_gpu: bool = False
    """Whether steps are timed; actions whose gain cannot be predicted are only proposed then."""
    strict: bool = False
    """Whether actions that change rounding are forbidden."""
    history: Sequence[Step] = field(default=())
    deadline: float | None = None
    """Time of the monotonic clock after which the search for proposals stops."""

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def timing(self) -> Timing | None:
        """Timing of the present version; None where no accepted step was timed."""
        timings = (s.timing for s in reversed(self.history) if s.status is StepStatus.ACCEPTED and s.timing is not None)
        return next(timings, None)

    @cached_property
    def refused_forms(self) -> Mapping[str, Collection[ActionKind]]:
        """For the nodes of loops, the forms in which a kernel was not accepted."""
        forms: dict[str, set[ActionKind]] = {}
        for step in self.history:
            if step.status is StepStatus.ACCEPTED:
                continue
            for site in sites_of(step.action):
                if (kind := form_of(site.params.get("config"))) is not None:
                    for name in site.region:
                        forms.setdefault(name, set()).add(kind)
        return forms

    @property
    def ir(self) -> KernelIR:
        """The rewritten graph, whose nodes the schedule's kernels name."""
        return ir_of(self.graph, self.schedule)

    @cached_property
    def precisions(self) -> Precisions:
        """The precision modes that remain for each product after the history."""
        return self.precisions_of(self.ir)

    def precisions_of(self, ir: KernelIR) -> Precisions:
        """Like :attr:`precisions`, for the graph after a rewrite."""
        return Precisions.of(ir, self.device, self.history, strict=self.strict)

    def search(self, rank: int = 0) -> FusionSearch:
        """A fusion search of the present graph, each product in its remaining mode of that rank."""
        remaining = self.precisions
        return FusionSearch(
            self.ir,
            self.schedule,
            self.device,
            partial(remaining.mode, rank=rank),
            remaining.refused_at(rank, self.schedule),
            remaining.slow_at(rank, self.schedule),
            deadline=self.deadline,
            refused_forms=self.refused_forms,
        )

    def search_in(self, ir: KernelIR, schedule: Schedule) -> FusionSearch:
        """A fusion search of the graph after a rewrite, each product in its fastest remaining mode."""
        remaining = self.precisions_of(ir)
        mode = partial(remaining.mode, rank=0)
        return FusionSearch(ir, schedule, self.device, mode, deadline=self.deadline, refused_forms=self.refused_forms)

    def kernels(self) -> Iterator[tuple[KernelPlan, Region]]:
        """All kernels with their regions."""
        yield from self._kernels

    def lone_kernels(self) -> Iterator[tuple[KernelPlan, Region]]:
        """Kernels that do not share a launch."""
        return ((plan, region) for plan, region in self._kernels if not self.schedule.shares_launch(plan))

    @cached_property
    def _kernels(self) -> tuple[tuple[KernelPlan, Region], ...]:
        return tuple((plan, region_of(self.ir, plan)) for plan in self.schedule.kernels)

    @cached_property
    def present(self) -> Cost:
        """Predicted cost of the present schedule.

        Raises:
            IllegalAction: it cannot be executed.
        """
        return self.cost(self.schedule)

    def cost(self, schedule: Schedule) -> Cost:
        """Predicted cost of a schedule.

        Raises:
            IllegalAction: it cannot be executed.
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
        """Legal actions of this kind that are worth trying."""


def region_of(ir: KernelIR, plan: KernelPlan) -> Region:
    """The region of a kernel.

    Raises:
        IllegalAction: its nodes cannot be one kernel.
    """
    return region_at(ir, plan.nodes, plan.recomputed)


def region_at(ir: KernelIR, nodes: Collection[str], recomputed: Collection[str] = ()) -> Region:
    """The region of nodes as one kernel.

    Raises:
        IllegalAction: they cannot be one kernel.
    """
    try:
        return known_region(ir, nodes, recomputed)
    except CannotFuse as reason:
        raise IllegalAction(str(reason)) from None


def new_plan(
    ir: KernelIR, nodes: Collection[str], config: object = None, recomputed: tuple[str, ...] = ()
) -> KernelPlan:
    """A new kernel with an explicit configuration.

    Args:
        config: the configuration as JSON data. None for the first configuration on the representative device; an
            action names the configurations that differ on the planner's device (:func:`named_configs`).

    Raises:
        IllegalAction: the nodes cannot be one kernel, or the configuration is not legal for it.
    """
    region = region_at(ir, nodes, recomputed)
    try:
        chosen = decoded(ir, region, config) if config else default_config(ir, region, default_model())
    except IllegalConfig as reason:
        raise IllegalAction(str(reason)) from None
    return KernelPlan(region.nodes, chosen, recomputed)


def named_configs(ir: KernelIR, plans: Iterable[KernelPlan], device: DeviceModel) -> list[dict[str, object]]:
    """Action parameters for the new kernels whose first configuration on ``device`` differs from their present one."""
    configs = ((plan, default_config(ir, region_of(ir, plan), device)) for plan in plans)
    return [{"nodes": list(plan.nodes), "config": to_json(config)} for plan, config in configs if config != plan.config]


def sites(action: MacroAction) -> list[tuple[str, ...]]:
    """The nodes of each kernel that the action creates, sorted."""
    return sorted(site.region for site in sites_of(action))


def sites_of(action: MacroAction) -> list[MacroAction]:
    """One action per site; the action itself where it has a single site.

    Raises:
        IllegalAction: a site has no nodes.
    """
    items = action.params.get(SITES)
    if not isinstance(items, (list, tuple)):
        return [action]
    actions = []
    for item in items:
        nodes = item.get("nodes") if isinstance(item, Mapping) else None
        if not isinstance(nodes, (list, tuple)):
            raise IllegalAction(f"{action.kind.value}: a site has no nodes")
        actions.append(replace(action, region=tuple(nodes), params={"config": item.get("config")}))
    return actions


def with_sites(graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
    """One kernel per site of the action; existing kernels that overlap a site become part of it.

    Raises:
        IllegalAction: a kernel is not possible.
    """
    for site in sites_of(action):
        nodes = set(site.region)
        recomputed: set[str] = set()
        for kernel in schedule.kernels:
            if nodes & set(kernel.nodes):
                nodes |= set(kernel.nodes)
                recomputed |= set(kernel.recomputed)
        ir = ir_for(graph, schedule)
        again = tuple(node.name for node in ir.graph.nodes if node.name in recomputed - nodes)
        schedule = schedule.with_kernel(new_plan(ir, nodes, site.params.get("config"), again))
    return schedule


def ir_for(graph: Graph, schedule: Schedule) -> KernelIR:
    """The rewritten graph.

    Raises:
        IllegalAction: a rewrite of the schedule does not apply.
    """
    try:
        return ir_of(graph, schedule)
    except CannotRewrite as reason:
        raise IllegalAction(str(reason)) from None


def kernel_of(schedule: Schedule, action: MacroAction) -> KernelPlan:
    """The kernel that an action changes.

    Raises:
        IllegalAction: no kernel computes its region.
    """
    plan = next((kernel for kernel in schedule.kernels if set(action.region) & set(kernel.nodes)), None)
    if plan is None:
        raise IllegalAction(f"{action.kind.value}: no kernel computes {', '.join(action.region)} yet")
    return plan


def lone_kernel_of(schedule: Schedule, action: MacroAction) -> KernelPlan:
    """Like :func:`kernel_of`, for actions that need a separate launch.

    Raises:
        IllegalAction: no kernel computes the region, or its launch runs other kernels too.
    """
    plan = kernel_of(schedule, action)
    if schedule.shares_launch(plan):
        raise IllegalAction(f"{action.kind.value}: the launch runs other kernels too")
    return plan


def changes_of(action: MacroAction) -> Mapping[str, object]:
    """The choices of a configuration that an action changes, as JSON data.

    Raises:
        IllegalAction: the action has none.
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
        allowed: the choices that this kind of action may change.
        also: consequences of the changes; the action's changes take precedence.

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
    """The predicted saving between two costs."""
    return Expected(before.us - after.us, before.bytes, after.bytes, before.flops, after.flops)


def with_saving(situation: Situation, action: MacroAction, after: Schedule) -> MacroAction:
    """``action`` with its predicted saving.

    Raises:
        IllegalAction: the resulting schedule cannot be executed.
    """
    return replace(action, expected=expected(situation.present, situation.cost(after)))


def lines_text(lines: tuple[int, int]) -> str:
    """``line 3`` or ``lines 3 to 5``."""
    if lines == (0, 0):
        return "the target"
    return f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} to {lines[1]}"


def size_text(size: float) -> str:
    """Bytes as text: ``12.3 MB``."""
    return f"{abs(size) / 1e6:.1f} MB" if abs(size) >= 1e5 else f"{abs(size) / 1e3:.1f} kB"


def lines_of(ir: KernelIR, nodes: Iterable[str]) -> tuple[int, int]:
    """The first and last source line of a region; (0, 0) if they are unknown."""
    names = set(nodes)
    known = [node.line for node in ir.graph.nodes if node.name in names and node.line]
    return (min(known), max(known)) if known else (0, 0)
