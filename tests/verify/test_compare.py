"""Comparison of a result with the reference and the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.worker.comparison.compare import Comparison, agreement, measure
from mtmc_lsp.verify.worker.comparison.discrete import Ties, discrete_difference
from mtmc_lsp.verify.worker.comparison.distances import oracle_distance


def judged(mine, own, oracle, sensitivity=0.0, precision="budget"):
    return agreement(mine, own, oracle, sensitivity, FACTORS[precision]).problem


def sample(dtype=torch.float32):
    oracle = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return oracle.to(dtype), oracle


def moved(values: torch.Tensor, part: float) -> torch.Tensor:
    signs = torch.ones_like(values)
    signs[::2] = -1
    return values * (1 + part * signs)


def test_eight_times_the_users_own_error_is_allowed_and_no_more() -> None:
    _, oracle = sample()
    own = moved(oracle, 1e-6).float()
    assert judged(moved(oracle, 7e-6).float(), own, oracle) == ""
    assert "relative L2 error" in judged(moved(oracle, 9e-6).float(), own, oracle)


def test_strict_precision_allows_less() -> None:
    _, oracle = sample()
    own = moved(oracle, 1e-6).float()
    mine = moved(oracle, 7e-6).float()
    assert judged(mine, own, oracle, precision="strict")


def test_however_bad_the_users_own_code_is_the_published_tolerance_is_the_limit() -> None:
    """Eight times 4e-5 would be above 1e-4."""
    _, oracle = sample()
    assert judged(moved(oracle, 2e-4).float(), moved(oracle, 4e-5).float(), oracle)


def test_half_precision_where_the_user_has_single_is_out_of_budget() -> None:
    own, oracle = sample()
    assert judged(own.half().float(), own, oracle)


def test_a_last_bit_is_allowed_where_the_users_own_code_is_exact() -> None:
    own, oracle = sample(torch.float32)
    oracle = own.double()
    assert judged(torch.nextafter(own, own * 2), own, oracle) == ""


def test_a_problem_that_magnifies_rounding_is_given_that_much() -> None:
    _, oracle = sample()
    own, mine = oracle.float(), moved(oracle, 3e-5).float()
    assert judged(mine, own, oracle)
    assert judged(mine, own, oracle, sensitivity=oracle_distance(moved(oracle, 1e-5), own, oracle)) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.index_fill(0, torch.tensor([3]), float("nan")), "never written"),
        (lambda t: t.index_fill(0, torch.tensor([3]), float("inf")), "never written"),
        (lambda t: t.index_fill(0, torch.tensor([0]), 1.0), "should be NaN"),
        (lambda t: t.index_fill(0, torch.tensor([1]), 1.0), "should be infinite"),
        (lambda t: t.index_fill(0, torch.tensor([1]), float("-inf")), "should be infinite"),
    ],
)
def test_nan_and_infinity_stand_where_the_user_has_them(change, said: str) -> None:
    own, oracle = sample()
    for tensor in (own, oracle):
        tensor[0], tensor[1] = float("nan"), float("inf")
    assert judged(own.clone(), own, oracle) == ""
    assert said in judged(change(own.clone()), own, oracle)


def test_what_the_dtype_cannot_hold_does_not_decide_and_the_rest_does() -> None:
    """``nan_to_num`` gives the largest number of each dtype: the oracle's is beyond what the result can be."""
    own, oracle = sample()
    own[0], oracle[0] = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max
    assert judged(own.clone(), own, oracle) == ""
    assert "relative L2 error" in judged(own * 1.01, own, oracle)


def test_integers_are_compared_exactly() -> None:
    own = torch.arange(5)
    assert discrete_difference(own.clone(), own, own, 0.0, None, 8.0) == ""
    assert discrete_difference(own + (own == 2), own, own, 0.0, None, 8.0) == "1 of 5 elements differ"


def test_where_rounding_decides_on_which_side_of_an_edge_a_value_lies_others_may_lie_elsewhere() -> None:
    oracle = torch.arange(1000) % 200 - 100
    own, moved = oracle.clone(), 0.0
    own[::100] += 1
    mine = oracle.clone()
    mine[1::50] -= 1
    assert discrete_difference(mine, own, oracle, moved, None, 8.0) == "", "20 others, and the user's own code has 10"
    assert "10 in your code, the limit is 20" in discrete_difference(oracle + 1, own, oracle, moved, None, 8.0)
    two_off = discrete_difference(mine.where(mine == oracle, mine - 1), own, oracle, moved, None, 8.0)
    assert "by up to 2 from the float64 oracle; your code differs from it by up to 1" in two_off
    few = oracle.clone()
    few[3] += 1
    assert discrete_difference(few, oracle, oracle, 0.001, None, 8.0) == "", (
        "the oracle itself moves by one in a thousand"
    )
    assert discrete_difference(few, oracle, oracle, 0.0, None, 8.0)


def test_of_integers_that_move_with_the_inputs_rounding_the_part_is_told() -> None:
    own = torch.arange(8, dtype=torch.int8)
    moved = own.clone()
    moved[2] += 1
    assert oracle_distance(moved, own, own) == 1 / 8
    assert oracle_distance(own, own, own) == 0.0


def test_so_near_the_end_of_a_dtype_that_rounding_leads_beyond_no_result_is_wrong() -> None:
    oracle = torch.tensor([65510.0, 3.0], dtype=torch.float64)
    own = oracle.half()
    mine = torch.tensor([float("inf"), 3.0], dtype=torch.float16)
    assert judged(mine, own, oracle) == ""
    assert judged(torch.tensor([65504.0, float("inf")], dtype=torch.float16), own, oracle)


def test_another_index_is_right_only_where_the_values_tie() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0], [0.0, 5.0, 1.0]], dtype=torch.float64)
    own = torch.tensor([1, 1])
    choice = {"values": values, "error": torch.zeros(2, 3), "dim": -1, "shape": (2, 1), "is_order": False}
    ties = vars(Ties([choice], epsilon=1e-6))
    assert discrete_difference(torch.tensor([2, 1]), own, own, 0.0, ties, 8.0) == ""
    assert discrete_difference(torch.tensor([2, 2]), own, own, 0.0, ties, 8.0) == "1 of 2 elements differ"
    assert discrete_difference(torch.tensor([2, 7]), own, own, 0.0, ties, 8.0), (
        "an index out of range is wrong, not an error"
    )
    of_all = {"values": values.flatten(), "error": torch.zeros(6), "dim": 0, "shape": (1,), "is_order": False}
    flat = vars(Ties([of_all], epsilon=1e-6))
    assert discrete_difference(torch.tensor(3), torch.tensor(4), torch.tensor(4), 0.0, flat, 8.0)


def test_of_one_number_twice_the_users_own_error_is_luck_and_eight_times_is_not() -> None:
    """Beyond the tolerance: a scalar's error may by chance be small where that of many elements is what it always is."""
    oracle = torch.tensor(3.0, dtype=torch.float64)
    own = oracle * (1 + 1e-3)
    assert judged((oracle * (1 + 6e-3)).float(), own.float(), oracle) == ""
    assert judged((oracle * (1 + 9e-3)).float(), own.float(), oracle)
    _, many = sample()
    assert judged(moved(many, 6e-3).float(), moved(many, 1e-3).float(), many)


def test_what_is_noise_must_still_be_written() -> None:
    own, oracle = sample()
    unwritten = own.index_fill(0, torch.tensor([3]), float("nan"))
    assert judged(own * 2, own, oracle, sensitivity=0.2) == ""
    assert judged(own * 2, own, oracle, sensitivity=0.02), "rounding does not move it that far"
    assert "never written" in judged(unwritten, own, oracle, sensitivity=0.2)


def test_an_input_that_is_left_alone_is_no_other_tensor_afterwards() -> None:
    """What a candidate left may claim any shape: it is not compared element by element with one that it does not have."""
    comparison = Comparison("budget")
    before = torch.ones(4)
    comparison.unchanged("x", before, torch.ones(1).expand(1 << 40))
    comparison.unchanged("x", before, torch.tensor([1.0, 2.0, 1.0, 1.0]))
    comparison.unchanged("x", before, None)
    details = [check["detail"] for check in comparison.finish()[0]]
    assert details == ["it is another tensor", "1 elements were overwritten", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("outlier", [0.0, math.inf, -math.inf, math.nan])
def test_the_distance_from_the_oracle_is_that_of_the_finite_elements(dtype: torch.dtype, outlier: float) -> None:
    generator = torch.Generator().manual_seed(3)
    oracle = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    reference, candidate = oracle.to(dtype), (oracle * 1.01).to(dtype)
    for tensor in (oracle, reference, candidate):
        tensor[1, 2] = outlier
    values = measure(candidate, reference, oracle)
    where = oracle.isfinite()
    count = int(where.sum())
    assert values[:5].tolist() == [0, 0, 0, count, 20]
    distances = [torch.linalg.vector_norm((tensor.double() - oracle)[where]) for tensor in (candidate, reference)]
    torch.testing.assert_close(values[5:], torch.stack([*distances, torch.linalg.vector_norm(oracle[where])]))
