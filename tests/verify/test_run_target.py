"""The recorded results of a call."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.verify.worker.run_target import snapshot

LAYOUTS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "expanded, as the gradient of a sum is": lambda x: x[:, :1].expand(4, 6),
    "expanded, with gaps": lambda x: x[:, :1].expand(4, 2),
    "windows that overlap": lambda x: x.flatten().unfold(0, 5, 2),
    "of one element": lambda x: x[0, 0].expand(3, 3),
    "empty": lambda x: x[:0].expand(0, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_keeps_values_and_layout(layout: str) -> None:
    value = LAYOUTS[layout](torch.arange(24.0).view(4, 6))
    kept, before = snapshot(value), value.clone()
    assert kept.stride() == value.stride()
    value.untyped_storage().fill_(0)
    assert torch.equal(kept, before)
