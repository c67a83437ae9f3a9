"""What a loop's kernel reads is in memory, whatever other kernels compute."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from tests.codegen.harness import verified
from tests.planning.situations import act, proposed, start

TEXT = """
import torch
import torch.nn.functional as F

# mtmc: x=f32[B,16,T] w=f32[16,16] B=2 T=24
def gated(x, w):
    rows_first = F.silu(x).transpose(1, 2)
    scale = torch.sigmoid(F.linear(rows_first, w)).transpose(1, 2)
    y, state = rows_first.transpose(1, 2), torch.zeros_like(x[:, :, 0])
    rows = []
    for t in range(x.shape[2]):
        state = scale[:, :, t] * state + y[:, :, t]
        rows.append(state)
    return torch.stack(rows, -1)
"""


def test_a_value_whose_views_cancel_is_in_memory_before_the_loop_or_the_step_is_refused(captured) -> None:
    """The loop reads ``silu`` by two views of which the first is the only result of another kernel."""
    capture = captured(TEXT, "gated")
    root = start(capture, TEXT)
    first = next(each for each in proposed(capture, root, ActionKind.FUSE) if "loop" in each.region)
    looped = act(capture, root, ActionKind.FUSE, *first.region, **first.params)
    assert "silu" not in first.region and verified(capture, looped).reason == ""
    with pytest.raises(CannotCode, match="the input silu of this kernel is not in memory"):
        act(capture, looped, ActionKind.FUSE, "silu", "transpose", config={"kind": "tile", "rows": 8, "block": 16})
