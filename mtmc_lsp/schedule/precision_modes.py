"""The precision modes that are left for each float32 product, fastest first, given what came of those that were tried.

A mode is given up for a product once a step with it was computed, but not exactly enough: the same rounding in a kernel of
other neighbours would be refused again. Which nodes are fused with which is another question: what a step of theirs comes to
otherwise (too slow, or not written) is held against those nodes in that mode alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.ir.accumulated_products import accumulated_products
from mtmc_lsp.ir.lower import GraphBox
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp, ProductSizes, has_split_operands
from mtmc_lsp.schedule.configs import PRE_SPLIT_MODES, SPLIT_PRECISION_MODES, PrecisionMode, precision_of
from mtmc_lsp.schedule.matmul_configs import can_split, user_mode
from mtmc_lsp.schedule.recurrent_configs import MODES as RECURRENT_MODES
from mtmc_lsp.schedule.recurrent_configs import modes_of
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.split_on_load import both_sides_config, side_to_split_on_load

MODES = (*SPLIT_PRECISION_MODES, PrecisionMode.IEEE)
"""Modes for fp32 products, fastest first."""
LONG_SUM = 1024
"""Terms of a sum from which on its pieces are short at once where its results are only summed up: rounding towards zero is then
all that is left when everything else has cancelled."""
FULL = 2e-5
"""Relative errors below this are no TF32 product's, whose operands are rounded to 11 bits (about 3e-4 on an H200)."""
ROUNDED_AS_TF32 = frozenset({"fp16-operands", "im2win-fp16"})
"""Rewrites whose operands are one float16 number each, which keeps as many bits as TF32."""
INEXACT_MODES = (*SPLIT_PRECISION_MODES, PrecisionMode.TF32, *RECURRENT_MODES[:-1])
"""Modes that round more than float32 units, and so are not tried again for a product where that was too much."""
INEXACT = 1e-2
"""Relative errors below this come from rounding; a wrong kernel's are far larger."""


@dataclass(frozen=True)
class Precisions:
    """What is left to try."""

    ir: KernelIR
    strict: bool
    inexact: Mapping[PrecisionMode, Collection[str]]
    """Mode to the nodes whose products it rounds too much."""
    refused: Collection[tuple[PrecisionMode | None, frozenset[str]]]
    """Modes and sets of nodes that were refused together; None for kernels without a product."""
    slow: Collection[tuple[PrecisionMode | None, frozenset[str]]] = ()
    """Modes and sets of nodes that were correct as one kernel, and slower than what they were before."""

    @staticmethod
    def of(ir: KernelIR, history: Sequence[Step], *, strict: bool = False) -> Precisions:
        """What the steps of a run leave."""
        inexact: dict[PrecisionMode, set[str]] = {}
        refused: set[tuple[PrecisionMode | None, frozenset[str]]] = set()
        slow: set[tuple[PrecisionMode | None, frozenset[str]]] = set()
        for step in history:
            if step.status is StepStatus.ACCEPTED:
                continue
            rounded = is_inexact(step)
            # One of several sites may be at fault: each is then tried by itself.
            blamed = "sites" not in step.action.params or step.status is StepStatus.REJECTED or rounded
            for mode, nodes in _tried(step.action):
                if rounded and mode is not None and mode in INEXACT_MODES:
                    inexact.setdefault(mode, set()).update(nodes)
                if step.action.kind in (ActionKind.FUSE, ActionKind.TENSOR_CORE) and blamed:
                    if step.status is StepStatus.REJECTED:
                        slow.add((mode, frozenset(nodes)))
                    refused.add((mode, frozenset(nodes)))
                    if mode is PrecisionMode.FP16X3 and not rounded:
                        # The same products with more to do are no faster.
                        refused.add((PrecisionMode.FP16X3_SHORT, frozenset(nodes)))
        return Precisions(ir, strict, inexact, refused, slow)

    @cached_property
    def modes(self) -> Mapping[str, tuple[PrecisionMode, ...]]:
        """Node to what is left for its product, fastest first; at least ``ieee``. The user's own TF32 comes before all."""
        products = (PrimOp.MATMUL, PrimOp.RECURRENT)
        return {prim.origin: self._modes(prim) for prim in self.ir.prims.values() if prim.op in products}

    def _modes(self, prim: Prim) -> tuple[PrecisionMode, ...]:
        ieee = PrecisionMode.IEEE
        if prim.op is PrimOp.RECURRENT:
            known = modes_of(prim, strict=self.strict)
            return tuple(mode for mode in known if mode is ieee or not self.is_inexact(prim.origin, mode))
        own = user_mode(self.ir.graph, prim)
        if own is not ieee and not self.is_inexact(prim.origin, own):
            return (own,)
        if self.strict or not can_split(self.ir, prim):
            return (ieee,)
        # Split on load, an operand has a scale for each block of K, and fp32 units add the blocks up.
        on_load = both_sides_config(self.ir, prim) is not None or side_to_split_on_load(self.ir, prim) is not None
        split: tuple[PrecisionMode, ...] = PRE_SPLIT_MODES
        if on_load or has_split_operands(prim):
            split = (PrecisionMode.FP16X3_PROMOTED,)
        elif self._is_summed(prim):
            split = (PrecisionMode.FP16X3_SHORT,)
        return (*(mode for mode in split if not self.is_inexact(prim.origin, mode)), ieee)

    @property
    def ranks(self) -> int:
        """How many modes any product has left at most."""
        return max((len(modes) for modes in self.modes.values()), default=1)

    def mode(self, node: str, rank: int) -> PrecisionMode:
        """The mode of a node's product at a rank; the last one where there are fewer."""
        modes = self.modes[node]
        return modes[min(rank, len(modes) - 1)]

    def is_inexact(self, node: str, mode: PrecisionMode) -> bool:
        """Whether a mode was found to round a node's product, or that which it was made from, too much."""
        nodes = self.inexact.get(mode, ())
        return node in nodes or node.partition("_packed")[0] in nodes

    def refused_at(self, rank: int, schedule: Schedule) -> set[frozenset[str]]:
        """Sets of nodes that came to nothing in the mode that their product would be given: its kernel's, where it has one."""
        found: set[frozenset[str]] = set()
        for mode, nodes in self.refused:
            product = next((node for node in nodes if node in self.modes), None)
            kernel = schedule.kernel_of(product) if product is not None else None
            kept = precision_of(kernel.config) if kernel is not None and set(kernel.nodes) <= nodes else None
            given = kept or (self.mode(product, rank) if product is not None else mode)
            if mode == given or mode not in (*MODES, *RECURRENT_MODES):
                found.add(nodes)
        return found

    def slow_at(self, rank: int, schedule: Schedule) -> set[frozenset[str]]:
        """Sets of nodes around a product that were slower as one kernel than before, in the mode that it would be given.

        The same product with less around it is slower still: what surrounds it then runs as passes of its own.
        """
        found: set[frozenset[str]] = set()
        for mode, nodes in self.slow:
            product = next((node for node in nodes if node in self.modes), None)
            if product is not None and schedule.kernel_of(product) is None and self.mode(product, rank) == mode:
                found.add(nodes)
        return found

    @cached_property
    def _summed(self) -> Collection[str]:
        return accumulated_products(self.ir)

    def _is_summed(self, prim: Prim) -> bool:
        """Whether it sums many terms, and its own results are summed, in which errors do not cancel."""
        k = ProductSizes.of(self.ir.prims, prim).k.value(self.ir.graph.sizes)
        return k >= LONG_SUM and prim.name in self._summed


@lru_cache(maxsize=8)
def _in_full(box: GraphBox) -> Graph:
    graph = box.graph
    all_full = {node.name: "ieee" for node in graph.nodes if "conv" in node.op}
    return replace(graph, convolutions_seen={**all_full, **graph.convolutions_seen}, fp32_matmul="ieee")


def as_run(graph: Graph, schedule: Schedule, history: Sequence[Step]) -> Graph:
    """The graph with what is known of the precision that the user's own products really run in.

    Libraries that are allowed TF32 need not use it. Where a step was refused beside results of the user's own that are far more
    exact than TF32 makes them, all of these are full float32, and take its time: but for convolutions that were asked.
    """
    if "tf32" not in (graph.fp32_convolution, graph.fp32_matmul) or any(
        rewrite.rule in ROUNDED_AS_TF32 for rewrite in schedule.rewrites
    ):
        return graph
    full = any(is_inexact(step) and step.verdict and step.verdict.reference_error < FULL for step in history)
    return _in_full(GraphBox(graph)) if full else graph


def is_inexact(step: Step) -> bool:
    """Whether a step failed for the error of its results, as rounding makes it."""
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
    """The precision mode that a configuration as JSON data states."""
    value = config.get("precision") if isinstance(config, Mapping) else None
    return next((mode for mode in PrecisionMode if mode.value == value), None)
