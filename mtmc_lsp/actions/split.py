"""Split: several programs share one long sum, and their parts are combined by a second kernel.

*Legal* for reductions (parts of each row's columns) and for products (parts of K) in a power of two of parts, none of them
empty. Sum, product, minimum, maximum, logical and/or, arg-reductions and the online softmax pair (maximum, sum of
exponentials below it) are associative and commutative over the reals, so parts may be combined in any order; for floating
point it is a reassociation, always in the same order, without atomics.

Products may also be split by stream-K: so many programs share the blocks of K of the tiles of the last wave evenly
(:mod:`mtmc_lsp.codegen.matmul.stream_k`). That is *legal* for any number of programs up to :data:`MOST_PROGRAMS`, since a
sum is cut between two of its steps only; not for a product with few rows whose other operand is split as it is read, which walks
its sum in a way of its own, nor for one in parts of K already. Which sums are cut depends on the sizes of a call alone, so
calls give the same bits again. What it brings is measured: the model only says where it may.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.actions.base import (
    Config,
    IllegalAction,
    Situation,
    config_of,
    current_config,
    expected,
    ir_for,
    kind_word,
    lone_kernel_of,
    region_of,
    where,
    whole_numbers,
)
from mtmc_lsp.actions.tuning import measured_choice
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.matmul_configs import split_product_parts
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.split_on_load import BOTH, ONCE
from mtmc_lsp.schedule.tile_configs import split_parts
from mtmc_lsp.tuning.cost import kernel_cost, programs_of
from mtmc_lsp.tuning.waves import MOST_PROGRAMS, Waves, stream_programs

KEYS = {RegionKind.REDUCE: ("split", "block"), RegionKind.MATMUL: ("split_k", "block_k")}
"""The configuration's name for the number of parts, and for what a program takes at a time."""
LEAST_GAIN = 0.03
"""Part of a product's time that stream-K must be expected to save to be worth measuring."""


class Split:
    """Two passes over few long rows, split-K, or stream-K."""

    kind = ActionKind.SPLIT

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The kernel in that many parts; in 1 part it is whole again."""
        plan = lone_kernel_of(schedule, action)
        ir = ir_for(graph, schedule)
        region = region_of(ir, plan)
        changes = config_of(action)
        if "stream_k" in changes:
            return schedule.with_kernel(_streamed(ir, region, plan, action))
        if region.kind not in KEYS or set(changes) - {KEYS[region.kind][0], "block", "warps", "persist"}:
            raise IllegalAction(f"split: a {kind_word(region.kind)} kernel has no such parts")
        name, block = KEYS[region.kind]
        whole_numbers(action, {key: changes[key] for key in (name, "block", "warps") if key in changes})
        config = {**current_config(ir, region, plan), **changes}
        if config.get("stream_k"):
            raise IllegalAction("split: programs share the last tiles' blocks of K already")
        most = region.columns.value(ir.graph.sizes)
        if int(config[name]) > max(1, -(-most // int(config[block]))):
            raise IllegalAction(f"split: {config[name]} parts of {most} would leave some empty")
        return schedule.with_kernel(KernelPlan(plan.nodes, config, plan.recomputed))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where one program per row (or tile) leaves most of the device idle."""
        ir = situation.ir
        for plan, region in situation.lone_kernels():
            if region.kind in KEYS:
                yield from self._for(situation, ir, plan, region)
            if region.kind is RegionKind.MATMUL and situation.has_gpu:
                yield from self._stream(situation, ir, plan, region)

    def _for(self, situation: Situation, ir: KernelIR, plan: KernelPlan, region: Region) -> Iterable[MacroAction]:
        name, _ = KEYS[region.kind]
        config = current_config(ir, region, plan)
        if int(config.get(name, 1)) > 1 or config.get("stream_k"):
            return
        parts = split_parts if region.kind is RegionKind.REDUCE else split_product_parts
        changes = parts(ir, region, config)
        if not changes:
            return
        device = situation.device
        before = kernel_cost(ir, region, config, device)
        after = kernel_cost(ir, region, {**config, **changes}, device)
        if before.us - after.us <= 0:
            return
        lines, place = where(ir, region.nodes)
        busy = programs_of(ir, region, config)
        what = "rows" if region.kind is RegionKind.REDUCE else "tiles"
        yield MacroAction(
            kind=self.kind,
            region=region.nodes,
            lines=lines,
            params={"config": changes},
            rationale=(
                f"{busy} programs cannot keep {device.sm_count} multiprocessors busy: "
                f"{changes[name]} programs share the long sums of each of its {what}, and a second kernel combines them."
            ),
            expected=expected(before, after),
            text=f"split the {kind_word(region.kind)} kernel of {place} into {changes[name]} parts",
        )

    def _stream(self, situation: Situation, ir: KernelIR, plan: KernelPlan, region: Region) -> Iterable[MacroAction]:
        """Stream-K, where tiles leave much of the last wave empty and the model says that sharing them may pay."""
        config, device = current_config(ir, region, plan), situation.device
        before = kernel_cost(ir, region, config, device, waves=True)
        gains: dict[int, float] = {}
        for number in stream_programs(ir, region, config, device):
            after = kernel_cost(ir, region, {**config, "stream_k": number}, device, waves=True)
            gains[number] = 1.0 - after.us / before.us
        variants: list[Config] = [{"stream_k": number} for number, gain in gains.items() if gain > LEAST_GAIN]
        if not variants:
            return
        _, place = where(ir, region.nodes)
        tiles = Waves.of(ir, region, config).tiles
        yield from measured_choice(
            situation,
            plan,
            region,
            self.kind,
            variants,
            max(gains.values()),
            f"share the last tiles of the product kernel of {place} evenly",
            f"{tiles} tiles on {device.sm_count} multiprocessors leave part of them idle in the last wave. So a fixed number of "
            "programs compute whole waves of tiles, and share the sums of the tiles that are left evenly; a second kernel adds "
            f"the parts. Numbers of programs to be measured: {', '.join(str(choice['stream_k']) for choice in variants)}.",
        )


def _streamed(ir: KernelIR, region: Region, plan: KernelPlan, action: MacroAction) -> KernelPlan:
    """The kernel by stream-K; it is persistent anyway."""
    changes, config = config_of(action), current_config(ir, region, plan)
    if region.kind is not RegionKind.MATMUL or set(changes) != {"stream_k"}:
        raise IllegalAction(f"split: a {kind_word(region.kind)} kernel has no such programs")
    whole_numbers(action, changes, powers=False)
    if config.get(ONCE, BOTH) != BOTH:
        raise IllegalAction(
            "split: an operand that is split as it is read has a sum that is walked in a way of its own"
        )
    if int(config.get("split_k", 1)) > 1:
        raise IllegalAction("split: the product is in parts of K already")
    if int(changes["stream_k"]) > MOST_PROGRAMS:
        raise IllegalAction(f"split: at most {MOST_PROGRAMS} programs share the last tiles")
    kept = {name: value for name, value in config.items() if name != "persist"}
    return KernelPlan(plan.nodes, {**kept, **changes}, plan.recomputed)
