"""Recompute attention: the backward pass computes the probabilities of an attention again, so that they are not saved.

The forward pass is one kernel with the online softmax, which saves the result, and the maximum and the sum of each row. In the
backward pass, one kernel sums the gradients of keys and values over blocks of queries, and another one the gradients of the
queries over blocks of keys. Each computes a tile of probabilities again, and none of them adds atomically.

*Legal* when the attention is a product, elementwise operations (a scale, a mask, a bias that needs no gradient), a softmax over
the keys and a product; no other operation reads its scores or probabilities; the operands of the products are in memory; and a
head has at most 128 elements. The gradient of a softmax subtracts the sum of probabilities times their gradients, which equals
the sum of the result times its gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from mtmc_lsp.actions.algebra import nodes_of
from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    expected,
    ir_for,
    lines_of,
    named_configs,
    new_plan,
    region_at,
    region_of,
    size_text,
)
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import PRODUCTS, Graph, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.attention_pattern import join_tiles
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.primitives import CHEAP, VIEW_OPS, KernelIR
from mtmc_lsp.ir.regions import RegionKind
from mtmc_lsp.rewrites.attention_gradients import LAYOUT, RULE, attention_of, is_cheap
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, base_name
from mtmc_lsp.rewrites.saved_values import split
from mtmc_lsp.schedule.schedule import KernelPlan, Rewrite, Schedule
from mtmc_lsp.tuning.cost import tensor_bytes
from mtmc_lsp.tuning.memory import peak_bytes

MOST_SLOWER = 1.05
"""Predicted time, relative to that of the present version, up to which memory is worth it."""


class RecomputeAttention:
    """Computes the probabilities of attentions again in the backward pass."""

    kind = ActionKind.RECOMPUTE_ATTENTION

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule with three or four kernels for each attention, in place of the kernels of its operations."""
        changed = schedule
        for name in nodes_of(action):
            before = ir_for(graph, changed).graph
            try:
                inside = (*(found := attention_of(before, name)).inside, *found.outcome)
            except CannotRewrite as reason:
                raise IllegalAction(f"recompute-attention: {reason}") from None
            changed = replace(changed, rewrites=(*changed.rewrites, Rewrite(RULE, name)))
            ir = ir_for(graph, changed)
            plans = _plans(ir, inside, action)
            taken = {each for plan in plans for each in (*plan.nodes, *plan.recomputed)}
            kept = tuple(plan for plan in changed.kernels if _is_valid(ir, plan) and not taken & set(plan.nodes))
            changed = replace(changed, kernels=(*kept, *plans))
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """All attentions of the target whose probabilities are saved."""
        graph = situation.ir.graph
        names: list[str] = []
        for node in graph.nodes:
            if base_name(node) in PRODUCTS and node.name not in graph.backward_nodes and not situation.is_late:
                try:
                    attention_of(graph, node.name)
                    self.apply(
                        situation.graph, situation.schedule, MacroAction(self.kind, (), (0, 0), {"node": node.name})
                    )
                except (CannotRewrite, IllegalAction):
                    continue
                names.append(node.name)
        if not names:
            return
        try:
            action = self._action(situation, names)
        except IllegalAction:
            return
        yield action

    def _action(self, situation: Situation, names: Sequence[str]) -> MacroAction:
        """The action for some attentions.

        Raises:
            IllegalAction: it needs more time, or saves no memory.
        """
        graph, schedule, ir = situation.graph, situation.schedule, situation.ir
        region = [name for each in names for name in (*attention_of(ir.graph, each).inside, each)]
        params: dict[str, object] = {"node": names[0]} if len(names) == 1 else {"node": names[0], "nodes": list(names)}
        action = MacroAction(self.kind, tuple(region), lines_of(ir, region), params)
        after = self.apply(graph, schedule, action)
        after_ir = ir_for(graph, after)
        new = [plan for plan in after.kernels if schedule.kernel_of(plan.key) is None]
        if named := named_configs(after_ir, new, situation.device):
            action = replace(action, params={**params, "kernels": named})
            after = self.apply(graph, schedule, action)
        cost = situation.cost(after)
        saved = saved_bytes(ir.graph), saved_bytes(after_ir.graph)
        if saved[1] >= saved[0]:
            raise IllegalAction("recompute-attention: it saves no memory")
        if cost.us > MOST_SLOWER * situation.present.us:
            raise IllegalAction("recompute-attention: the kernels take more time")
        memory = max(0.0, peak_bytes(graph, schedule) - peak_bytes(graph, after))
        places = f", and of {len(names) - 1} more" if len(names) > 1 else ""
        return replace(
            action,
            expected=replace(expected(situation.present, cost), saved_memory=memory),
            text=f"Compute the probabilities of the attention{places} again in the backward pass",
            rationale=f"Besides inputs and results, {size_text(saved[1])} are saved for the backward pass instead of "
            f"{size_text(saved[0])}, the maximum and the sum of each row of scores included. Scores and probabilities are "
            f"computed again, tile by tile. A call allocates {size_text(memory)} less at its peak (estimates).",
        )


def saved_bytes(graph: Graph) -> float:
    """Bytes of the values besides inputs and results that the forward pass keeps for the backward pass."""
    passes = split(graph)
    kept = {ref for ref in passes.saved if ref.name in passes.forward.named} - set(graph.forward_outputs)
    return sum(tensor_bytes(graph.type_of(ref), graph.sizes) for ref in kept if not _is_view_of_input(graph, ref))


def _is_view_of_input(graph: Graph, ref: Ref) -> bool:
    """Whether a value shares its memory with an input."""
    while ref.name in graph.named and base_name(graph.node(ref.name)) in LAYOUT - {"clone"}:
        ref = next(iter(graph.node(ref.name).inputs()))
    return ref.name not in graph.named


def _plans(ir: KernelIR, inside: Sequence[str], action: MacroAction) -> list[KernelPlan]:
    """The kernels of an attention: of the forward pass, of the sums that the gradients subtract, and of the gradients.

    Raises:
        IllegalAction: one of them is not legal.
    """
    graph = ir.graph
    assert graph.backward is not None
    log_total = graph.backward.early[-1]
    forward = [node.name for node in graph.nodes if node.name in {*inside, log_total}]
    plans = [_plan(ir, forward, action)]
    if region_of(ir, plans[0]).kind is not RegionKind.ATTENTION:
        raise IllegalAction("recompute-attention: the forward pass is no attention of one kernel")
    tiles, results = _tiles(ir, log_total)
    if any(ref.name in tiles for ref in graph.escaping):
        raise IllegalAction("recompute-attention: the gradient of a bias needs those of all scores")
    sums = [_with_views_before(ir, each, tiles) for each in _deltas(graph, tiles)]
    plans += [_plan(ir, each, action) for each in sums]
    groups: dict[tuple[Axis, ...], list[str]] = {}
    table = _axes_of(ir, [*tiles, *results])
    for product in results:
        prim = ir.product_of_node(product)
        assert prim is not None
        groups.setdefault(table.of_product(prim).k, []).append(product)
    for products in groups.values():
        nodes = [each for product in products for each in _with_layout_behind(graph, product)]
        plan = _plan(ir, nodes, action, tiles, stored={name for each in sums for name in each})
        if region_of(ir, plan).kind is not RegionKind.ATTENTION_GRADIENT:
            raise IllegalAction("recompute-attention: the product of a gradient does not form a kernel")
        plans.append(plan)
    return plans


def _plan(
    ir: KernelIR, nodes: Sequence[str], action: MacroAction, tiles: Iterable[str] = (), stored: Collection[str] = ()
) -> KernelPlan:
    """A kernel that computes some nodes, and computes values of tiles and cheap operands itself if they are not ``stored``."""
    inside = {*nodes, *tiles}
    again = [*tiles, *_cheap_before(ir, inside, stored)]
    ordered = tuple(sorted(again, key=ir.graph.positions.__getitem__))
    needed = region_at(ir, nodes, ordered)
    origins = {ir.prims[each].origin for each in needed.prims}
    recomputed = tuple(each for each in ordered if each in origins)
    named = action.params.get("kernels")
    configs = {tuple(item["nodes"]): item["config"] for item in (named if isinstance(named, (list, tuple)) else ())}
    return new_plan(ir, nodes, configs.get(needed.nodes), recomputed)


def _cheap_before(ir: KernelIR, inside: set[str], stored: Collection[str]) -> list[str]:
    """Nodes outside a kernel that it computes again: views of operands of products, cheap operations elsewhere."""
    graph = ir.graph
    is_backward = next(iter(inside)) in graph.backward_nodes
    pending = [(ref.name, graph.node(name).word in PRODUCTS) for name in inside for ref in graph.node(name).inputs()]
    found: dict[str, None] = {}
    for name, is_operand in pending:
        allowed = VIEW_OPS if is_operand else CHEAP
        is_here = name in graph.named and (name in graph.backward_nodes) == is_backward
        if name in found or name in inside or name in stored or not is_here or not is_cheap(ir, name, allowed):
            continue
        found[name] = None
        pending += [(ref.name, is_operand) for ref in graph.node(name).inputs()]
    return list(found)


def _tiles(ir: KernelIR, log_total: str) -> tuple[list[str], list[str]]:
    """The nodes of the backward pass with an element for each pair of a query and a key, and the products that sum them."""
    graph = ir.graph
    shifted = next(node for node in graph.readers(log_total) if node.name in graph.backward_nodes)
    tiles = _products_before(graph, shifted.name)
    results: list[str] = []
    for node in graph.nodes:
        sources = {ref.name for ref in node.inputs()}
        if node.name not in graph.backward_nodes or node.name in tiles or not sources & set(tiles):
            continue
        if base_name(node) not in PRODUCTS:
            # The gradients of the probabilities; a sum over the keys has one column.
            others = [ref.name for ref in node.inputs() if graph.type_of(ref).shape[-1:] != (Size.of(1),)]
            computed = [name for other in others if other not in tiles for name in _products_before(graph, other)]
            tiles += [name for name in dict.fromkeys(computed) if name not in tiles]
            tiles.append(node.name)
        else:
            results.append(node.name)
    tiles.sort(key=graph.positions.__getitem__)
    return tiles, results


def _products_before(graph: Graph, name: str) -> list[str]:
    """The nodes of the backward pass from the nearest products to a value, the value included."""
    order = list[str]()
    pending = [name]
    reached: set[str] = set()
    while pending:
        current = pending.pop()
        if current in reached or current not in graph.backward_nodes:
            continue
        reached.add(current)
        if base_name(graph.node(current)) not in PRODUCTS:
            pending += [ref.name for ref in graph.node(current).inputs()]
    for node in graph.nodes:
        if node.name not in reached:
            continue
        if base_name(node) in PRODUCTS or {ref.name for ref in node.inputs()} & set(order):
            order.append(node.name)
    return order


def _deltas(graph: Graph, tiles: Sequence[str]) -> list[str]:
    """The sums over rows that nodes of tiles read."""
    read = {ref.name for each in tiles for ref in graph.node(each).inputs()} - set(tiles)
    found = []
    for each in sorted(read & graph.backward_nodes, key=graph.positions.__getitem__):
        node = graph.node(each)
        while base_name(node) in LAYOUT:
            source = graph.named.get(next(iter(node.inputs())).name)
            if source is None:
                break
            node = source
        if base_name(node) == "sum":
            found.append(each)
    return found


def _with_views_before(ir: KernelIR, name: str, tiles: Sequence[str]) -> list[str]:
    """A sum over rows with the operations that compute its operands."""
    graph = ir.graph
    nodes, pending = set[str](), [name]
    while pending:
        current = pending.pop()
        if current in nodes or current not in graph.backward_nodes or current in tiles or current in ir.opaque:
            continue
        if any(reader.name not in nodes for reader in graph.readers(current)) and current != name:
            continue
        nodes.add(current)
        pending += [ref.name for ref in graph.node(current).inputs()]
    return sorted(nodes, key=graph.positions.__getitem__)


def _axes_of(ir: KernelIR, nodes: Sequence[str]) -> AxisTable:
    """The axes that some nodes share."""
    inside = set(nodes)
    prims = [prim for prim in ir.prims.values() if prim.origin in inside]
    table = AxisTable(ir.prims, [prim.name for prim in prims], ir.graph.sizes)
    join_tiles(prims, table)
    return table


def _with_layout_behind(graph: Graph, product: str) -> list[str]:
    """A product and the operations behind it that only change its layout."""
    chain = [product]
    while True:
        following = graph.readers(chain[-1])
        is_returned = any(ref.name == chain[-1] for ref in graph.escaping)
        if is_returned or len(following) != 1 or base_name(following[0]) not in LAYOUT:
            return chain
        chain.append(following[0].name)


def _is_valid(ir: KernelIR, plan: KernelPlan) -> bool:
    """Whether a kernel is still one after the rewrite."""
    if not set(plan.nodes) | set(plan.recomputed) <= set(ir.graph.named):
        return False
    try:
        region_of(ir, plan)
    except IllegalAction:
        return False
    return True
