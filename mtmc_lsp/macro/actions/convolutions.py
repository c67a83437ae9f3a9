"""Channels last, and half operands: convolutions on operands that are packed as tensor cores take them.

*Legal* where the convolution reads and gives dense tensors in PyTorch's own order, and nobody takes more of it than its
result. Packing with channels last copies the same values (:mod:`mtmc_lsp.macro.rewrites.convolutions`); what reads the result
reads a copy in the order that it had. Half operands change how the products are rounded: proposed only where the user's own
convolution runs TF32, whose significands are as short, never under ``precision = "strict"``, and verified against float64.

The library may run in full fp32 where it is allowed TF32. Once a step in TF32, or on half operands, proved too inexact, and
where TF32 is off, operands are split instead: x = (high + low) / s with a power of two s and two float16 halves, and three of
the four products that linearity gives; low * low is at most 2 ** -22 of a term. Blocks of K are added by fp32 units.
"""

from __future__ import annotations

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.graph import Node
from mtmc_lsp.macro.actions.algebra import Algebra
from mtmc_lsp.macro.actions.base import Situation
from mtmc_lsp.macro.configs import PROMOTED
from mtmc_lsp.macro.rewrites import convolutions
from mtmc_lsp.macro.rewrites.editing import AlgebraRule

MOST = 3
"""Convolutions that are weighed at a time, heaviest first: each takes a search for what is then fused."""


class ChannelsLast(Algebra):
    """One convolution with its channels densest."""

    kind = ActionKind.CHANNELS_LAST
    rules = convolutions.LAYOUTS
    most = MOST
    same = "the values are the same, in another order"


class HalfOperands(Algebra):
    """One convolution on scaled float16 operands: one number for each element, or two where that is too inexact."""

    kind = ActionKind.HALF_OPERANDS
    rules = convolutions.NARROW
    most = MOST
    same = "the result is rounded as often, at other places"
    changes_rounding = True

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Whole operands where TF32 is the user's own and has not failed, split ones elsewhere."""
        modes = situation.precisions.modes.get(node.name, ())
        if rule.name == "half-operands":
            return "tf32" in modes
        return bool(modes) and "tf32" not in modes and not situation.precisions.is_inexact(node.name, PROMOTED)
