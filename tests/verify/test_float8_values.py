"""Products of float8 operands in the reference in float64, and other values of float8 tensors."""

from __future__ import annotations

import pytest
import torch
from wide import expected

from mtmc_lsp.verify.worker.values.float8 import reversed_and_scaled, scaled_product
from tests.versions import needs_scales_of_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def sample(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float16, torch.float32])
def test_reversed_values_keep_their_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    changed = reversed_and_scaled(value, 0.5)
    assert changed.dtype == dtype
    assert changed.float().tolist() == [[2.0, 1.5], [1.0, 0.5]]


def test_scaled_values_stay_finite() -> None:
    assert reversed_and_scaled(torch.tensor([448.0, 1.0]).to(E4M3), 1.5).float().tolist() == [1.5, 448.0]


@pytest.mark.parametrize("scales", ["tensors", pytest.param("rows and columns", marks=needs_scales_of_rows)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_oracle_of_a_scaled_product_has_no_rounding(
    scales: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((16, 1), (1, 48)) if "rows" in scales else ((), ())
    inputs = {
        "x": sample(16, 64), "w": sample(48, 64, seed=2).to(E4M3), "s": sample(*shapes[0], seed=3).abs(),
        "t": sample(*shapes[1], seed=4).abs(), "bias": sample(48, seed=5).bfloat16(),
    }  # fmt: skip

    def function(x, w, s, t, bias):
        x = x.clamp(-448, 448).to(E4M3)
        bias = bias if has_bias else None
        return torch._scaled_mm(x, w.t(), s, t, bias=bias, out_dtype=torch.bfloat16)

    oracle = expected(function, inputs, monkeypatch)["oracle"][0]
    x, w, s, t, bias = (value.double() for value in inputs.values())
    exact = (x.to(E4M3).double() @ w.t()) * s * t + (bias if has_bias else 0)
    torch.testing.assert_close(oracle, exact, rtol=1e-12, atol=1e-12)
    rounded = function(**inputs)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - exact).norm() < 0.01 * exact.norm()


def test_scales_of_blocks_are_not_taken_for_scales_of_rows() -> None:
    x, w = sample(16, 64).to(E4M3), sample(64, 48).to(E4M3)
    with pytest.raises(NotImplementedError, match="blocks"):
        scaled_product(x, w, torch.ones(16, 2), torch.ones(2, 48))
