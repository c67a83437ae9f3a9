"""The first version of a network: everything between its library calls becomes kernels in one step.

A step is compiled, verified and timed in 10 to 20 s for a whole network, so a budget of a minute has room for two or three. One
fusion per step would leave most of the network as it is. So the first step takes all fusions that need no measurement: those of
operations that are limited by memory bandwidth, and attentions whose probabilities the user's code writes to memory. Products and
convolutions stay library calls, which only a measurement can beat. If the network has convolutions, all images are channels-last
where the model predicts a gain. The copies of weights in that layout do not depend on one another, so up to eight share a launch.

If this version fails, the plain CUDA graph and single groups of fusions are tried, as for other targets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.actions.algebra import with_kernels
from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, new_plan, region_at, size_text
from mtmc_lsp.actions.side_by_side import SideBySide
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.repeated_blocks import MANY
from mtmc_lsp.fusion.search import Fusion
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import RegionKind, is_product
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites.graph_editing import CONVOLUTIONS, base_name
from mtmc_lsp.rewrites.whole_graph import convolution_biases, one_position
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.schedule.schedule import MOST_BESIDE, Rewrite, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.tuning.cost import Cost, matmul_flops

FIRST_LAUNCHES = 32
"""A call with more operations than this is a network. Fewer operations become few kernels, which are tried one by one."""
RULES = "rules"
"""The parameter of an action that names rewrites of the whole graph."""
WHOLE_GRAPH = (convolution_biases.RULE, one_position.RULE, propagation.RULE)
"""The rewrites of a whole graph, in the order in which they are applied."""
BESIDE = "beside"
"""The parameter of an action that names kernels that share a launch, by their last nodes."""
PROBABILITIES = frozenset({"softmax", "_softmax", "_safe_softmax"})
"""Operations that an attention has between its products, where the user's code writes these out."""


@dataclass(frozen=True)
class FirstVersion:
    """A network with kernels between its library calls, and the predicted costs."""

    schedule: Schedule
    kernels: list[dict[str, object]]
    """Nodes and configuration of each kernel, as an action names them."""
    before: Cost
    after: Cost

    @property
    def rules(self) -> list[str]:
        """The rewrites of the whole graph."""
        return [rewrite.rule for rewrite in self.schedule.rewrites]

    @property
    def is_packed(self) -> bool:
        """Whether all images are channels-last."""
        return propagation.RULE in self.rules

    @property
    def region(self) -> tuple[str, ...]:
        """The nodes of all kernels."""
        return tuple(name for plan in self.schedule.kernels for name in plan.nodes)

    @property
    def params(self) -> dict[str, object]:
        """The parameters of an action that leads to this version."""
        beside = [list(group) for group in self.schedule.side_by_side]
        rules = {RULES: self.rules} if self.rules else {}
        return {"kernels": self.kernels, **rules, **({BESIDE: beside} if beside else {})}

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
        if convolution_biases.RULE in self.rules:
            text += " Biases of convolutions, which it would add in separate launches, are added by the kernels."
        if one_position.RULE in self.rules:
            text += " Convolutions of images with one position run as linear layers, in one launch each."
        return text


def is_network(situation: Situation) -> bool:
    """Whether the first step may change all operations: the target has many, and no loop over time, which gets separate steps."""
    graph = situation.ir.graph
    if graph.backward is not None or any(node.loop is not None or node.row_loop is not None for node in graph.nodes):
        return False
    return launch_count(situation.ir, situation.schedule) > FIRST_LAUNCHES


def first_version(situation: Situation, *, rewrites: bool = True) -> FirstVersion | None:
    """The first version of a network; None if few fusions are possible, or another version is there already.

    Args:
        rewrites: whether it may change the whole graph.
    """
    schedule = situation.schedule
    if schedule.kernels or schedule.rewrites or not is_network(situation):
        return None
    graph = situation.ir.graph
    plain = _with_exact_rules(situation) if rewrites else schedule
    versions = [_fused(situation, plain)]
    if rewrites and propagation.matches(graph) and _keeps_precision(graph):
        versions.append(_fused(situation, with_rules(plain, [propagation.RULE])))
    possible = [version for version in versions if version is not None and len(version.kernels) >= MANY]
    return min(possible, key=lambda version: version.after.us, default=None)


def _with_exact_rules(situation: Situation) -> Schedule:
    """The schedule with the rewrites of the whole graph that need no choice."""
    schedule = situation.schedule
    for rule in (convolution_biases, one_position):
        if rule.matches(ir_for(situation.graph, schedule).graph):
            schedule = with_rules(schedule, [rule.RULE])
    return schedule


def with_rules(schedule: Schedule, rules: Iterable[object]) -> Schedule:
    """The schedule with rewrites of the whole graph.

    Raises:
        IllegalAction: there is no such rewrite.
    """
    for rule in rules:
        if rule not in WHOLE_GRAPH:
            raise IllegalAction(f"there is no rewrite {rule} of a whole graph")
        schedule = replace(schedule, rewrites=(*schedule.rewrites, Rewrite(str(rule), "")))
    return schedule


def rules_of(action: MacroAction) -> Sequence[object]:
    """The rewrites of the whole graph that an action names."""
    rules = action.params.get(RULES)
    return rules if isinstance(rules, (list, tuple)) else ()


def with_first_version(graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
    """The schedule with the rewrites, kernels and shared launches of an action.

    Raises:
        IllegalAction: they do not apply.
    """
    schedule = with_rules(schedule, rules_of(action))
    schedule = with_kernels(ir_for(graph, schedule), schedule, action)
    beside = action.params.get(BESIDE)
    if not beside:
        return schedule
    return SideBySide().apply(graph, schedule, replace(action, params={"launches": beside}))


def with_copies_of_weights(situation: Situation, version: FirstVersion) -> FirstVersion:
    """The version with kernels for the copies of weights, several in a launch; the same if there are few copies."""
    ir = ir_for(situation.graph, version.schedule)
    weights = {item.name for item in ir.graph.inputs if item.kind is not InputKind.ARGUMENT}
    copies = [
        node
        for node in ir.graph.nodes
        if node.name not in situation.ir.graph.named
        and base_name(node) == "clone"
        and {ref.name for ref in node.inputs()} <= weights
    ]
    try:
        after, groups = version.schedule, dict[int, list[str]]()
        added: list[dict[str, object]] = []
        for node in copies:
            plan = after.kernel_of(node.name)
            if plan is None:
                config = default_config(ir, region_at(ir, (node.name,)), situation.device)
                plan = new_plan(ir, (node.name,), to_json(config))
                after = after.with_kernel(plan)
                added.append({"nodes": list(plan.nodes), "config": to_json(plan.config)})
            if plan.nodes == (node.name,):
                groups.setdefault(plan.config.warps, []).append(plan.key)
        parts = [keys[i : i + MOST_BESIDE] for keys in groups.values() for i in range(0, len(keys), MOST_BESIDE)]
        launches = [part for part in parts if len(part) > 1]
        if not launches:
            return version
        action = MacroAction(ActionKind.SIDE_BY_SIDE, (), (0, 0), {"launches": launches})
        after = SideBySide().apply(situation.graph, after, action)
        cost = situation.cost(after)
    except IllegalAction:
        return version
    if cost.us >= version.after.us:
        return version
    return replace(version, schedule=after, kernels=[*version.kernels, *added], after=cost)


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
    return FirstVersion(after, kernels, situation.present, cost)


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
    """Fusions without products, convolutions and ``taken`` nodes; the library runs products that no kernel contains.

    Depthwise convolutions have no products, but a kernel would compute the operations before them once for each position of a
    window. A later step measures that.
    """
    inside = {name for kernel in schedule.kernels for name in kernel.nodes}
    calls = {
        node.name
        for node in ir.graph.nodes
        if node.name not in inside and (base_name(node) in CONVOLUTIONS or matmul_flops(ir, node.name))
    }
    search = situation.search_in(replace(ir, opaque=ir.opaque | calls | set(taken)), schedule)
    return [fusion for fusion in search.best() if not is_product(fusion.region)]


def _keeps_precision(graph: Graph) -> bool:
    """Whether the library's precision does not depend on the layout."""
    return all(
        graph.convolution_mode(node.name) == graph.fp32_convolution
        for node in graph.nodes
        if base_name(node) in propagation.CONVOLUTIONS
    )
