"""Channels last, fp16 operands and im2win: convolutions on operands packed for tensor cores.

*Legal* where the convolution reads and returns contiguous tensors in PyTorch's default memory format, and only its result is
used. Packing with channels last copies the same values (:mod:`mtmc_lsp.rewrites.convolution_layout`); readers of the result get
a copy in the original memory format. fp16 operands change how products are rounded. They are proposed only where the user's
convolution runs TF32, which has equally short significands, never under ``precision = "strict"``, and they are verified against
float64.

The library may run full fp32 although TF32 is allowed. Where TF32 is off, or a step in TF32 or on fp16 operands was too
inexact, operands are split instead: x = (high + low) / s with a power of two s and two float16 halves. Three of the four
products are computed; low * low is at most 2 ** -22 of a term. fp32 units add blocks of K.

im2win (:mod:`mtmc_lsp.rewrites.im2win`, which says where it is *legal*) writes input elements more than once, so that each
window is contiguous; fp16 operands are written in that order directly, under the conditions above. It is proposed where the
model predicts a gain: with few channels a kernel loads single elements, and the library's blocks are mostly padding.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.actions.algebra import Algebra, with_kernels
from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, least_gain_us, lines_of, region_of, with_saving
from mtmc_lsp.actions.networks.first_version import RULES, between_products, rules_of, with_rules
from mtmc_lsp.actions.titles import operation_names
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.ir.primitives import ProductDims, ProductSizes
from mtmc_lsp.rewrites import convolution_layout as convolutions
from mtmc_lsp.rewrites import im2win
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, base_name
from mtmc_lsp.rewrites.whole_graph import convolution_biases
from mtmc_lsp.schedule.configs import PrecisionMode
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.split_on_load import LEAST_CHANNELS, side_to_split_on_load

MOST = 3
"""Convolutions that are evaluated at a time, most operations first: each needs a fusion search."""


class ChannelsLast(Algebra):
    """Convolutions with channels last: all of a target at once, or single ones."""

    kind = ActionKind.CHANNELS_LAST
    rules = convolutions.LAYOUTS
    most = MOST
    same = "the values are the same, in another memory format"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Not where the library runs full float32 although TF32 is allowed: in another layout it may use TF32."""
        return _keeps_precision(situation.ir.graph, node.name)

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule on a graph with other layouts; kernels compute the same and use other addresses."""
        if action.params.get("rule") != propagation.RULE:
            return super().apply(graph, schedule, action)
        changed = with_rules(schedule, rules_of(action) or [propagation.RULE])
        ir = ir_for(graph, changed)
        for plan in changed.kernels:
            region_of(ir, plan)
        return with_kernels(ir, changed, action)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """The whole target unless that was tried; then single convolutions."""
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
            rules = [propagation.RULE]
            if convolution_biases.matches(graph) and not situation.schedule.kernels:
                # A kernel that contains a convolution adds the bias itself.
                rules.insert(0, convolution_biases.RULE)
            after = with_rules(situation.schedule, rules)
            ir = ir_for(situation.graph, after)
            # The layout changes the time of every operation between convolutions: torch's norms, for example, are slow in it.
            kernels = [
                {"nodes": list(fusion.region.nodes), "config": to_json(fusion.config)}
                for fusion in between_products(situation, ir, after)
            ]
            if not kernels and not situation.schedule.kernels:
                # No Triton kernel would run yet; after a first fusion the new layout can be proposed again.
                return None
            action = MacroAction(
                kind=self.kind,
                region=tuple(convolved),
                lines=lines_of(situation.ir, convolved),
                params={"rule": propagation.RULE, "node": "", "kernels": kernels, RULES: rules},
                rationale=(
                    "The library computes convolutions with channels last. For other memory formats it converts "
                    f"the operands and the result of each; {self.same}."
                ),
                text=f"Run {operation_names(situation.ir, convolved)} and the operations between them with channels last",
            )
            action = with_saving(situation, action, self.apply(situation.graph, situation.schedule, action))
        except IllegalAction:
            return None
        return action if action.expected.saved_us > least_gain_us(situation.device) else None


def _keeps_precision(graph: Graph, node: str) -> bool:
    """Whether the library's precision does not depend on the layout."""
    return graph.convolution_mode(node) == graph.fp32_convolution


class Fp16Operands(Algebra):
    """One convolution on scaled float16 operands: one per element, or two where that is too inexact."""

    kind = ActionKind.FP16_OPERANDS
    rules = convolutions.REDUCED_PRECISION
    most = MOST
    same = "the result is rounded as often, in other steps"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """One float16 per element where the user runs TF32 and it has not failed, split operands elsewhere."""
        modes = situation.precisions.modes.get(node.name, ())
        prim = situation.ir.product_of_node(node.name)
        if rule.name == "fp16-operands":
            return PrecisionMode.TF32 in modes
        promoted = PrecisionMode.FP16X3_PROMOTED
        if prim is None or PrecisionMode.TF32 in modes or situation.precisions.is_inexact(node.name, promoted):
            return False
        # Few channels are split on load, unless that was refused.
        refused = any(mode is promoted and node.name in nodes for mode, nodes in situation.precisions.refused)
        return refused or side_to_split_on_load(situation.ir, prim, situation.device) is None


class Im2win(Algebra):
    """One convolution with its input in im2win order, in float16 where the user runs TF32."""

    kind = ActionKind.IM2WIN
    rules = im2win.REWRITES
    most = MOST
    same = "each input element is multiplied by the same weights"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Only for few channels; in float16 only where the user runs TF32 and it has not failed."""
        ir = situation.ir
        prim = ir.product_of_node(node.name)
        if prim is None or not ProductDims.of(prim).kernel_positions:
            return False
        few = ProductSizes.of(ir.prims, prim).channels.value(ir.graph.sizes) < LEAST_CHANNELS
        return few and (
            not rule.changes_rounding or PrecisionMode.TF32 in situation.precisions.modes.get(node.name, ())
        )
