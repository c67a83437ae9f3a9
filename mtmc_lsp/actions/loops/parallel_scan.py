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

from collections.abc import Iterable

from mtmc_lsp.actions.base import Situation, expected, lines_of
from mtmc_lsp.actions.loops.sequential_loops import LEAST_GAIN, SequentialLoopAction
from mtmc_lsp.actions.titles import kernel_title
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.ir.loops.form import independent_elements
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.loops.scan import scan_or_none
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import IllegalConfig, LoopConfig
from mtmc_lsp.schedule.scan_configs import scan_config
from mtmc_lsp.schedule.schedule import KernelPlan
from mtmc_lsp.tuning.kernel_cost import kernel_cost

MOST_STATES_PER_SM = 64
"""Independent elements of the state for each multiprocessor up to which a scan is tried: two warps. With more, the sequential
kernel keeps the device busy. An estimate, not measured."""


class ParallelScan(SequentialLoopAction):
    """Scans chunks of time steps where the states of a loop leave most of the device idle."""

    kind = ActionKind.PARALLEL_SCAN
    choices = ("rows", "block", "warps", "stages", "steps", "segments")

    def proposals(
        self, situation: Situation, plan: KernelPlan, region: Region, present: LoopConfig
    ) -> Iterable[MacroAction]:
        """The action, if it is predicted to pay."""
        ir, device = situation.ir, situation.device
        form = loop_in(ir, region)
        states = independent_elements(form)
        if states > MOST_STATES_PER_SM * device.sm_count or scan_or_none(form) is None:
            return
        try:
            config = scan_config(form, device)
        except IllegalConfig:
            # A reduction in the body has too many columns for a tile of several steps.
            return
        before, after = (kernel_cost(ir, region, each, device) for each in (present, config))
        if before.us - after.us < LEAST_GAIN * before.us:
            return
        count = form.loop.count.value(ir.graph.sizes)
        shared = ""
        if config.segments > 1:
            shared = f" {config.segments} programs share the iterations of each tile."
        yield MacroAction(
            kind=self.kind,
            region=region.nodes,
            lines=lines_of(ir, region.nodes),
            params={"config": {name: getattr(config, name) for name in self.choices}},
            rationale=(
                f"{count} iterations run one after another for {states} independent elements of the state, which leaves "
                f"{device.sm_count} multiprocessors mostly idle. The update of the state is associative, so a program computes "
                f"{config.steps} iterations at once in about {config.steps.bit_length() - 1} dependent operations.{shared}"
            ),
            expected=expected(before, after),
            text=f"Scan the iterations of {kernel_title(ir, plan.nodes)} in parallel",
        )
