"""Layout: an intermediate value lies in memory in the order in which its reader walks it.

*Legal* for a value that one kernel writes and only kernels read, and that the caller never sees: every kernel takes its
addresses from the value's strides, so the same elements are written and read. Torch calls might ask for dense rows.
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
"""Part of the reader's time that it is expected to save: a guess that only orders the steps."""


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
        """Values that a reduction walks across the way they lie."""
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
                    rationale="The next kernel sums along a dimension that does not lie dense; written in its order, "
                    "what it reads together lies together.",
                    text=f"lay out the {names} of {place} as its reader walks it",
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
