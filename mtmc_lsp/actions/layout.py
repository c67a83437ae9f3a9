"""Layout: store an intermediate value in the order in which its reader traverses it.

*Legal* for a value that one kernel writes, only kernels read, and the caller never sees: every kernel computes addresses from the
value's strides, so it writes and reads the same elements. Torch calls might require contiguous rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, operation_names, where
from mtmc_lsp.actions.tuning import measured_choice
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Ref
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.rewrites import layouts
from mtmc_lsp.rewrites.graph_editing import readers
from mtmc_lsp.schedule.schedule import Rewrite, Schedule

SHARE = 0.03
"""Share of the reader's time that it may save: an estimate that only orders the steps."""


class Layout:
    """Another order of an intermediate value's dimensions."""

    kind = ActionKind.LAYOUT

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The value with its dimensions in the order ``params["order"]``, outermost first."""
        ir = ir_for(graph, schedule)
        node, order = str(action.params.get("node", "")), action.params.get("order")
        plan = schedule.kernel_of(node)
        if plan is None or not isinstance(order, (list, tuple)):
            raise IllegalAction("layout: no kernel writes the value")
        for reader in readers(ir.graph, node):
            again = any(reader.name in kernel.recomputed for kernel in schedule.kernels)
            if schedule.kernel_of(reader.name) is None and not again:
                raise IllegalAction("layout: a torch call reads the value")
        changed = replace(schedule, rewrites=(*schedule.rewrites, Rewrite(layouts.RULE, node, tuple(order))))
        ir_for(graph, changed)
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Values that a reduction reads with a stride."""
        ir = situation.ir
        for plan, region in situation.kernels() if situation.has_gpu else ():
            for name in region.inputs if region.reduced_axes else ():
                order = _order_for(region, name)
                ref = next((Ref(n, i) for (n, i), prim in ir.values.items() if prim == name), None)
                if order is None or ref is None or situation.schedule.kernel_of(ref.name) is None:
                    continue
                lines, place = where(ir, [ref.name])
                names = operation_names(ir, [ref.name])
                action = MacroAction(
                    kind=self.kind,
                    region=(ref.name,),
                    lines=lines,
                    params={"node": ref.name, "order": order},
                    rationale="The next kernel sums along a dimension that is not contiguous. Stored with that "
                    "dimension innermost, its reads are contiguous.",
                    text=f"store the result of {names} with the summed dimension innermost in {place}",
                )
                try:
                    self.apply(situation.graph, situation.schedule, action)
                except IllegalAction:
                    continue
                guess = next(measured_choice(situation, plan, region, self.kind, [{}], SHARE, "", ""), None)
                if guess is not None:
                    yield replace(action, expected=guess.expected)


def _order_for(region: Region, name: str) -> list[int] | None:
    """The dimensions of an input with the reduced ones innermost, where that is another order."""
    table, reduced = region.table, set(region.reduced_axes)
    rank = 0
    while True:
        try:
            table.axes(name, rank)
        except IndexError:
            break
        rank += 1
    inner = [dim for dim in range(rank) if set(table.axes(name, dim)) & reduced]
    order = [dim for dim in range(rank) if dim not in inner] + inner
    return order if inner and order != list(range(rank)) else None
