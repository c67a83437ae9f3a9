"""Chunk rows: the operations around a large matrix product run for one chunk of its rows after another.

A linear layer with a large vocabulary and its loss need logits, probabilities and their gradients: tensors that are larger than
all operands and results together. In a loop over chunks of rows, they exist for one chunk at a time. The products stay calls of
the library, and the operations between them become kernels.

The backward pass computes the logits of a chunk again from the operands; of the forward pass, a few numbers a row are saved. If
the loss is one number and every gradient is a multiple of its upstream gradient, the forward pass computes the gradients
instead, and each logit is computed once.

*Legal* when each row of the values of the product's size depends on one row of the product alone, until they are reduced to a
few numbers a row or summed over all rows (gradients of the weights), and no other operation needs such a value whole. A softmax
over the rows is refused, and so is a target that returns the logits. Logits that are sliced after the product
(``logits[:, :-1]``) are computed from the slice of the operand, if nothing reads the other rows. Sums over rows are added chunk
by chunk, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, lines_of, new_plan, size_text
from mtmc_lsp.actions.titles import layer_of
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import PRODUCTS, Graph, Node
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import KernelIR, ProductSizes
from mtmc_lsp.rewrites.row_loops import RULE
from mtmc_lsp.schedule.schedule import KernelPlan, Rewrite, Schedule
from mtmc_lsp.tuning.cost import tensor_bytes
from mtmc_lsp.tuning.memory import peak_bytes

LEAST_SAVED_BYTES = 32e6
"""Predicted memory below which a loop is not worth its launches."""
LEAST_SAVED_SHARE = 0.1
"""Memory that a loop must save, as a share of what a call with the loop allocates."""
MOST_CHUNKS = 8
"""Most chunks with gradients: each one reads and writes the gradient of the weights, and rounds it again if it has 16 bits."""
TILE_ROWS, TILE_COLUMNS = 128, 256
"""Tile of the library's products. The chunks have enough rows for one tile for each multiprocessor, if there are as many."""
MOST_SLOWER = 1.05
"""Predicted time, relative to that of the present version, up to which memory is worth it."""


class ChunkRows:
    """Runs the operations around a product in a loop over chunks of its rows."""

    kind = ActionKind.CHUNK_ROWS

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule with the loops and their kernels; kernels of nodes that are now in a loop are dropped."""
        changed = _rewritten(schedule, action.params)
        ir = ir_for(graph, changed)
        kernels = tuple(
            plan for plan in schedule.kernels if set(plan.nodes) | set(plan.recomputed) <= set(ir.graph.named)
        )
        changed = replace(changed, kernels=kernels)
        named = action.params.get("kernels")
        if named is None:
            plans = tuple(plan for body in _new_bodies(ir, schedule) for plan in _kernels(body, default_model()))
        else:
            plans = tuple(plan for body in _new_bodies(ir, schedule) for plan in _named_kernels(body, named))
        return replace(changed, loop_kernels=(*schedule.loop_kernels, *plans))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Products whose rows need much memory."""
        ir = situation.ir
        seen: set[str] = set()
        for node in ir.graph.nodes:
            if situation.is_late:
                return
            if node.name in seen or not _is_large(ir, node, situation.device):
                continue
            try:
                action = self._proposed(situation, node)
            except IllegalAction:
                continue
            yield action
            # One of two products that a loop contains, such as those of a student and a teacher.
            seen |= set(action.region)

    def _proposed(self, situation: Situation, node: Node) -> MacroAction:
        """The faster one of both ways to compute gradients.

        Raises:
            IllegalAction: no loop is legal and worth its time.
        """
        ways, refused = list[MacroAction](), ""
        for is_early in (True, False) if situation.graph.backward is not None else (False,):
            try:
                ways.append(self._one_way(situation, node, is_early=is_early))
            except IllegalAction as reason:
                refused = str(reason)
        if not ways:
            raise IllegalAction(refused)
        return max(ways, key=lambda action: action.expected.saved_us)

    def _one_way(self, situation: Situation, node: Node, *, is_early: bool) -> MacroAction:
        ir, graph, schedule = situation.ir, situation.graph, situation.schedule
        rows = chunk_rows(ir, node, situation.device)
        params: dict[str, object] = {"node": node.name, "rows": rows, "early": is_early}
        if not is_early:
            del params["early"]
        bodies = _new_bodies(ir_for(graph, _rewritten(schedule, params)), schedule)
        plans = [plan for body in bodies for plan in _kernels(body, situation.device)]
        params["kernels"] = [{"nodes": list(plan.nodes), "config": to_json(plan.config)} for plan in plans]
        region = tuple(each.name for each in ir.graph.nodes if any(each.name in body.named for body in bodies))
        action = MacroAction(self.kind, region, lines_of(ir, region), params)
        after = self.apply(graph, schedule, action)
        cost = situation.cost(after)
        needed = peak_bytes(graph, after)
        # The product and its gradient are in memory in any version without a loop; other values of that size may be.
        sizes = ir.graph.sizes
        whole = tensor_bytes(node.type, sizes) * (2.0 if graph.backward is not None else 1.0)
        saved = whole * (1.0 - rows * node.type.shape[-1].value(sizes) / node.type.numel.value(sizes))
        if saved < max(LEAST_SAVED_BYTES, LEAST_SAVED_SHARE * needed):
            raise IllegalAction("chunk-rows: the loop saves too little memory")
        if cost.us > MOST_SLOWER * situation.present.us:
            raise IllegalAction("chunk-rows: the loop takes more time")
        before = situation.present
        memory = f"That saves at least {size_text(saved)} of memory; a call allocates {size_text(needed)} (estimates)."
        return replace(
            action,
            expected=Expected(
                before.us - cost.us, before.bytes, cost.bytes, before.flops, cost.flops, saved_memory=saved
            ),
            text=f"Compute {_name(ir.graph, node)} and its gradients in chunks of {rows} rows"
            if graph.backward is not None
            else f"Compute {_name(ir.graph, node)} and what follows in chunks of {rows} rows",
            rationale=f"The values of this size never exist for all rows: a loop computes them for {rows} rows at a time. "
            f"{_gradients_text(graph, is_early=is_early)}{memory}",
        )


def _gradients_text(graph: Graph, *, is_early: bool) -> str:
    if graph.backward is None:
        return ""
    if is_early:
        return (
            "The loss is one number, and all gradients are multiples of its gradient: the forward pass computes them, and "
            "the backward pass multiplies them. "
        )
    return "The backward pass computes them again, because its upstream gradients are not known before. "


def _rewritten(schedule: Schedule, params: Mapping[str, object]) -> Schedule:
    """The schedule with the rewrite of an action.

    Raises:
        IllegalAction: the action has no number of rows.
    """
    rows = params.get("rows")
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise IllegalAction("chunk-rows: a chunk has at least one row")
    detail = (rows, 1) if params.get("early") else (rows,)
    return replace(schedule, rewrites=(*schedule.rewrites, Rewrite(RULE, str(params.get("node", "")), detail)))


def chunk_rows(ir: KernelIR, node: Node, device: DeviceModel) -> int:
    """Rows of a chunk: enough to fill the device with the smallest product, and not more than a few chunks."""
    prim = ir.product_of_node(node.name)
    assert prim is not None
    sizes, sized = ir.graph.sizes, ProductSizes.of(ir.prims, prim)
    rows, narrow = prim.shape[0].value(sizes), min(sized.k.value(sizes), sized.n.value(sizes))
    tiles = -(-narrow // TILE_COLUMNS)
    # The nearest number of tiles: a last wave that is nearly empty costs as much as a full one.
    filling = max(1, round(device.sm_count / tiles)) * TILE_ROWS
    most = MOST_CHUNKS if ir.graph.backward is not None else rows
    chunk = max(-(-rows // most), min(filling, -(-rows // 2)))
    return -(-chunk // TILE_ROWS) * TILE_ROWS


def _is_large(ir: KernelIR, node: Node, device: DeviceModel) -> bool:
    """Whether a node is a product with more columns than summed elements, and several chunks of rows."""
    if node.word not in PRODUCTS or node.row_loop is not None:
        return False
    prim = ir.product_of_node(node.name)
    if prim is None or len(prim.shape) != 2:
        return False
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    rows, columns = prim.shape[0].value(sizes), sized.n.value(sizes)
    is_wide = columns >= 2 * sized.k.value(sizes) and rows >= 2
    return is_wide and rows * columns * 2 >= LEAST_SAVED_BYTES / 2 and chunk_rows(ir, node, device) < rows


def _new_bodies(ir: KernelIR, before: Schedule) -> list[Graph]:
    """The bodies of the loops that no earlier rewrite made."""
    known = {name for plan in before.loop_kernels for name in plan.nodes}
    bodies = [node.row_loop.body for node in ir.graph.nodes if node.row_loop is not None]
    return [body for body in bodies if not known & set(body.named)]


def _kernels(body: Graph, device: DeviceModel) -> tuple[KernelPlan, ...]:
    """The fused kernels of a chunk; its products stay calls of the library."""
    search = FusionSearch(_without_products(lower(body)), Schedule(), device)
    return tuple(KernelPlan(fusion.region.nodes, fusion.config) for fusion in search.best())


def _without_products(ir: KernelIR) -> KernelIR:
    products = frozenset(node.name for node in ir.graph.nodes if node.word in PRODUCTS)
    return replace(ir, opaque=ir.opaque | products)


def _named_kernels(body: Graph, named: object) -> Iterable[KernelPlan]:
    """The kernels of an action that belong to a loop."""
    for item in named if isinstance(named, (list, tuple)) else ():
        if set(item["nodes"]) <= set(body.named):
            yield new_plan(lower(body), item["nodes"], item["config"])


def _name(graph: Graph, node: Node) -> str:
    return layer_of(graph, node) or node.variable or "the product"
