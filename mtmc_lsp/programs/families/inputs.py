"""Tensors that programs begin with."""

from __future__ import annotations

from mtmc_lsp.programs import sizes
from mtmc_lsp.programs.draft import Draft, Tensor

TOKENS = ("x", "hidden_states", "x", "inputs", "h")


def rows(draft: Draft, name: str = "x") -> Tensor:
    """``[N, D]``."""
    return draft.input(name, draft.size("N", sizes.ROWS), draft.size("D", sizes.ANY_WIDTH))


def tokens(draft: Draft, name: str = "") -> Tensor:
    """``[B, S, D]``, of a model's hidden size."""
    batch, length = draft.size("B", sizes.BATCH), draft.size("S", sizes.SEQUENCE)
    return draft.input(name or draft.choose(*TOKENS), batch, length, draft.size("D", sizes.WIDTH))


def image(draft: Draft, name: str = "x") -> Tensor:
    """``[B, C, H, W]``, a feature map."""
    batch = draft.size("B", sizes.BATCH)
    channels = draft.size("C", sizes.CHANNELS)
    height = draft.size("H", sizes.IMAGE)
    # Most images are square.
    width = draft.size("W", sizes.IMAGE if draft.chance(0.2) else (draft.value(height),))
    return draft.input(name, batch, channels, height, width)


def signal(draft: Draft, name: str = "x") -> Tensor:
    """``[B, C, L]``."""
    return draft.input(
        name, draft.size("B", sizes.BATCH), draft.size("C", sizes.CHANNELS), draft.size("L", sizes.SIGNAL)
    )


def anything(draft: Draft, name: str = "x") -> Tensor:
    """A tensor of any of these shapes."""
    return draft.choose(rows, tokens, image, signal)(draft, name)


def heads(draft: Draft, name: str) -> Tensor:
    """``[B, H, S, head]``: projected queries, keys or values."""
    draft.size("B", (1, 2, 4, 8))
    draft.size("H", sizes.HEADS)
    draft.size("S", sizes.SEQUENCE)
    draft.size("E", sizes.HEAD_WIDTH)
    return draft.input(name, "B", "H", "S", "E")
