"""Opening: the first step of a network, as a CUDA graph, a change of layouts or a fusion at many places."""

from __future__ import annotations

from mtmc_lsp.actions.base import IllegalAction, Situation, expected, ir_for, lines_of
from mtmc_lsp.actions.convolution import ChannelsLast
from mtmc_lsp.actions.cuda_graph import RATIONALE, CudaGraph, saved_us
from mtmc_lsp.actions.fuse import SITES, Fuse
from mtmc_lsp.actions.networks.first_version import FirstVersion, first_version
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.schedule.launch_units import launch_count

HANDLERS = {handler.kind: handler for handler in (CudaGraph(), ChannelsLast(), Fuse())}


def network_opening(situation: Situation) -> MacroAction | None:
    """The first step of a network: kernels between its library calls, in a CUDA graph where launches take most of the time."""
    if not situation.has_gpu or situation.timing is not None:
        return None
    version = first_version(situation)
    if version is None or version.after.us >= version.before.us:
        return None
    for action in _forms(situation, version):
        try:
            HANDLERS[action.kind].apply(situation.graph, situation.schedule, action)
        except IllegalAction:
            continue
        return action
    return None


def _forms(situation: Situation, version: FirstVersion) -> list[MacroAction]:
    """Actions that lead to the version, the best first."""
    ir = ir_for(situation.graph, version.schedule)
    saving = expected(version.before, version.after)
    kernels = version.params["kernels"]
    layout: dict[str, object] = {"rule": propagation.RULE, "node": "", "kernels": kernels}
    direct = MacroAction(
        kind=ActionKind.CHANNELS_LAST if version.is_packed else ActionKind.FUSE,
        region=version.region,
        lines=lines_of(ir, version.region),
        params=layout if version.is_packed else {SITES: kernels},
        rationale=version.rationale,
        expected=saving,
        text=version.text,
    )
    if not saved_us(situation, version.schedule):
        return [direct]
    launches = launch_count(ir, version.schedule)
    replayed = MacroAction(
        kind=ActionKind.CUDA_GRAPH,
        region=version.region,
        lines=(0, 0),
        params={"launches": launches, **version.params},
        rationale=f"{version.rationale} {RATIONALE}",
        expected=saving,
        text=f"{version.text}, and replay all launches as one CUDA graph",
    )
    return [replayed, direct]
