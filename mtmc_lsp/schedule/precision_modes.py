"""The precision modes that remain for each float32 product, fastest first, after the results of earlier steps.

A mode is dropped for a product once a step with it was too inexact: another kernel with the same rounding would fail again. Other
failures (too slow, or no code) only exclude the same set of nodes in the same mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.ir.accumulated_products import accumulated_products
from mtmc_lsp.ir.loops.fusion import fused_loop
from mtmc_lsp.ir.lower import GraphBox
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp, ProductSizes, has_split_operands
from mtmc_lsp.ir.regions import CannotFuse
from mtmc_lsp.schedule.cell_configs import loop_modes
from mtmc_lsp.schedule.configs import PRE_SPLIT_MODES, SPLIT_PRECISION_MODES, PrecisionMode, precision_of
from mtmc_lsp.schedule.device_limits import splitting_pays
from mtmc_lsp.schedule.matmul_configs import can_scale, can_split, scaling_pays, user_mode
from mtmc_lsp.schedule.recurrent_configs import MODES as RECURRENT_MODES
from mtmc_lsp.schedule.recurrent_configs import modes_of
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.split_on_load import both_sides_config, side_to_split_on_load

MODES = (*SPLIT_PRECISION_MODES, PrecisionMode.IEEE)
"""Modes for fp32 products, fastest first."""
LONG_SUM = 1024
"""Terms of a sum from which on short pieces are used at once, where its results are only summed: the bias of rounding towards
zero does not cancel there."""
FULL = 2e-5
"""Relative errors below this do not come from a TF32 product, whose operands have 11 bits (about 3e-4 on an H200)."""
ROUNDED_AS_TF32 = frozenset({"fp16-operands", "im2win-fp16"})
"""Rewrites with float16 operands, which have as many significant bits as TF32."""
TF32_MODES = (PrecisionMode.FP16_SCALED, PrecisionMode.TF32)
"""Modes for products that the user's code runs in TF32."""
INEXACT_MODES = (*SPLIT_PRECISION_MODES, *TF32_MODES, *RECURRENT_MODES[:-1])
"""Modes that round more than float32 units; they are not retried for a product where they were too inexact."""
INEXACT = 1e-2
"""Relative errors below this come from rounding; errors of wrong kernels are far larger."""


@dataclass(frozen=True)
class Precisions:
    """The modes that remain to be tried."""

    ir: KernelIR
    device: DeviceModel
    strict: bool
    inexact: Mapping[PrecisionMode, Collection[str]]
    """Mode to nodes for whose products it is too inexact."""
    refused: Collection[tuple[PrecisionMode | None, frozenset[str]]]
    """Modes and sets of nodes that failed as one kernel; the mode is None without a product."""
    slow: Collection[tuple[PrecisionMode | None, frozenset[str]]] = ()
    """Modes and sets of nodes that were correct as one kernel, but slower than before."""

    @staticmethod
    def of(ir: KernelIR, device: DeviceModel, history: Sequence[Step], *, strict: bool = False) -> Precisions:
        """The modes that remain after the steps of a run."""
        inexact: dict[PrecisionMode, set[str]] = {}
        refused: set[tuple[PrecisionMode | None, frozenset[str]]] = set()
        slow: set[tuple[PrecisionMode | None, frozenset[str]]] = set()
        for step in history:
            if step.status is StepStatus.ACCEPTED:
                continue
            rounded = is_inexact(step)
            # One of several sites may have caused the failure; each is then tried separately.
            is_conclusive = "sites" not in step.action.params or step.status is StepStatus.REJECTED or rounded
            for mode, nodes in _tried(step.action):
                if rounded and mode is not None and mode in INEXACT_MODES:
                    inexact.setdefault(mode, set()).update(nodes)
                if step.action.kind in (ActionKind.FUSE, ActionKind.TENSOR_CORE) and is_conclusive:
                    if step.status is StepStatus.REJECTED:
                        slow.add((mode, frozenset(nodes)))
                    refused.add((mode, frozenset(nodes)))
                    if mode is PrecisionMode.FP16X3 and not rounded:
                        # The same products with shorter pieces are not faster.
                        refused.add((PrecisionMode.FP16X3_SHORT, frozenset(nodes)))
        return Precisions(ir, device, strict, inexact, refused, slow)

    @cached_property
    def modes(self) -> Mapping[str, tuple[PrecisionMode, ...]]:
        """Node to the remaining modes of its product, fastest first; at least ``ieee``. The user's TF32 comes first."""
        products = (PrimOp.MATMUL, PrimOp.RECURRENT, PrimOp.LOOP)
        return {prim.origin: self._modes(prim) for prim in self.ir.prims.values() if prim.op in products}

    def _modes(self, prim: Prim) -> tuple[PrecisionMode, ...]:
        ieee = PrecisionMode.IEEE
        if prim.op in (PrimOp.RECURRENT, PrimOp.LOOP):
            is_loop = prim.op is PrimOp.LOOP
            known = self._modes_of_loop(prim) if is_loop else modes_of(prim, self.device, strict=self.strict)
            return tuple(mode for mode in known if mode is ieee or not self.is_inexact(prim.origin, mode))
        users = user_mode(self.ir.graph, prim)
        if users is not ieee and not self.is_inexact(prim.origin, users):
            return self._tf32_modes(prim)
        if self.strict or not splitting_pays(self.device) or not can_split(self.ir, prim, self.device):
            return (ieee,)
        # An operand that is split on load has a scale per block of K, and fp32 units add the blocks.
        splits_both = both_sides_config(self.ir, prim, self.device) is not None
        on_load = splits_both or side_to_split_on_load(self.ir, prim, self.device) is not None
        split: tuple[PrecisionMode, ...] = PRE_SPLIT_MODES
        if on_load or has_split_operands(prim):
            split = (PrecisionMode.FP16X3_PROMOTED,)
        elif self._is_summed(prim):
            split = (PrecisionMode.FP16X3_SHORT,)
        return (*(mode for mode in split if not self.is_inexact(prim.origin, mode)), ieee)

    def _modes_of_loop(self, prim: Prim) -> tuple[PrecisionMode, ...]:
        try:
            return loop_modes(fused_loop(self.ir, (prim.origin,)), self.device, strict=self.strict)
        except CannotFuse:
            # No kernel runs the loop, so it has no choice.
            return (PrecisionMode.IEEE,)

    def _tf32_modes(self, prim: Prim) -> tuple[PrecisionMode, ...]:
        """TF32, and scaled float16 operands where these are possible; first those that are predicted to be faster."""
        tf32, scaled = PrecisionMode.TF32, PrecisionMode.FP16_SCALED
        if self.strict or not can_scale(self.ir, prim) or self.is_inexact(prim.origin, scaled):
            return (tf32,)
        return (scaled, tf32) if scaling_pays(self.ir, prim, self.device) else (tf32, scaled)

    @property
    def ranks(self) -> int:
        """The largest number of remaining modes of a product."""
        return max((len(modes) for modes in self.modes.values()), default=1)

    def mode(self, node: str, rank: int) -> PrecisionMode:
        """The mode of a node's product at a rank, or its last mode."""
        modes = self.modes[node]
        return modes[min(rank, len(modes) - 1)]

    def is_inexact(self, node: str, mode: PrecisionMode) -> bool:
        """Whether a mode was too inexact for a node's product, or for the node that it was rewritten from."""
        nodes = self.inexact.get(mode, ())
        return node in nodes or node.partition("_packed")[0] in nodes

    def refused_at(self, rank: int, schedule: Schedule) -> set[frozenset[str]]:
        """Sets of nodes that failed in the mode that their product would have now: that of its kernel, if it has one."""
        refused: set[frozenset[str]] = set()
        for mode, nodes in self.refused:
            product = next((node for node in nodes if node in self.modes), None)
            kernel = schedule.kernel_of(product) if product is not None else None
            kernel_mode = precision_of(kernel.config) if kernel is not None and set(kernel.nodes) <= nodes else None
            next_mode = kernel_mode or (self.mode(product, rank) if product is not None else mode)
            if mode == next_mode or mode not in (*MODES, *TF32_MODES, *RECURRENT_MODES):
                refused.add(nodes)
        return refused

    def slow_at(self, rank: int, schedule: Schedule) -> set[frozenset[str]]:
        """Sets of nodes around a product that were slower as one kernel, in the mode that the product would have now.

        A kernel of the product with fewer of these nodes is even slower: the others then run as separate passes.
        """
        slow: set[frozenset[str]] = set()
        for mode, nodes in self.slow:
            product = next((node for node in nodes if node in self.modes), None)
            if product is not None and schedule.kernel_of(product) is None and self.mode(product, rank) == mode:
                slow.add(nodes)
        return slow

    @cached_property
    def _summed(self) -> Collection[str]:
        return accumulated_products(self.ir)

    def _is_summed(self, prim: Prim) -> bool:
        """Whether it sums many terms, and its results are summed too, where errors do not cancel."""
        k = ProductSizes.of(self.ir.prims, prim).k.value(self.ir.graph.sizes)
        return k >= LONG_SUM and prim.name in self._summed


@lru_cache(maxsize=8)
def _in_full(box: GraphBox) -> Graph:
    graph = box.graph
    all_full = {node.name: "ieee" for node in graph.nodes if "conv" in node.op}
    return replace(
        graph, observed_convolution_modes={**all_full, **graph.observed_convolution_modes}, fp32_matmul="ieee"
    )


def as_run(graph: Graph, schedule: Schedule, history: Sequence[Step]) -> Graph:
    """The graph with the precision that the user's products were observed to run in.

    Libraries may run full float32 although TF32 is allowed. Where a step was too inexact and the user's results were far more
    exact than TF32, all products are taken to run full float32, except convolutions whose mode was observed.
    """
    if "tf32" not in (graph.fp32_convolution, graph.fp32_matmul) or rounds_as_tf32(schedule):
        return graph
    full = any(is_inexact(step) and step.verdict and step.verdict.reference_error < FULL for step in history)
    return _in_full(GraphBox(graph)) if full else graph


def rounds_as_tf32(schedule: Schedule) -> bool:
    """Whether operands are rounded to float16, which has as many significand bits as TF32."""
    return any(rewrite.rule in ROUNDED_AS_TF32 for rewrite in schedule.rewrites) or any(
        precision_of(plan.config) is PrecisionMode.FP16_SCALED for plan in (*schedule.kernels, *schedule.loop_kernels)
    )


def is_inexact(step: Step) -> bool:
    """Whether a step failed because of rounding errors."""
    verdict = step.verdict
    if step.status is not StepStatus.FAILED or verdict is None or verdict.status is not VerdictStatus.INCORRECT:
        return False
    return verdict.reference_error < verdict.error < INEXACT


def _tried(action: MacroAction) -> Iterator[tuple[PrecisionMode | None, tuple[str, ...]]]:
    """The modes of a step's new kernels, with the nodes of each."""
    rule, node = str(action.params.get("rule", "")), str(action.params.get("node", ""))
    if rule in ROUNDED_AS_TF32 or action.kind is ActionKind.FP16_OPERANDS:
        yield PrecisionMode.TF32 if rule in ROUNDED_AS_TF32 else PrecisionMode.FP16X3_PROMOTED, (node,)
        return
    kernels = action.params.get("sites") or action.params.get("kernels")
    if action.kind in (ActionKind.FUSE, ActionKind.TENSOR_CORE) and "sites" not in action.params:
        yield _mode(action.params.get("config")), action.region
        return
    for item in kernels if isinstance(kernels, (list, tuple)) else ():
        yield _mode(item["config"]), tuple(item["nodes"])


def _mode(config: object) -> PrecisionMode | None:
    """The precision mode of a configuration in JSON data."""
    value = config.get("precision") if isinstance(config, Mapping) else None
    return next((mode for mode in PrecisionMode if mode.value == value), None)
