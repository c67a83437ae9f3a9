"""A different index is correct only if the values at both indices tie."""

from __future__ import annotations

import pytest
import torch
from wide import compared

from mtmc_lsp.verify.worker.comparison.discrete import Ties, discrete_difference

NAN, INF = float("nan"), float("inf")


def wrong(
    values: list[float], own: int, mine: int, *, epsilon: float = 1e-6, dtype: torch.dtype = torch.float64
) -> str:
    scores = torch.tensor([values], dtype=dtype)
    choice = {"values": scores, "error": torch.zeros(scores.shape), "dim": -1, "shape": (1, 1), "is_order": False}
    index = torch.tensor([own])
    ties = vars(Ties([choice], epsilon=epsilon))
    return discrete_difference(torch.tensor([mine]), index, index, 0.0, ties, 8.0)


@pytest.mark.parametrize(
    ("values", "own", "mine"),
    [
        ([1.0, NAN, NAN], 1, 2),
        ([1.0, NAN, 2.0], 1, 0),
        ([1.0, NAN, INF], 1, 2),
        ([1.0, INF, 2.0], 1, 2),
        ([1.0, INF, -INF], 1, 2),
        ([-INF, 1.0, 2.0], 0, 1),
        ([1.0, 2.0, NAN], 1, 2),
        ([1.0, 2.0, INF], 1, 2),
    ],
)
def test_nan_and_infinity_tie_with_nothing_else(values: list[float], own: int, mine: int) -> None:
    """Of several NaN torch takes the first."""
    assert wrong(values, own, mine) == "1 of 1 elements differ"
    assert wrong(values, own, own) == ""


def test_equal_infinite_values_tie() -> None:
    assert wrong([INF, 1.0, INF], 0, 2) == ""
    assert wrong([-INF, -INF], 0, 1) == ""


def test_whole_numbers_and_truth_values_tie_only_where_they_are_equal() -> None:
    large = [100_000_000, 100_000_001, 100_000_000]
    assert wrong(large, 1, 0, epsilon=1e-6, dtype=torch.int64)
    assert wrong(large, 0, 2, epsilon=1e-6, dtype=torch.int64) == ""
    assert wrong([0, 1, 1], 1, 0, dtype=torch.bool) and not wrong([0, 1, 1], 1, 2, dtype=torch.bool)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("seed", range(6))
def test_of_random_rows_with_nan_and_infinity_only_the_users_index_passes(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch chooses in float32 and in float64; of each row without ties every other index is wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 7, generator=generator)
    places = torch.rand(9, 7, generator=generator)
    x[places < 0.1], x[(places > 0.1) & (places < 0.15)], x[places > 0.95] = NAN, INF, -INF
    pick = getattr(torch, name)
    assert compared(lambda x: pick(x, -1), lambda x: pick(x, -1), {"x": x}, monkeypatch)[0] == ""
    chosen = pick(x, -1)
    for row in range(9):
        for column in set(range(7)) - {int(chosen[row])}:
            if x[row, column] == x[row, chosen[row]]:
                continue
            other = chosen.clone()
            other[row] = column
            assert compared(lambda x: pick(x, -1), lambda x: other, {"x": x}, monkeypatch)[0]  # noqa: B023


@pytest.mark.parametrize("order", [lambda x: x.sort(-1), lambda x: x.topk(4, -1), lambda x: (x.argsort(-1),)])
def test_an_order_names_each_place_once(order, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[2.0, 1.0, 2.0, NAN, 2.0], [3.0, 3.0, 1.0, 0.0, NAN]])
    found = order(x)
    *values, index = found

    def with_order(other: torch.Tensor) -> str:
        return compared(order, lambda x: type(found)((*values, other)), {"x": x}, monkeypatch)[0]

    assert with_order(index) == ""
    equal = index == 0
    turned = torch.where(equal, 2, torch.where(index == 2, 0, index))[:1]
    swapped = torch.cat([turned, index[1:]])
    assert with_order(swapped) == "", "2.0 and 2.0 tie"
    twice = torch.where(index == 2, 0, index)
    assert "occur twice" in with_order(twice)
