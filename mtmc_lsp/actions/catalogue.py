"""The action catalogue: applies macro actions to a schedule, and proposes legal actions that are worth trying."""

from __future__ import annotations

from mtmc_lsp.actions import (
    algebra,
    chunk_rows,
    cuda_graph,
    fuse,
    library,
    recompute,
    recompute_attention,
    side_by_side,
    split,
    tuning,
)
from mtmc_lsp.actions import convolution as convolutions
from mtmc_lsp.actions.base import ActionHandler, IllegalAction, Situation
from mtmc_lsp.actions.launch_overhead import LaunchOverhead
from mtmc_lsp.actions.loops import chunk_products, parallel_scan
from mtmc_lsp.actions.networks.opening import network_opening
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
    chunk_rows.ChunkRows(),
    recompute_attention.RecomputeAttention(),
    split.Split(),
    parallel_scan.ParallelScan(),
    chunk_products.ChunkProducts(),
    side_by_side.SideBySide(),
    cuda_graph.CudaGraph(),
    tuning.Autotune(),
)
BY_KIND: dict[ActionKind, ActionHandler] = {handler.kind: handler for handler in HANDLERS}

MUCH_MEMORY = 1e9
"""Bytes; an action that saves as much memory goes before actions that save more time."""

WHEN_IT_PAYS: dict[ActionKind, str] = {
    ActionKind.FUSE: "Operations that are limited by memory bandwidth, one after another: each intermediate tensor that stays in "
    "registers saves one write and one read, and fewer kernels mean fewer launches.",
    ActionKind.TENSOR_CORE: "Large float32 products on a GPU whose tensor cores are several times as fast as its fp32 units.",
    ActionKind.SPLIT: "Few rows (or few tiles of a product) with a long sum: one program for each leaves most of the GPU idle. "
    "Stream-K pays where the last wave of tiles is mostly empty.",
    ActionKind.PARALLEL_SCAN: "Long loops over time steps with few states: one iteration after another leaves most of "
    "the GPU idle.",
    ActionKind.CHUNK_PRODUCTS: "Loops over time steps whose state is a sum of outer products, such as linear attention: the "
    "iterations of a chunk become products of matrices.",
    ActionKind.SIDE_BY_SIDE: "Short kernels that do not depend on one another: launching them takes as long as their work.",
    ActionKind.ALGEBRA: "Formulas with a cheaper equivalent, for example the sum of a matrix product: summing the weights first "
    "turns the product of two matrices into a product of a matrix and a vector.",
    ActionKind.CHANNELS_LAST: "Networks of convolutions: the library converts every image to channels last and back, unless it "
    "is stored that way already.",
    ActionKind.FP16_OPERANDS: "Convolutions in float32 with many channels, which are limited by arithmetic.",
    ActionKind.IM2WIN: "Convolutions with few input channels, such as the first layer of a network: a kernel would load single "
    "numbers, and the library fills most of its blocks with zeros.",
    ActionKind.LIBRARY: "Products and convolutions where `torch.compile`, which calls the library, is faster than the kernels.",
    ActionKind.RECOMPUTE: "Cheap elementwise values that several kernels read: computing them again takes less time than writing "
    "and reading them.",
    ActionKind.CHUNK_ROWS: "A linear layer with a large vocabulary and its loss: the logits of all rows take more memory "
    "than everything else.",
    ActionKind.RECOMPUTE_ATTENTION: "Training with long sequences: the probabilities of an attention grow with the square of the "
    "length, and take more memory than everything else.",
    ActionKind.CUDA_GRAPH: "Calls whose launches take longer on the host than the kernels take on the GPU: many small kernels.",
    ActionKind.AUTOTUNE: "Every kernel that is worth the seconds of measuring: the model predicts well which configurations are "
    "good, but not which one is the best.",
}
"""For each action, the situation in which it saves time, for users; the pages of `docs/actions` show it."""

__all__ = ["BY_KIND", "HANDLERS", "WHEN_IT_PAYS", "IllegalAction", "apply_action", "opening", "proposals"]


def apply_action(graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
    """The schedule after ``action``; the same arguments give the same schedule.

    Args:
        graph: as captured; the schedule's own rewrites are taken into account.

    Raises:
        IllegalAction: it does not apply.
    """
    return BY_KIND[action.kind].apply(graph, schedule, action)


def opening(situation: Situation) -> MacroAction | None:
    """The first of all :func:`proposals`, if that is known without searching for the others: that of a network."""
    if situation.timing is not None:
        return None
    return network_opening(situation) or next(iter(BY_KIND[ActionKind.CUDA_GRAPH].propose(situation)), None)


def proposals(situation: Situation) -> list[MacroAction]:
    """Legal actions that are worth trying, most predicted saving first."""
    whole = network_opening(situation)
    actions: list[MacroAction] = [whole] if whole is not None else []
    for handler in HANDLERS:
        # After the deadline, only search for a first fusion: every other action needs a kernel.
        if not situation.is_late or (handler.kind is ActionKind.FUSE and not actions):
            actions += handler.propose(situation)
    if not actions and situation.has_gpu and not situation.schedule.kernels and not situation.history:
        actions = fuse.uncertain(situation)
    overhead = LaunchOverhead(situation, BY_KIND)
    host_us = {action.key: overhead.saved_us(action) for action in actions}
    most = max(host_us.values(), default=0.0)

    def rank(action: MacroAction) -> tuple[bool, bool, bool, float, str]:
        # If fusions save host time, a CUDA graph need not.
        more = -most if action.kind is ActionKind.CUDA_GRAPH else host_us[action.key]
        # The memory format of all images affects the gain of every other action, so it goes first. So does a loop that saves
        # much memory, or time before there are kernels: kernels for the values in the loop would be dropped by it.
        loops_first = (
            action.kind is ActionKind.CHUNK_ROWS and not situation.schedule.kernels and action.expected.saved_us > 0
        )
        saves_much = action.expected.saved_memory >= MUCH_MEMORY
        goes_first = action.params.get("rule") == propagation.RULE or saves_much or loops_first
        # Before all of them, a CUDA graph as the first step: it shows their gains.
        opens = action.kind is ActionKind.CUDA_GRAPH and situation.timing is None
        return action is not whole, not opens, not goes_first, -(action.expected.saved_us + more), action.key

    return sorted(actions, key=rank)
