"""How far inputs are perturbed to measure the sensitivity to rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from wide import compared

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.worker.oracle_runs import limits
from mtmc_lsp.verify.worker.oracle_runs.tensors import finest_epsilon, perturbed


def test_inputs_move_by_half_of_their_last_place() -> None:
    given = torch.tensor([1e-40, 0.0, 1.0, -3.0])
    moved = perturbed({"x": given}, 7, EPSILON["float32"])["x"]
    assert torch.allclose(moved, given.double(), rtol=EPSILON["float32"] / 2, atol=0.0)
    assert moved[1] == 0.0
    assert not torch.equal(moved, given.double())


def test_results_are_moved_as_finely_as_the_finest_of_them_is_kept() -> None:
    """bfloat16 inputs of a float32 result do not excuse bfloat16 arithmetic."""
    assert finest_epsilon([torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), 3]) == EPSILON["float32"]


def _in_blocks(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sums of rows as a kernel computes them: a loop over blocks, then a tree."""

    def total(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(len(values), size)
        for block in values.split(size, 1):
            sums = sums + block
        while sums.shape[1] > 1:
            half = sums.shape[1] // 2
            sums = sums[:, :half] + sums[:, half:]
        return sums

    return total


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _layer_norm_in_blocks(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    total, count = _in_blocks(1024), x.shape[1]
    centred = x - total(x) / count
    return centred * torch.rsqrt(total(centred * centred) / count + 1e-5) * w + b


def _constant_rows(seed: int, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    value = 0.5 + float(torch.rand((), generator=generator))
    weights = {name: 0.1 * torch.randn(count, generator=generator) for name in ("w", "b")}
    return {"x": torch.full((4, count), value), "w": 1 + weights["w"], "b": weights["b"]}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1024, 4096, 8192])
def test_constant_rows_of_a_layer_norm_are_judged_by_what_rounding_does_to_them(
    count: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact result is the bias; all else is the rounding error of the mean, times 300."""
    inputs = _constant_rows(seed, count)
    assert compared(_layer_norm, _layer_norm_in_blocks, inputs, monkeypatch)[0] == ""


def _projected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) @ w


def _projected_in_halves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of operands that are each a sum of two float16 tensors, as on tensor cores."""

    def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high = values.half().float()
        return high, (values - high).half().float()

    (left, left_rest), (right, right_rest) = halves(F.layer_norm(x, x.shape[-1:])), halves(64.0 * w)
    return (left @ right + (left @ right_rest + left_rest @ right)) / 64.0


def _with_some_constant_rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2000, 256, generator=generator)
    x[:20] = 70.0 + torch.rand(20, 1, generator=generator)
    return {"x": x, "w": torch.randn(256, 256, generator=generator) / 16.0}


@pytest.mark.parametrize("small", [1 << 22, 1], ids=["many draws", "few draws"])
def test_ordinary_rounding_beside_constant_rows_is_no_error(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half a million elements, some have a tiny error in all draws, and an ordinary one in the candidate."""
    monkeypatch.setattr(limits, "SMALL", small)
    inputs = _with_some_constant_rows()
    assert compared(_projected, _projected_in_halves, inputs, monkeypatch)[0] == ""


@pytest.mark.parametrize("row", [3, 100], ids=["in a constant row", "in another row"])
def test_one_wrong_element_beside_constant_rows_is_an_error(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = _projected(x, w)
        result[row, 7] += 0.01 if row == 100 else 100.0
        return result

    assert compared(_projected, wrong, _with_some_constant_rows(), monkeypatch)[0]


@pytest.mark.parametrize("seed", range(6))
def test_constant_rows_do_not_excuse_lower_precision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_few_bits(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        mean = (x.half().float().sum(1, keepdim=True)) / x.shape[1]
        centred = x - mean
        return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5) * w + b

    assert compared(_layer_norm, with_few_bits, _constant_rows(seed, 768), monkeypatch)[0]


def _rounded_on_the_way(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(1, keepdim=True)
    return (centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-6)).bfloat16().float()


def _far_from_zero() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(512, 2048, generator=torch.Generator().manual_seed(3)) + 60.0}


def test_a_value_that_another_order_of_operations_rounds_to_the_next_number_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_another_order(x: torch.Tensor) -> torch.Tensor:
        total = _in_blocks(64)
        centred = x - total(x) / x.shape[1]
        return (centred / torch.sqrt(total(centred.square()) / x.shape[1] + 1e-6)).bfloat16().float()

    inputs = _far_from_zero()
    differing = (in_another_order(**inputs) != _rounded_on_the_way(**inputs)).sum()
    assert differing > 10, "some values are next to an edge"
    assert not compared(_rounded_on_the_way, in_another_order, inputs, monkeypatch)[0]


def test_a_value_that_is_rounded_two_numbers_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        result = _rounded_on_the_way(x)
        result[5, 7] *= 1.0 + 6 * EPSILON["bfloat16"]
        return result

    assert compared(_rounded_on_the_way, wrong, _far_from_zero(), monkeypatch)[0]


def _policy_loss(advantage: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return (normalised * ratio).mean()


def _policy_loss_in_blocks(advantage: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    def mean(values: torch.Tensor) -> torch.Tensor:
        return _in_blocks(64)(values[None])[0, 0] / values.numel()

    centred = advantage - mean(advantage)
    deviation = torch.sqrt(mean(centred * centred) * advantage.numel() / (advantage.numel() - 1))
    return mean(centred / (deviation + 1e-8) * ratio)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_the_mean_of_equal_numbers_may_be_off_by_rounding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exact in float64 and representable, but partial sums are rounded; the deviation from it is then divided by itself."""
    value = 0.5 + float(torch.rand((), generator=torch.Generator().manual_seed(seed)))
    ratio = torch.full((51_200,), 0.5 + value)
    assert (
        compared(
            _policy_loss,
            _policy_loss_in_blocks,
            {"advantage": torch.full((51_200,), value), "ratio": ratio},
            monkeypatch,
        )[0]
        == ""
    )


def test_a_loss_of_ordinary_values_is_judged_as_strictly_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(51_200, generator=generator) for name in ("advantage", "ratio")}

    def wrong(advantage: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
        return _policy_loss_in_blocks(advantage, ratio) * 1.01

    assert compared(_policy_loss, _policy_loss_in_blocks, inputs, monkeypatch)[0] == ""
    assert compared(_policy_loss, wrong, inputs, monkeypatch)[0] != ""


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _normalised_in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-5)


def _normalised_in_float32(x: torch.Tensor) -> torch.Tensor:
    total = _in_blocks(64)
    wide = x.float()
    centred = wide - total(wide) / x.shape[1]
    return (centred * torch.rsqrt(total(centred.square()) / x.shape[1] + 1e-5)).to(x.dtype)


def test_a_mean_far_above_the_spread_excuses_16_bits_only_where_the_reference_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``F.layer_norm`` computes in float32, the other reference rounds its mean to bfloat16."""
    generator = torch.Generator().manual_seed(3)
    inputs = {"x": (torch.randn(64, 256, generator=generator) + 60.0).bfloat16()}
    assert "relative L2 error" in compared(_normalised, _normalised_in_bfloat16, inputs, monkeypatch)[0]
    assert not compared(_normalised, _normalised_in_float32, inputs, monkeypatch)[0]
    assert not compared(_normalised_in_bfloat16, _normalised_in_bfloat16, inputs, monkeypatch)[0]
    assert not compared(_normalised_in_bfloat16, _normalised_in_float32, inputs, monkeypatch)[0]


def test_few_rows_may_have_a_small_error_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": (torch.randn(2, 2048, generator=torch.Generator().manual_seed(3)) + 60.0).bfloat16()}
    assert not compared(_normalised, _normalised_in_bfloat16, inputs, monkeypatch)[0]


def _no_divergence(logp: torch.Tensor) -> torch.Tensor:
    """The divergence of a distribution from itself: torch's ``log`` of its ``exp`` is the same number again."""
    return (logp.exp() * (logp - torch.log(logp.exp()))).sum()


def _no_divergence_by_powers_of_two(logp: torch.Tensor) -> torch.Tensor:
    p = torch.exp2(logp * 1.4426950408889634)
    return (p * (logp - torch.log2(p) * 0.6931471805599453)).sum()


@pytest.mark.parametrize("small", [1 << 22, 1], ids=["few elements", "many elements"])
def test_terms_that_cancel_exactly_in_the_reference_may_leave_rounding_errors(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SMALL", small)
    inputs = {"logp": -12.0 + torch.rand(64, generator=torch.Generator().manual_seed(3))}
    assert _no_divergence(**inputs) == 0.0
    assert _no_divergence_by_powers_of_two(**inputs) != 0.0
    assert not compared(_no_divergence, _no_divergence_by_powers_of_two, inputs, monkeypatch)[0]
    assert compared(_no_divergence, lambda logp: _no_divergence(logp) + 1e-2, inputs, monkeypatch)[0]


def _activated(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _activated_by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))


def test_an_activation_that_is_0_by_rounding_may_be_the_tiny_exact_value(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": torch.full((4, 8), -8.0)}
    assert not _activated(**inputs).any()
    assert _activated_by_sigmoid(**inputs).all()
    assert not compared(_activated, _activated_by_sigmoid, inputs, monkeypatch)[0]
    assert compared(_activated, lambda x: _activated(x) - 1e-4, inputs, monkeypatch)[0]


def test_a_result_of_zeros_that_no_rounding_changes_stays_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": -torch.rand(4, 8, generator=torch.Generator().manual_seed(3)) - 1.0}
    assert compared(F.relu, lambda input: F.relu(input) + 1e-20, {"input": inputs["x"]}, monkeypatch)[0]
