"""Parallel scan: programs compute chunks of a loop's iterations at once, instead of one iteration after another.

*Legal* where the update of each state is affine in the state (sums, products, exponential moving averages, resets by a mask, two
coupled states as a 2x2 matrix), a running maximum or minimum, or an *and* and *or* of booleans, with coefficients that depend on
no state or on states that are solved before (:mod:`mtmc_lsp.ir.loops.scan`). The composition of two such updates has the same
form and is associative over the reals; for floating point it is a reassociation, always in the same order, without atomics.

A composed coefficient may overflow where one iteration after another does not. A tile with a state that is not finite is computed
again by the sequential kernel, so that infinities and NaN are those of the user's loop.

With segments, several programs share the iterations of a tile. One kernel for each level of dependent scans first writes what the
segments do to the states.
"""

from __future__ import annotations

from mtmc_lsp.actions.loops.sequential_loops import SequentialLoopAction
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.form import LoopForm, independent_elements
from mtmc_lsp.schedule.configs import LoopConfig


class ParallelScan(SequentialLoopAction):
    """Scans chunks of time steps where the states of a loop leave most of the device idle."""

    kind = ActionKind.PARALLEL_SCAN
    choices = ("rows", "block", "warps", "stages", "steps", "segments")

    def title(self, name: str) -> str:
        """``Scan the iterations of the loop in parallel``."""
        return f"Scan the iterations of {name} in parallel"

    def reason(self, form: LoopForm, config: LoopConfig, device: DeviceModel) -> str:
        """Why a scan pays for a loop."""
        count, states = form.loop.count.value(form.ir.graph.sizes), independent_elements(form)
        shared = ""
        if config.segments > 1:
            shared = f" {config.segments} programs share the iterations of each tile."
        return (
            f"{count} iterations one after another for {states} independent elements of the state leave "
            f"{device.sm_count} multiprocessors mostly idle. The update of the state is associative, so a program computes "
            f"{config.steps} iterations at once in about {config.steps.bit_length() - 1} dependent operations.{shared}"
        )
