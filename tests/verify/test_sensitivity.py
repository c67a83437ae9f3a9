"""How far inputs are perturbed to measure the sensitivity to rounding."""

from __future__ import annotations

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.worker.expectations import _finest_epsilon, _perturbed


def test_inputs_move_by_half_of_their_last_place() -> None:
    given = torch.tensor([1e-40, 0.0, 1.0, -3.0])
    moved = _perturbed({"x": given}, 7, EPSILON["float32"])["x"]
    assert torch.allclose(moved, given.double(), rtol=EPSILON["float32"] / 2, atol=0.0)
    assert moved[1] == 0.0
    assert not torch.equal(moved, given.double())


def test_results_are_moved_as_finely_as_the_finest_of_them_is_kept() -> None:
    """bfloat16 inputs of a float32 result do not excuse bfloat16 arithmetic."""
    assert _finest_epsilon([torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), 3]) == EPSILON["float32"]
