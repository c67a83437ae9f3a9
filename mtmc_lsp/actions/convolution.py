"""Channels last, fp16 operands and im2win: convolutions on operands packed as tensor cores take them.

*Legal* where the convolution reads and gives dense tensors in PyTorch's own order, and nobody takes more of it than its
result. Packing with channels last copies the same values (:mod:`mtmc_lsp.rewrites.convolution_layout`); what reads the result
reads a copy in the order that it had. Half operands change how the products are rounded: proposed only where the user's own
convolution runs TF32, whose significands are as short, never under ``precision = "strict"``, and verified against float64.

The library may run in full fp32 where it is allowed TF32. Once a step in TF32, or on half operands, proved too inexact, and
where TF32 is off, operands are split instead: x = (high + low) / s with a power of two s and two float16 halves, and three of
the four products that linearity gives; low * low is at most 2 ** -22 of a term. Blocks of K are added by fp32 units.

The order of windows (:mod:`mtmc_lsp.rewrites.im2win`, which says where it is *legal*) writes the input more than
once, so that each window is one dense run; half operands are written so at once, under the same conditions as above. Proposed
where the model says that the loads of single numbers, which few channels leave to a kernel, and the places of blocks that they
leave empty in the library's, cost more than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.actions.algebra import LEAST_US, Algebra, with_kernels
from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, region_of, where, with_saving
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.ir.primitives import ProductDims, ProductSizes
from mtmc_lsp.ir.regions import is_product
from mtmc_lsp.rewrites import convolution_layout as convolutions
from mtmc_lsp.rewrites import im2win
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, base_name
from mtmc_lsp.schedule.configs import PrecisionMode
from mtmc_lsp.schedule.schedule import Rewrite, Schedule
from mtmc_lsp.schedule.split_on_load import LEAST_CHANNELS, side_to_split_on_load

MOST = 3
"""Convolutions that are weighed at a time, heaviest first: each takes a search for what is then fused."""


class ChannelsLast(Algebra):
    """Convolutions with their channels densest: all of a target at once, or where there is one alone, that one."""

    kind = ActionKind.CHANNELS_LAST
    rules = convolutions.LAYOUTS
    most = MOST
    same = "the values are the same, in another order"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Not where the library chose full float32 although it may run TF32: of another layout it may choose otherwise."""
        return _keeps_precision(situation.ir.graph, node.name)

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule on a graph with other layouts; kernels keep what they compute, and read and write other addresses."""
        if action.params.get("rule") != propagation.RULE:
            return super().apply(graph, schedule, action)
        changed = replace(schedule, rewrites=(*schedule.rewrites, Rewrite(propagation.RULE, "")))
        ir = ir_for(graph, changed)
        for plan in changed.kernels:
            region_of(ir, plan)
        return with_kernels(ir, changed, action)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """The whole target, as long as that was not tried; single convolutions only then, or where there is but one."""
        tried = any(step.action.params.get("rule") == propagation.RULE for step in situation.history)
        whole = self._throughout(situation) if not tried else None
        if whole is not None:
            yield whole
        elif not propagation.is_channels_last(situation.ir.graph):
            yield from super().propose(situation)

    def _throughout(self, situation: Situation) -> MacroAction | None:
        graph = situation.ir.graph
        convolved = [node.name for node in graph.nodes if base_name(node) in propagation.CONVOLUTIONS]
        if not propagation.matches(graph) or not all(_keeps_precision(graph, name) for name in convolved):
            return None
        try:
            after = replace(situation.schedule, rewrites=(*situation.schedule.rewrites, Rewrite(propagation.RULE, "")))
            ir = ir_for(situation.graph, after)
            copies = propagation.copied_images(graph, ir.graph)
            search = situation.search_in(ir, after)
            # Copies of images run as part of what is around them; weights are copied by torch, as the library would itself.
            found = [fusion for fusion in search.best(set(copies)) if fusion.nodes & set(copies)]
            kernels = [
                {"nodes": list(f.region.nodes), "config": to_json(f.config)} for f in found if not is_product(f.region)
            ]
            if not kernels and not situation.schedule.kernels:
                # Nothing of ours would run: what fusion makes kernels of first can then have the new layout.
                return None
            lines, place = where(situation.ir, convolved)
            action = MacroAction(
                kind=self.kind,
                region=tuple(convolved),
                lines=lines,
                params={"rule": propagation.RULE, "node": "", "kernels": kernels},
                rationale=(
                    "The library computes convolutions with channels densest, and otherwise brings the operands and the result "
                    f"of each into that order and back; {self.same}."
                ),
                text=f"run the {len(convolved)} convolutions in {place}, and what is between them, with channels last",
            )
            action = with_saving(situation, action, self.apply(situation.graph, situation.schedule, action))
        except IllegalAction:
            return None
        return action if action.expected.saved_us > LEAST_US else None


def _keeps_precision(graph: Graph, node: str) -> bool:
    """Whether the library's result is as exact in any layout."""
    return graph.convolution_mode(node) == graph.fp32_convolution


class Fp16Operands(Algebra):
    """One convolution on scaled float16 operands: one number for each element, or two where that is too inexact."""

    kind = ActionKind.FP16_OPERANDS
    rules = convolutions.REDUCED_PRECISION
    most = MOST
    same = "the result is rounded as often, at other places"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Whole operands where TF32 is the user's own and has not failed, split ones elsewhere."""
        modes = situation.precisions.modes.get(node.name, ())
        own = situation.ir.product_of_node(node.name)
        if rule.name == "fp16-operands":
            return PrecisionMode.TF32 in modes
        promoted = PrecisionMode.FP16X3_PROMOTED
        if own is None or PrecisionMode.TF32 in modes or situation.precisions.is_inexact(node.name, promoted):
            return False
        # Few channels are split as they are read, unless that came to nothing.
        refused = any(mode is promoted and node.name in nodes for mode, nodes in situation.precisions.refused)
        return refused or side_to_split_on_load(situation.ir, own) is None


class Im2win(Algebra):
    """One convolution with its input in the order of its windows, in float16 at once where the user's own runs TF32."""

    kind = ActionKind.IM2WIN
    rules = im2win.REWRITES
    most = MOST
    same = "each number meets the weights that it met before"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Few channels, for many are walked a block at a time; rounded only where TF32 is the user's own and has not failed."""
        ir = situation.ir
        own = ir.product_of_node(node.name)
        if own is None or not ProductDims.of(own).kernel_positions:
            return False
        few = ProductSizes.of(ir.prims, own).channels.value(ir.graph.sizes) < LEAST_CHANNELS
        return few and (
            not rule.changes_rounding or PrecisionMode.TF32 in situation.precisions.modes.get(node.name, ())
        )
