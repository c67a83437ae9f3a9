"""Specialize: compile a named size as a constant, or assume that it is a multiple of a number, so that masks can be dropped.

*Legal* for the workload's value. A guard checks the assumption; other sizes run the original code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, region_of, where
from mtmc_lsp.actions.tuning import measured_choice
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.rewrites import specialised_sizes as sizes
from mtmc_lsp.schedule.schedule import Rewrite, Schedule

SHARE = 0.005
"""Share of the kernels' time that it may save: an estimate that only orders the steps."""
LEAST_MULTIPLE, MOST_MULTIPLE = 16, 128


class Specialize:
    """Specializes one named size."""

    kind = ActionKind.SPECIALIZE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The size as ``params["value"]``, or as a multiple of ``params["multiple"]``."""
        size, value, multiple = (action.params.get(name) for name in ("size", "value", "multiple"))
        if isinstance(value, int):
            rewrite = Rewrite(sizes.CONSTANT, str(size), (value,))
        elif isinstance(multiple, int):
            rewrite = Rewrite(sizes.MULTIPLE, str(size), (multiple,))
        else:
            raise IllegalAction("specialize: the action has neither a value nor a multiple")
        changed = replace(schedule, rewrites=(*schedule.rewrites, rewrite))
        ir = ir_for(graph, changed)
        for plan in changed.kernels:
            region_of(ir, plan)
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Sizes that a power of two divides, so that masks can be dropped."""
        graph = situation.ir.graph
        for name in graph.sizes if situation.has_gpu else ():
            if name not in situation.graph.sizes:
                continue
            value = graph.sizes[name]
            multiple = min(value & -value, MOST_MULTIPLE)
            if multiple < LEAST_MULTIPLE:
                continue
            guesses = [
                guess
                for plan, region in situation.kernels()
                if name
                in {symbol for axis in (*region.parallel_axes, *region.reduced_axes) for symbol in axis.size.symbols()}
                for guess in measured_choice(situation, plan, region, self.kind, [{}], SHARE, "", "")
            ]
            if not guesses:
                continue
            best = max(guesses, key=lambda guess: guess.expected.saved_us)
            _, place = where(situation.ir, best.region)
            yield replace(
                best,
                params={"size": name, "multiple": multiple},
                rationale=f"{name} is {value} here. As a multiple of {multiple} it fills whole tiles, which need no "
                "mask. Other values run the original code.",
                text=f"assume that {name} is a multiple of {multiple} in the kernel of {place}",
            )
