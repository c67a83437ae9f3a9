"""Copies and random tensors keep any strides: expanded, overlapping, with gaps."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import filled, laid_out, shares_elements

LAYOUTS = {
    "dense": ((3, 4), (4, 1), False),
    "transposed": ((3, 4), (1, 3), False),
    "with gaps": ((3, 4), (16, 2), False),
    "interleaved without overlap": ((2, 3, 2), (1, 4, 2), False),
    "expanded": ((3, 4), (0, 1), True),
    "expanded twice": ((3, 1, 4), (0, 7, 0), True),
    "windows": ((5, 4), (2, 1), True),
    "expanded windows": ((2, 5, 4), (0, 2, 1), True),
    "of size 1": ((1, 4), (0, 1), False),
    "empty": ((0, 4), (0, 1), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_have_the_values_and_the_strides(layout: str) -> None:
    shape, strides, shares = LAYOUTS[layout]
    memory = torch.arange(200.0)
    value = memory.as_strided(shape, strides, 3)
    assert shares_elements(shape, strides) == (shares and value.numel() > 0)
    for copied in (laid_out(value, strides), laid_out(value.contiguous(), strides)):
        assert copied.stride() == strides
        assert torch.equal(copied, value)
        assert copied.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr() or not value.numel()
    assert laid_out(value, strides, torch.float64).dtype is torch.float64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_tensors_have_the_strides_and_no_more_memory_than_needed(layout: str) -> None:
    shape, strides, _ = LAYOUTS[layout]
    made = filled(shape, strides, torch.rand)
    assert (tuple(made.shape), made.numel() == 0 or made.stride() == strides) == (shape, True)
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert made.untyped_storage().nbytes() <= 4 * (1 + max(reach, 0))
