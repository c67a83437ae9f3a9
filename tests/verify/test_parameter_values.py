"""Parameters of a case have other values than the initial ones, and what follows from these is read once."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.verify.worker.values import parameters
from mtmc_lsp.verify.worker.values.parameters import observe, varied


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5), (3, 4)], ids=["the same shape", "another shape"])
@pytest.mark.parametrize("is_positive", [False, True])
def test_values_vary_around_the_initial_ones_and_keep_their_sign(
    is_positive: bool, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weights = torch.randn(6, 5, generator=generator(0)).to(dtype)
    held = torch.nn.Parameter(weights.abs() if is_positive else weights, requires_grad=False)
    observe([held])
    first, again, other = (varied(held, shape, generator(seed)) for seed in (1, 1, 2))
    assert first.shape == shape and first.dtype == dtype
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert bool((first > 0).all()) is is_positive
    if shape == held.shape:
        assert not torch.equal(first, held)
        assert float((first.float() - held.float()).abs().max()) < (1.0 if is_positive else 0.1)
    assert torch.equal(held, weights.abs() if is_positive else weights)


@pytest.mark.parametrize("shape", [(50,), (80,)], ids=["the same shape", "another shape"])
def test_fractions_stay_below_one(shape: tuple[int]) -> None:
    """Of 1 minus a noise schedule or a decay, programs take roots and logarithms."""
    betas = torch.linspace(0.1, 0.98, 50)
    observe([betas])
    changed = varied(betas, shape, generator(1))
    assert bool(((changed > 0) & (changed < 1)).all())
    assert float(changed.std()) > 0.1 and not torch.equal(changed, betas)
    ones = torch.ones(50)
    observe([ones])
    assert bool((varied(ones, (50,), generator(1)) > 1).any())


def test_zeros_and_whole_numbers() -> None:
    zeros, counts = torch.zeros(4), torch.tensor([3, 4])
    observe([zeros, counts])
    assert bool((varied(zeros, (4,), generator(1)) > 0).any())
    assert torch.equal(varied(counts, (2,), generator(1)), counts)
    assert torch.equal(varied(counts, (3,), generator(1)), torch.tensor([3, 3, 3]))


def test_facts_are_read_once_for_all_cases_until_the_tensor_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    numbers = parameters.numbers

    def noting(values: list[torch.Tensor]) -> list[float]:
        reads.append(len(values))
        return numbers(values)

    monkeypatch.setattr(parameters, "numbers", noting)
    held = [torch.ones(3), torch.ones(2)]
    for _ in range(3):
        observe(held)
    assert [count for count in reads if count] == [2]
    held[0].neg_()
    observe(held)
    assert [count for count in reads if count] == [2, 1]
    assert bool((varied(held[0], (3,), generator(1)) < 0).all())
