"""Split: several programs share one long sum, and a second kernel combines their parts.

*Legal* for reductions (parts of each row's columns) and for products (parts of K) in a power of two of parts, none of them
empty. Sum, product, minimum, maximum, logical and/or, arg-reductions and the online softmax pair (maximum, sum of
exponentials below it) are associative and commutative over the reals, so parts may be combined in any order; for floating
point it is a reassociation, always in the same order, without atomics.

Stream-K also splits products: a fixed number of programs share the K blocks of the last wave of tiles evenly
(:mod:`mtmc_lsp.codegen.matmul.stream_k`). It is *legal* for up to ``MOST_STREAM_PROGRAMS`` programs, since a sum is cut only
between two of its steps. It is not legal for a product with one operand that is split on load, whose kernel sums all of K, nor
together with split-K. The cuts depend only on the sizes of a call, so repeated calls give the same bits. The gain is measured;
the model only selects candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.actions.base import Situation, changed_plan, changes_of, expected, ir_for, lines_of, lone_kernel_of
from mtmc_lsp.actions.titles import kernel_title
from mtmc_lsp.actions.tuning import measured_choice, times_tried
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import KernelConfig, MatmulConfig, TileConfig
from mtmc_lsp.schedule.matmul_configs import product_parts
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import split_columns
from mtmc_lsp.tuning.kernel_cost import kernel_cost, programs_of
from mtmc_lsp.tuning.waves import Waves, stream_programs

LEAST_GAIN = 0.03
"""Share of a product's time that stream-K must be predicted to save."""


class Split:
    """Splits few long rows, K (split-K), or the last wave of tiles (stream-K)."""

    kind = ActionKind.SPLIT

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The kernel with that many parts (1: unsplit), or that many stream-K programs."""
        plan = lone_kernel_of(schedule, action)
        if "stream_k" in changes_of(action):
            allowed: tuple[str, ...] = ("stream_k",)
        else:
            allowed = ("split" if isinstance(plan.config, TileConfig) else "split_k", "block", "warps", "persist")
        # A split kernel fills the device without persistence.
        also = {"persist": 0} if isinstance(plan.config, (TileConfig, MatmulConfig)) else {}
        return schedule.with_kernel(changed_plan(ir_for(graph, schedule), plan, action, allowed, also))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where one program per row (or tile) leaves most of the device idle."""
        ir = situation.ir
        for plan, region in situation.lone_kernels():
            if region.kind in (RegionKind.REDUCE, RegionKind.MATMUL):
                yield from self._for(situation, ir, plan, region)
            if isinstance(plan.config, MatmulConfig) and situation.has_gpu:
                yield from self._stream(situation, ir, plan, region, plan.config)

    def _for(self, situation: Situation, ir: KernelIR, plan: KernelPlan, region: Region) -> Iterable[MacroAction]:
        split, changes, parts = _split_config(ir, region, plan.config, situation.device)
        if parts == 1:
            return
        device = situation.device
        before = kernel_cost(ir, region, plan.config, device)
        after = kernel_cost(ir, region, split, device)
        if before.us - after.us <= 0:
            return
        lines = lines_of(ir, region.nodes)
        programs = programs_of(ir, region, plan.config)
        what = "rows" if region.kind is RegionKind.REDUCE else "tiles"
        yield MacroAction(
            kind=self.kind,
            region=region.nodes,
            lines=lines,
            params={"config": changes},
            rationale=(
                f"The kernel has {programs} programs, which leaves most of {device.sm_count} multiprocessors idle. "
                f"With {parts} programs for each of its {what}, a second kernel combines their parts."
            ),
            expected=expected(before, after),
            text=f"Split {kernel_title(ir, region.nodes)} into {parts} parts",
        )

    def _stream(
        self, situation: Situation, ir: KernelIR, plan: KernelPlan, region: Region, config: MatmulConfig
    ) -> Iterable[MacroAction]:
        """Stream-K, where the last wave of tiles is underfilled and the model predicts a gain."""
        device = situation.device
        before = kernel_cost(ir, region, config, device, waves=True)
        gains: dict[int, float] = {}
        for number in stream_programs(ir, region, config, device):
            after = kernel_cost(ir, region, replace(config, stream_k=number, persist=0), device, waves=True)
            gains[number] = 1.0 - after.us / before.us
        numbers = [number for number, gain in gains.items() if gain > LEAST_GAIN]
        if not numbers or times_tried(situation, self.kind, region.nodes):
            return
        tiles = Waves.of(ir, region, config).tiles
        yield from measured_choice(
            situation,
            plan,
            region,
            self.kind,
            [{"stream_k": number} for number in numbers],
            max(gains.values()),
            f"Balance the last tiles of {kernel_title(ir, region.nodes)}",
            f"{tiles} tiles on {device.sm_count} multiprocessors leave some of them idle in the last wave. With "
            "stream-K, a fixed number of programs share the sums of the remaining tiles evenly, and a second "
            f"kernel adds their parts. Numbers of programs to measure: {', '.join(map(str, numbers))}.",
        )


def _split_config(
    ir: KernelIR, region: Region, config: KernelConfig, device: DeviceModel
) -> tuple[KernelConfig, dict[str, object], int]:
    """The split configuration where few programs do all the work, the changed choices, and the number of parts (1: no split)."""
    if isinstance(config, TileConfig) and not config.is_split:
        split = split_columns(ir, region, config, device)
        changes: dict[str, object] = {"split": split.split}
        if split.block != config.block or split.warps != config.warps:
            changes |= {"block": split.block, "warps": split.warps}
        return split, changes, split.split
    if isinstance(config, MatmulConfig) and not config.is_split and not config.splits_one_operand_on_load:
        parts = product_parts(ir, region, config, device)
        return replace(config, split_k=parts, persist=0 if parts > 1 else config.persist), {"split_k": parts}, parts
    return config, {}, 1
