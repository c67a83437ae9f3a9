"""Specialize: a named size is built in as a number, or promised to be a multiple of one, so masks over it go.

*Legal* for the workload's own value. The guard asks for it, so every other size runs the original code: the kernel is only
called where what it assumes holds.
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
"""Part of the kernels' time that it is expected to save: a guess that only orders the steps."""
LEAST_MULTIPLE, MOST_MULTIPLE = 16, 128


class Specialize:
    """One named size."""

    kind = ActionKind.SPECIALIZE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The size as ``params["value"]``, or as a multiple of ``params["multiple"]``."""
        size, value, multiple = (action.params.get(name) for name in ("size", "value", "multiple"))
        if isinstance(value, int):
            rewrite = Rewrite(sizes.CONSTANT, str(size), (value,))
        elif isinstance(multiple, int):
            rewrite = Rewrite(sizes.MULTIPLE, str(size), (multiple,))
        else:
            raise IllegalAction("specialize: neither a value nor a multiple is given")
        changed = replace(schedule, rewrites=(*schedule.rewrites, rewrite))
        ir = ir_for(graph, changed)
        for plan in changed.kernels:
            region_of(ir, plan)
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Sizes that a power of two divides: it is the masks that cost."""
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
                rationale=f"{name} is {value} here; as a multiple of {multiple} it fills whole tiles, so they need no mask. "
                "Other values run the original code.",
                text=f"specialize the kernel of {place} to multiples of {multiple} for {name}",
            )
