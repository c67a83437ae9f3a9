"""The first version of a network: everything between its library calls becomes kernels in one step.

A step is compiled, verified and timed in 10 to 20 s for a whole network, so a budget of a minute has room for two or three. One
fusion per step would leave most of the network as it is. So the first step takes all fusions that need no measurement: those of
operations that are limited by memory bandwidth, and attentions whose probabilities the user's code writes to memory. Products and
convolutions stay library calls, which only a measurement can beat. If the network has convolutions, all images are channels-last
where the model predicts a gain.

If this version fails, the plain CUDA graph and single groups of fusions are tried, as for other targets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.actions.algebra import with_kernels
from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, new_plan, size_text
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.repeated_blocks import MANY
from mtmc_lsp.fusion.search import Fusion
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import RegionKind, is_product
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites.graph_editing import base_name
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.schedule.schedule import Rewrite, Schedule
from mtmc_lsp.tuning.cost import Cost, matmul_flops

FIRST_LAUNCHES = 32
"""A call with more operations than this is a network. Fewer operations become few kernels, which are tried one by one."""
LAYOUT = "layout"
"""The parameter of an action that also makes all images channels-last."""
PROBABILITIES = frozenset({"softmax", "_softmax", "_safe_softmax"})
"""Operations that an attention has between its products, where the user's code writes these out."""


@dataclass(frozen=True)
class FirstVersion:
    """A network with kernels between its library calls, and the predicted costs."""

    schedule: Schedule
    kernels: list[dict[str, object]]
    """Nodes and configuration of each kernel, as an action names them."""
    is_packed: bool
    """Whether all images are channels-last."""
    before: Cost
    after: Cost

    @property
    def region(self) -> tuple[str, ...]:
        """The nodes of all kernels."""
        return tuple(name for plan in self.schedule.kernels for name in plan.nodes)

    @property
    def params(self) -> dict[str, object]:
        """The parameters of an action that leads to this version."""
        return {"kernels": self.kernels, **({LAYOUT: propagation.RULE} if self.is_packed else {})}

    @property
    def text(self) -> str:
        """What the version does, for a title."""
        packed = ", with channels last" if self.is_packed else ""
        return f"Fuse the operations between library calls into {len(self.kernels)} kernels{packed}"

    @property
    def rationale(self) -> str:
        """Why it is faster."""
        saved = size_text(self.before.bytes - self.after.bytes)
        text = f"{len(self.kernels)} kernels between library calls save {saved} of memory traffic. Products stay in the library."
        if self.is_packed:
            text += " It computes convolutions with channels last, and need not convert images."
        return text


def is_network(situation: Situation) -> bool:
    """Whether the target has so many operations that its first step changes all of them. Loops over time get separate steps."""
    graph = situation.ir.graph
    if graph.backward is not None or any(node.loop is not None or node.row_loop is not None for node in graph.nodes):
        return False
    return launch_count(situation.ir, situation.schedule) > FIRST_LAUNCHES


def first_version(situation: Situation) -> FirstVersion | None:
    """The first version of a network; None if few fusions are possible, or another version is there already."""
    schedule = situation.schedule
    if schedule.kernels or schedule.rewrites or not is_network(situation):
        return None
    versions = [_fused(situation, schedule)]
    graph = situation.ir.graph
    if propagation.matches(graph) and _keeps_precision(graph):
        packed = replace(schedule, rewrites=(Rewrite(propagation.RULE, ""),))
        versions.append(_fused(situation, packed))
    possible = [version for version in versions if version is not None and len(version.kernels) >= MANY]
    return min(possible, key=lambda version: version.after.us, default=None)


def with_first_version(graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
    """The schedule with the layout and the kernels of an action.

    Raises:
        IllegalAction: they do not apply.
    """
    if action.params.get(LAYOUT) == propagation.RULE:
        schedule = replace(schedule, rewrites=(*schedule.rewrites, Rewrite(propagation.RULE, "")))
    return with_kernels(ir_for(graph, schedule), schedule, action)


def _fused(situation: Situation, schedule: Schedule) -> FirstVersion | None:
    """The schedule with all fusions that need no measurement."""
    try:
        ir = ir_for(situation.graph, schedule)
    except IllegalAction:
        return None
    attentions = _attentions(situation, ir, schedule)
    with_attentions = _version(situation, ir, schedule, attentions)
    # An attention may contain an operation that must run after another kernel.
    return with_attentions if with_attentions or not attentions else _version(situation, ir, schedule, [])


def _version(
    situation: Situation, ir: KernelIR, schedule: Schedule, attentions: Sequence[Fusion]
) -> FirstVersion | None:
    """The schedule with attentions and the fusions between products; None if these cannot run in one order."""
    taken = {name for fusion in attentions for name in fusion.nodes}
    fusions = [*attentions, *between_products(situation, ir, schedule, taken)]
    try:
        after = schedule
        for fusion in fusions:
            after = after.with_kernel(new_plan(ir, fusion.region.nodes, to_json(fusion.config)))
        cost = situation.cost(after)
    except IllegalAction:
        return None
    order = ir.graph.positions
    fusions.sort(key=lambda fusion: order[fusion.region.nodes[0]])
    kernels: list[dict[str, object]] = [
        {"nodes": list(fusion.region.nodes), "config": to_json(fusion.config)} for fusion in fusions
    ]
    return FirstVersion(after, kernels, schedule.rewrites != situation.schedule.rewrites, situation.present, cost)


def _attentions(situation: Situation, ir: KernelIR, schedule: Schedule) -> list[Fusion]:
    """Attentions that the user's code writes as two products and a softmax."""
    near = {node.name for node in ir.graph.nodes if base_name(node) in PROBABILITIES}
    if not near:
        return []
    fusions = situation.search_in(ir, schedule).best(near)
    return [fusion for fusion in fusions if fusion.region.kind is RegionKind.ATTENTION]


def between_products(
    situation: Situation, ir: KernelIR, schedule: Schedule, taken: Collection[str] = ()
) -> list[Fusion]:
    """Fusions without products, and without nodes that are ``taken``; the library runs products that no kernel contains."""
    inside = {name for kernel in schedule.kernels for name in kernel.nodes}
    products = {node.name for node in ir.graph.nodes if node.name not in inside and matmul_flops(ir, node.name)}
    search = situation.search_in(replace(ir, opaque=ir.opaque | products | set(taken)), schedule)
    return [fusion for fusion in search.best() if not is_product(fusion.region)]


def _keeps_precision(graph: Graph) -> bool:
    """Whether the library's precision does not depend on the layout."""
    return all(
        graph.convolution_mode(node.name) == graph.fp32_convolution
        for node in graph.nodes
        if base_name(node) in propagation.CONVOLUTIONS
    )
