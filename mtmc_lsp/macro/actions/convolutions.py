"""Channels last, and half operands: convolutions on operands that are packed as tensor cores take them.

*Legal* where the convolution reads and gives dense tensors in PyTorch's own order, and nobody takes more of it than its
result. Packing with channels last copies the same values (:mod:`mtmc_lsp.macro.rewrites.convolutions`); what reads the result
reads a copy in the order that it had. Half operands change how the products are rounded: proposed only where the user's own
convolution runs TF32, whose significands are as short, never under ``precision = "strict"``, and verified against float64.
"""

from __future__ import annotations

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.macro.actions.algebra import Algebra
from mtmc_lsp.macro.rewrites import convolutions

MOST = 3
"""Convolutions that are weighed at a time, heaviest first: each takes a search for what is then fused."""


class ChannelsLast(Algebra):
    """One convolution with its channels densest."""

    kind = ActionKind.CHANNELS_LAST
    rules = convolutions.LAYOUTS
    most = MOST
    same = "the values are the same, in another order"


class HalfOperands(Algebra):
    """One convolution on scaled float16 operands."""

    kind = ActionKind.HALF_OPERANDS
    rules = convolutions.NARROW
    most = MOST
    same = "the result is rounded as often, at other places"
    changes_rounding = True
