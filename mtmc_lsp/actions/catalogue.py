"""The action catalogue: what each macro action does to a schedule, when it is legal, and which are worth proposing."""

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
from mtmc_lsp.actions.launch_overhead import Launching
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
    found: list[MacroAction] = []
    for handler in HANDLERS:
        # What is late is looked for no further, but a kernel by fusion is what everything else begins with.
        if not situation.is_late or (handler.kind is ActionKind.FUSE and not found):
            found += handler.propose(situation)
    if not found and situation.has_gpu and not situation.schedule.kernels and not situation.history:
        found = fuse.doubted(situation)
    launching = Launching(situation, BY_KIND)
    waits = {action.key: launching.saved_us(action) for action in found}
    most = max(waits.values(), default=0.0)

    def rank(action: MacroAction) -> tuple[bool, float, str]:
        # What launches fewer would save, a graph of all launches need not.
        more = -most if action.kind is ActionKind.CUDA_GRAPH else waits[action.key]
        # In which order all images lie decides what every other action brings.
        return action.params.get("rule") != propagation.RULE, -(action.expected.saved_us + more), action.key

    return sorted(found, key=rank)
