"""The first step of loops and recurrent layers with a launch for each iteration: their kernels and a CUDA graph.

Without the graph, the host takes longer for a launch than the GPU for an iteration.
"""

from __future__ import annotations

from mtmc_lsp.actions.base import Situation, expected
from mtmc_lsp.actions.networks.first_version import is_network
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.search import Fusion
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.recurrence import recurrence_in, recurrence_of, steps_and_batch
from mtmc_lsp.schedule.configs import LoopConfig, PrecisionMode, RecurrentConfig, precision_of
from mtmc_lsp.tuning.cost import ZERO

LEAST_REPLAYED = 16
"""Launches from which on a CUDA graph is tried as the first step; fewer take as long as copies of arguments. An estimate."""
MOST_REPLAYED = 8192
"""Launches of the largest CUDA graph that is tried as the first step. An estimate: each call of other sizes captures its own."""


def launched_loops(situation: Situation, rationale: str) -> MacroAction | None:
    """The kernels of all such loops and layers, replayed as one CUDA graph; None if there are none, or a version exists.

    A network with recurrent layers has another first version.

    Args:
        rationale: why a CUDA graph pays.
    """
    if not situation.has_gpu or situation.timing is not None or situation.schedule.kernels:
        return None
    ir = situation.ir
    layers = {prim.origin for prim in ir.prims.values() if prim.op is PrimOp.RECURRENT}
    if layers and is_network(situation):
        layers.clear()
    loops = [node.name for node in ir.graph.nodes if node.loop is not None or node.name in layers]
    if not loops:
        return None
    fusions = [fusion for fusion in situation.search().best(loops) if _is_launched(fusion)]
    launches = sum(_launches(ir, each) for each in fusions)
    if not LEAST_REPLAYED <= launches <= MOST_REPLAYED:
        return None
    before, after = ZERO, ZERO
    for each in fusions:
        before, after = before + each.before, after + each.after
    of_layers = all(isinstance(each.config, RecurrentConfig) for each in fusions)
    noun, step = ("recurrent layer", "step") if of_layers else ("loop", "iteration")
    what = f"each {step} of the {noun}{'s' if len(fusions) > 1 else ''} as one launch"
    return MacroAction(
        kind=ActionKind.CUDA_GRAPH,
        region=tuple(name for each in fusions for name in each.region.nodes),
        lines=(0, 0),
        params={
            "launches": launches,
            "kernels": [{"nodes": list(each.region.nodes), "config": to_json(each.config)} for each in fusions],
        },
        rationale=f"Each {step} is one launch, in which all multiprocessors share the matrices. {rationale}",
        expected=expected(before, after),
        text=f"Run {what}, and replay all launches as one CUDA graph",
        changes_rounding=any(precision_of(each.config) is PrecisionMode.TF32X3 for each in fusions),
    )


def _is_launched(fusion: Fusion) -> bool:
    config = fusion.config
    return isinstance(config, RecurrentConfig) or (isinstance(config, LoopConfig) and config.is_stepwise)


def _launches(ir: KernelIR, fusion: Fusion) -> int:
    """The launches of a loop or of recurrent layers, whose independent steps share a launch."""
    if isinstance(fusion.config, LoopConfig):
        return loop_in(ir, fusion.region).loop.count.value(ir.graph.sizes)
    prim = recurrence_in(ir, fusion.region)
    return recurrence_of(prim).launches(steps_and_batch(ir, prim)[0].value(ir.graph.sizes))
