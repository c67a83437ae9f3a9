"""Loops whose iterations are launches, as the first step: together with a CUDA graph, without which the host is the limit."""

from __future__ import annotations

from mtmc_lsp.actions.base import Situation, expected
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.search import Fusion
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.schedule.configs import LoopConfig, PrecisionMode, precision_of
from mtmc_lsp.tuning.cost import ZERO

MOST_REPLAYED = 8192
"""Launches of the largest CUDA graph that is tried as the first step. An estimate: each call of other sizes captures its own."""


def launched_loops(situation: Situation, rationale: str) -> MacroAction | None:
    """The kernels of all such loops, replayed as one CUDA graph; None if there are none, or another version is there already.

    Args:
        rationale: why a CUDA graph pays.
    """
    graph = situation.ir.graph
    loops = [node.name for node in graph.nodes if node.loop is not None]
    if not loops or not situation.has_gpu or situation.timing is not None or situation.schedule.kernels:
        return None
    fusions = [fusion for fusion in situation.search().best(loops) if _is_launched(fusion)]
    launches = sum(loop_in(situation.ir, each.region).loop.count.value(graph.sizes) for each in fusions)
    if not fusions or launches > MOST_REPLAYED:
        return None
    before, after = ZERO, ZERO
    for each in fusions:
        before, after = before + each.before, after + each.after
    what = (
        "each iteration of the loop as one launch" if len(fusions) == 1 else "each iteration of the loops as one launch"
    )
    return MacroAction(
        kind=ActionKind.CUDA_GRAPH,
        region=tuple(name for each in fusions for name in each.region.nodes),
        lines=(0, 0),
        params={
            "launches": launches,
            "kernels": [{"nodes": list(each.region.nodes), "config": to_json(each.config)} for each in fusions],
        },
        rationale=f"An iteration is one launch, in which all multiprocessors share the matrices. {rationale}",
        expected=expected(before, after),
        text=f"Run {what}, and replay all launches as one CUDA graph",
        changes_rounding=any(precision_of(each.config) is PrecisionMode.TF32X3 for each in fusions),
    )


def _is_launched(fusion: Fusion) -> bool:
    return isinstance(fusion.config, LoopConfig) and fusion.config.is_stepwise
