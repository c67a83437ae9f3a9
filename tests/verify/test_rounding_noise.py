"""Random rounding errors in the operations of the user's code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from mtmc_lsp.verify.worker.gradients.rounding_noise import RoundingNoise

EQUAL_ROWS = torch.tensor([0.3, -1.7, 5.1]).reshape(3, 1).expand(3, 8).contiguous()


@pytest.mark.parametrize(
    "normalize",
    [
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.group_norm(x[None], 3),
        lambda x: F.instance_norm(x[None]),
        lambda x: F.batch_norm(x.T, None, None, training=True),
        lambda x: x - x.mean(-1, keepdim=True),
    ],
    ids=["layer_norm", "group_norm", "instance_norm", "batch_norm", "mean"],
)
def test_the_mean_of_equal_values_is_subtracted_with_rounding_errors(
    normalize: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with RoundingNoise(1):
        assert 0 < normalize(EQUAL_ROWS.clone()).abs().max() < 0.01
    with RoundingNoise(1, units=1024):
        assert normalize(EQUAL_ROWS.clone()).all()


def test_an_operation_that_changes_statistics_keeps_its_operand_and_updates_them() -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    kept, mean, variance = x.clone(), torch.zeros(4), torch.ones(4)
    with RoundingNoise(1):
        torch.ops.aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.1, 1e-5)
    assert torch.equal(x, kept)
    torch.testing.assert_close(mean, 0.1 * x.mean(0))
    torch.testing.assert_close(variance, 0.9 + 0.1 * x.var(0))


def test_views_stay_views() -> None:
    x = torch.ones(4, 2, dtype=torch.complex64)
    with RoundingNoise(1):
        torch.view_as_real(x).zero_()
    assert not x.any()
