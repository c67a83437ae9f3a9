"""What actions on loops share: a kernel that computes several iterations of a loop at once.

Such an action changes the kernel of a loop whose iterations run one after another. As the first step of a loop it creates the
kernel; :class:`mtmc_lsp.actions.fuse.Fuse` proposes that, because it competes for the same nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from mtmc_lsp.actions.base import (
    SITES,
    IllegalAction,
    Situation,
    changed_plan,
    expected,
    ir_for,
    lines_of,
    lone_kernel_of,
    sites_of,
    with_sites,
)
from mtmc_lsp.actions.titles import kernel_title
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.loop_forms import LEAST_GAIN, config_in, form_of


class SequentialLoopAction(ABC):
    """Computes several iterations at once in the kernel of a loop."""

    kind: ActionKind
    choices: tuple[str, ...]
    """Choices of the configuration that the action sets."""

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The loop's kernel with the configuration of the action; a new kernel if the action has a complete configuration."""
        if not creates_kernels(action):
            plan = lone_kernel_of(schedule, action)
            return schedule.with_kernel(changed_plan(ir_for(graph, schedule), plan, action, self.choices))
        if any(form_of(site.params.get("config")) is not self.kind for site in sites_of(action)):
            raise IllegalAction(f"{self.kind.value}: the configuration runs one iteration after another")
        return with_sites(graph, schedule, action)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Loops that are predicted to take less time than with their iterations one after another."""
        ir, device = situation.ir, situation.device
        for plan, region in situation.lone_kernels():
            present = plan.config
            if (
                not isinstance(present, LoopConfig)
                or form_of(present) is not None
                or self._was_first(situation, plan.nodes)
            ):
                continue
            form = loop_in(ir, region)
            config = config_in(self.kind, ir, region, form, device)
            if config is None:
                continue
            before, after = (kernel_cost(ir, region, each, device) for each in (present, config))
            if before.us - after.us < LEAST_GAIN * before.us:
                continue
            yield MacroAction(
                kind=self.kind,
                region=region.nodes,
                lines=lines_of(ir, region.nodes),
                params={"config": {name: getattr(config, name) for name in self.choices}},
                rationale=self.reason(form, config, device),
                expected=expected(before, after),
                text=self.title(kernel_title(ir, plan.nodes)),
            )

    def _was_first(self, situation: Situation, nodes: Iterable[str]) -> bool:
        """Whether a first kernel in this form was tried; one for several loops at once says little about each of them."""
        return any(
            step.action.kind is self.kind
            and SITES not in step.action.params
            and creates_kernels(step.action)
            and not set(nodes).isdisjoint(step.action.region)
            for step in situation.history
        )

    @abstractmethod
    def title(self, name: str) -> str:
        """What the action does to the loop with this name."""

    @abstractmethod
    def reason(self, form: LoopForm, config: LoopConfig, device: DeviceModel) -> str:
        """Why the form pays for a loop."""


def creates_kernels(action: MacroAction) -> bool:
    """Whether the action has complete configurations, of new kernels, rather than changes of a kernel."""
    config = action.params.get("config")
    return SITES in action.params or (isinstance(config, Mapping) and "kind" in config)
