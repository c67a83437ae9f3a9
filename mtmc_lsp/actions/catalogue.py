"""The action catalogue: applies macro actions to a schedule, and proposes legal actions that are worth trying."""

from __future__ import annotations

from mtmc_lsp.actions import (
    algebra,
    cuda_graph,
    fuse,
    layout,
    library,
    persist,
    recompute,
    side_by_side,
    specialize,
    split,
    tuning,
)
from mtmc_lsp.actions import convolution as convolutions
from mtmc_lsp.actions.base import ActionHandler, IllegalAction, Situation
from mtmc_lsp.actions.launch_overhead import LaunchOverhead
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.schedule.schedule import Schedule

HANDLERS: tuple[ActionHandler, ...] = (
    algebra.Algebra(),
    convolutions.ChannelsLast(),
    convolutions.Fp16Operands(),
    convolutions.Im2win(),
    fuse.Fuse(),
    fuse.TensorCore(),
    library.Library(),
    recompute.Recompute(),
    split.Split(),
    persist.Persist(),
    side_by_side.SideBySide(),
    tuning.Tile(),
    tuning.Vectorize(),
    tuning.Pipeline(),
    tuning.Reorder(),
    layout.Layout(),
    specialize.Specialize(),
    cuda_graph.CudaGraph(),
    tuning.Autotune(),
)
BY_KIND: dict[ActionKind, ActionHandler] = {handler.kind: handler for handler in HANDLERS}

__all__ = ["BY_KIND", "HANDLERS", "IllegalAction", "apply_action", "proposals"]


def apply_action(graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
    """The schedule after ``action``; the same arguments give the same schedule.

    Args:
        graph: as captured; the schedule's own rewrites are taken into account.

    Raises:
        IllegalAction: it does not apply.
    """
    return BY_KIND[action.kind].apply(graph, schedule, action)


def proposals(situation: Situation) -> list[MacroAction]:
    """Legal actions that are worth trying, most predicted saving first."""
    actions: list[MacroAction] = []
    for handler in HANDLERS:
        # After the deadline, only search for a first fusion: every other action needs a kernel.
        if not situation.is_late or (handler.kind is ActionKind.FUSE and not actions):
            actions += handler.propose(situation)
    if not actions and situation.has_gpu and not situation.schedule.kernels and not situation.history:
        actions = fuse.doubted(situation)
    overhead = LaunchOverhead(situation, BY_KIND)
    host_us = {action.key: overhead.saved_us(action) for action in actions}
    most = max(host_us.values(), default=0.0)

    def rank(action: MacroAction) -> tuple[bool, float, str]:
        # If fusions save host time, a CUDA graph need not.
        more = -most if action.kind is ActionKind.CUDA_GRAPH else host_us[action.key]
        # The memory format of all images affects the gain of every other action, so it goes first.
        return action.params.get("rule") != propagation.RULE, -(action.expected.saved_us + more), action.key

    return sorted(actions, key=rank)
