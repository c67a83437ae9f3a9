"""Opening: the first step of a network, as a CUDA graph, a change of layouts or a fusion at many places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtmc_lsp.actions.base import SITES, IllegalAction, Situation, expected, ir_for, lines_of
from mtmc_lsp.actions.convolution import ChannelsLast
from mtmc_lsp.actions.cuda_graph import RATIONALE, CudaGraph, saved_us
from mtmc_lsp.actions.fuse import Fuse
from mtmc_lsp.actions.networks.first_version import RULES, FirstVersion, first_version, with_copies_of_weights
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


def _forms(situation: Situation, version: FirstVersion) -> Iterator[MacroAction]:
    """Actions that lead to the version, or one like it; the best first."""
    if saved_us(situation, version.schedule):
        replayed = with_copies_of_weights(situation, version)
        yield _action(
            situation,
            replayed,
            ActionKind.CUDA_GRAPH,
            {
                "launches": launch_count(ir_for(situation.graph, replayed.schedule), replayed.schedule),
                **replayed.params,
            },
            f" {RATIONALE}",
            ", and replay all launches as one CUDA graph",
        )
    if version.is_packed:
        yield _action(
            situation, version, ActionKind.CHANNELS_LAST, {"rule": propagation.RULE, "node": "", **version.params}
        )
    else:
        rules = {RULES: version.rules} if version.rules else {}
        yield _action(situation, version, ActionKind.FUSE, {SITES: version.kernels, **rules})
    unchanged = first_version(situation, rewrites=False) if version.rules else None
    if unchanged is not None:
        yield _action(situation, unchanged, ActionKind.FUSE, {SITES: unchanged.kernels})


def _action(
    situation: Situation,
    version: FirstVersion,
    kind: ActionKind,
    params: Mapping[str, object],
    why: str = "",
    text: str = "",
) -> MacroAction:
    is_graph = kind is ActionKind.CUDA_GRAPH
    return MacroAction(
        kind=kind,
        region=version.region,
        lines=(0, 0) if is_graph else lines_of(ir_for(situation.graph, version.schedule), version.region),
        params=dict(params),
        rationale=f"{version.rationale}{why}",
        expected=expected(version.before, version.after),
        text=f"{version.text}{text}",
    )
