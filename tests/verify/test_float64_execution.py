"""The reference in float64: rounded where it casts to a narrower float, exact elsewhere, with the user's dtypes visible."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from wide import expected

from mtmc_lsp.verify.worker import float64_execution
from mtmc_lsp.verify.worker.float64_execution import CALLS_BETWEEN_TIMINGS, Float64Mode
from mtmc_lsp.verify.worker.values import stochastic_rounding
from mtmc_lsp.verify.worker.values.stochastic_rounding import rounded_at_random


def sample(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (16, 24), generator=torch.Generator().manual_seed(1)).to(dtype)


def oracle(function, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    return expected(function, {"x": x}, monkeypatch)["oracle"][0]


HALF, WIDE = torch.float16, torch.float64


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.half(),
        lambda x: x.to(HALF),
        lambda x: x.to(dtype=HALF),
        lambda x: x.to("cpu", HALF),
        lambda x: x.type(HALF),
        lambda x: x.type("torch.HalfTensor"),
        lambda x: x.type_as(torch.ones(1, dtype=HALF)),
        lambda x: x.to(torch.ones(1, dtype=HALF)),
        lambda x: x[:, 3:].half(),
        lambda x: x.half().float().double(),
    ],
)
def test_a_cast_down_rounds_and_goes_on_in_float64(cast, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample()
    found = oracle(lambda x: cast(x) * 3.1, x, monkeypatch)
    assert found.dtype is WIDE
    wanted = cast(x).double() * 3.1
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_through_other_floats_round_as_the_users_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample()
    assert torch.equal(oracle(lambda x: x.to(dtype).float(), x, monkeypatch), x.to(dtype).double())
    low = x.half()
    both = oracle(lambda x: x.bfloat16(), low, monkeypatch)
    assert torch.equal(both, low.bfloat16().double()), "bfloat16 holds fewer digits than float16"


def test_casts_to_float8_and_to_integers_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample()
    assert torch.equal(
        oracle(lambda x: x.to(torch.float8_e4m3fn).float(), x, monkeypatch), x.to(torch.float8_e4m3fn).double()
    )
    assert torch.equal(oracle(lambda x: (x * 9).int().float(), x, monkeypatch), (x.double() * 9).int().double())
    many = oracle(lambda x: torch.arange(5000).half() + 0 * x.sum(), x, monkeypatch)
    assert torch.equal(many, torch.arange(5000).half().double()), "float16 does not hold each of them"


def test_a_number_that_simply_is_half_is_not_rounded_between_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half inputs, what is computed of them, and their way up to float32 and back to what they are."""
    x = sample(HALF)
    wide = x.double()
    assert torch.equal(oracle(lambda x: x * 1.1 * x, x, monkeypatch), wide * 1.1 * wide)
    assert torch.equal(oracle(lambda x: (x * 1.1).half() * x, x, monkeypatch), wide * 1.1 * wide), "it is no cast there"
    assert torch.equal(oracle(lambda x: (x * 1.1).float(), x, monkeypatch), wide * 1.1)
    back = oracle(lambda x: (x.float() * 1.1).to(x.dtype) * 2, x, monkeypatch)
    assert torch.equal(back, (wide * 1.1).half().double() * 2), "but behind a float32 result it is"


def test_products_under_autocast_are_exact_and_known_to_be_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.t()
        assert y.dtype == torch.bfloat16
        return y, y.to(torch.bfloat16) + 1, y.float()

    x = sample()
    wanted = x.double() @ x.double().t()
    found = expected(function, {"x": x}, monkeypatch)["oracle"]
    assert all(torch.equal(mine, own) for mine, own in zip(found, (wanted, wanted + 1, wanted), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_code_that_asks_for_the_dtype_is_told_the_users(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        info = torch.finfo((x * 2).dtype)
        assert x.dtype == dtype and x.type() == torch.zeros(1, dtype=dtype).type()
        assert torch.promote_types(x.dtype, HALF) == torch.promote_types(dtype, HALF)
        assert torch.cat([x[:1].float(), x]).dtype == torch.promote_types(dtype, torch.float32)
        assert (x > 0).dtype == torch.bool and torch.zeros(3).dtype == torch.float32
        assert (x + torch.tensor(1.0)).dtype == dtype and F.softmax(x, -1, dtype=torch.float32).dtype == torch.float32
        return torch.full_like(x, info.eps)

    x = sample(dtype)
    assert torch.equal(oracle(function, x, monkeypatch), torch.full(x.shape, torch.finfo(dtype).eps, dtype=WIDE))


def test_a_cast_makes_a_tensor_of_its_own_where_it_does_in_the_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.float()
        y.add_(1.0)
        return x, y

    x = sample(HALF)
    same, more = expected(function, {"x": x}, monkeypatch)["oracle"]
    assert torch.equal(same, x.double()) and torch.equal(more, x.double() + 1)


def test_an_input_that_is_cast_itself_is_the_same_number_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved by rounding it would now and then be cast to the next number, which no implementation may do."""
    x = sample(torch.float32, 300, 300)
    for cast in (lambda x: x.half().float(), lambda x: x.t()[5:].bfloat16().float(), lambda x: x.int()):
        assert expected(cast, {"x": x}, monkeypatch)["sensitivity"][0] == 0.0
    changed = expected(lambda x: x.clone().mul_(1.1).half().float(), {"x": x}, monkeypatch)["sensitivity"][0]
    assert changed > 0.0, "what was computed lies on one side of an edge or the other"


def test_results_scatter_only_where_their_dtype_cannot_hold_them() -> None:
    x, whole, mode = 1 + sample(WIDE).abs(), torch.arange(64.0, dtype=WIDE), Float64Mode()
    for dtype in (torch.float32, torch.float16):
        low = x.to(dtype)
        wide = low.double()
        with mode, mode.with_inputs({"x": wide, "n": whole}, {"x": low, "n": whole.to(dtype)}, rounding_seed=1):
            found, exact, view = wide * wide, whole * whole[:, None], wide.t()
        apart = (found - wide * wide).abs() / (wide * wide)
        assert 0.1 * torch.finfo(dtype).eps < float(apart.max()) <= torch.finfo(dtype).eps
        assert torch.equal(found, found.to(dtype).double())
        products = whole * whole[:, None]
        fits = products.to(dtype).double() == products
        assert torch.equal(exact[fits], products[fits]) and torch.equal(view, wide.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece", [1 << 26, 777])
def test_random_rounding_has_no_bias_and_keeps_what_the_dtype_holds(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stochastic_rounding, "PIECE", piece)
    info, generator = torch.finfo(dtype), torch.Generator().manual_seed(1)
    parts = torch.tensor([0.0, 0.25, 0.5, 0.9, -0.25], dtype=WIDE)
    start = torch.tensor([1.0, 1.0, 1.5, 7.0, -1.0], dtype=WIDE)
    step = info.eps * torch.tensor([1.0, 1.0, 1.0, 4.0, 1.0], dtype=WIDE)
    values = (start + parts * step).repeat(20000, 1)
    apart = (rounded_at_random(values, dtype, generator, tuple(values.shape)) - start) / step
    expected_parts = parts.abs() * start.sign()
    assert set(apart.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert torch.allclose(apart.mean(0), expected_parts, atol=0.02)
    least = info.tiny * info.eps
    held = torch.tensor([least, 3 * least, info.tiny, info.max, -info.max, 0.0, math.inf, -math.inf, math.nan]).double()
    held = held.to(dtype).double()
    kept = rounded_at_random(held, dtype, generator, (1,))
    assert torch.equal(kept.nan_to_num(nan=-7.0), held.nan_to_num(nan=-7.0))
    # Subnormal numbers of the dtype, and numbers beyond its largest.
    edges = torch.tensor([2.3 * least, 0.3 * least, 1.5 * info.max], dtype=WIDE)
    low, none, high = rounded_at_random(edges, dtype, generator, (3,)).tolist()
    assert (low, none) == (2 * least, 0.0) and abs(high / (1.5 * info.max) - 1) <= info.eps


def test_equal_elements_may_scatter_alike() -> None:
    """The errors of many elements next to one number are one error, which a sum of them magnifies."""
    x, mode = torch.full((64,), 1.1, dtype=WIDE), Float64Mode()
    low = x.float()
    spreads = {}
    for together in (True, False):
        wide = low.double()
        with mode, mode.with_inputs({"x": wide}, {"x": low}, rounding_seed=1, shares_draw=together):
            found = wide * wide
        spreads[together] = len(found.unique())
        assert not torch.equal(found, wide * wide)
    assert spreads == {True: 1, False: 2}


def test_a_shortcut_of_torchs_that_gives_another_number_of_results_has_no_oracle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention of no tokens gives no weights by the fast path, which is not taken where calls are watched."""
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()

    def attended(x: torch.Tensor) -> list[torch.Tensor]:
        return [each for each in attention.to(x.dtype)(x, x, x) if each is not None]

    found = expected(attended, {"x": torch.rand(2, 0, 16)}, monkeypatch)
    assert len(found["results"]) == 1
    assert found["oracle"] == found["results"]


def test_rounded_results_keep_gaps_between_their_elements() -> None:
    x = torch.ones(1)
    mode = Float64Mode()
    with mode.with_inputs({"x": x.double()}, {"x": x}, rounding_seed=0), mode:
        value = torch.empty_strided((1, 2), (4, 2), dtype=torch.float32).as_strided((1, 2), (4, 2))
    assert value.stride() == (4, 2)


def test_dtypes_stay_those_of_a_normal_run_after_another_one_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        low = doubled.half()
        mixed, kept = low * low, doubled + 1
        wide = torch.ones(3, dtype=WIDE) + kept[0, :3].double()
        results = (doubled, doubled[:, 1:], low, mixed, kept, low + kept, wide, torch.zeros_like(low), torch.ones(2))
        seen.extend(value.dtype for value in results)
        return mixed.float() + kept

    x = sample()
    function(x)
    normal = list(seen)
    seen.clear()
    found = oracle(function, x, monkeypatch)
    assert normal == seen[len(normal) : 2 * len(normal)], "after the reference's run"
    assert torch.equal(found, (2 * x).half().double() ** 2 + (2 * x.double() + 1))


def test_timings_may_pass_during_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[None] = []
    monkeypatch.setattr(float64_execution, "let_timings_pass", lambda: passed.append(None))
    mode, x = Float64Mode(), sample()
    wide = x.double()
    with mode, mode.with_inputs({"x": wide}, {"x": x}):
        for _ in range(640):
            wide = wide * 0.5
    assert len(passed) == 640 // CALLS_BETWEEN_TIMINGS > 4


def test_an_operation_of_one_dtype_records_nothing() -> None:
    """Loops call many operations, so each call must be fast."""
    mode, x = Float64Mode(), sample()
    wide = {"x": x.double()}
    with mode, mode.with_inputs(wide, {"x": x}):
        result = (wide["x"] * 2).sum(1)
        assert not len(mode._user_dtypes)
        assert result.dtype is torch.float32 and result.data_ptr()
