"""No wrong result passes because the reference's error is large; no correct one fails because it is small by chance."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from wide import compared, expected

from mtmc_lsp.process.worker.tensor_ipc import export_, import_
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.worker.comparison.ill_conditioned import OUTLIERS

Function = Callable[..., torch.Tensor]


def sample(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape or (64, 48), generator=torch.Generator().manual_seed(seed))


def autocast_error(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = x @ x.t()
    return low.float() - x @ x.t()


FUNCTIONS: dict[str, Function] = {
    "what rounding loses": lambda x: x - x.half().float(),
    "what rounding loses of a result": lambda x: x * 1.1 - (x * 1.1).half().float(),
    "rounded": lambda x: x.half().float(),
    "rounded to bfloat16": lambda x: x.to(torch.bfloat16).float() * 3,
    "rounded to float8": lambda x: (x / 0.37).to(torch.float8_e4m3fn).float() * 0.37,
    "a straight-through estimator": lambda x: x + (torch.round(x * 16) / 16 - x).detach(),
    "rounded half way": lambda x: (x.exp().half() * 2).float() - x.exp(),
    "whole numbers": lambda x: (x * 9).int().float() / 9,
    "by the dtype": lambda x: x * (3.0 if x.dtype == torch.float32 else 2.0) + torch.finfo(x.dtype).eps,
}


def last_row(wrong: torch.Tensor) -> torch.Tensor:
    wrong[-1] = wrong[-1].flip(0)
    return wrong


def one_element(wrong: torch.Tensor) -> torch.Tensor:
    wrong[3, 5] += 1e-2 * wrong.abs().max()
    return wrong


CHEATS: dict[str, Callable[[Function, torch.Tensor], torch.Tensor]] = {
    "zeros": lambda f, x: torch.zeros_like(f(x)),
    "the input": lambda f, x: x[:, : f(x).shape[1]].clone() if f(x).shape != x.shape else x.clone(),
    "the mean": lambda f, x: torch.full_like(f(x), f(x).mean().item()),
    "noise of its size": lambda f, x: sample(*f(x).shape, seed=9) * f(x).std(),
    "its negative": lambda f, x: -f(x),
    "of other inputs": lambda f, x: f(x.flip(0)),
    "the last row wrong": lambda f, x: last_row(f(x)),
    "one element off": lambda f, x: one_element(f(x)),
    "a percent too large": lambda f, x: f(x) * 1.01,
    "never written": lambda f, x: f(x).index_fill(0, torch.tensor([5]), float("nan")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_cheat_passes_for_a_function_about_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, inputs = FUNCTIONS[name], {"x": sample(64, 64)}
    wrong, silent = compared(function, function, inputs, monkeypatch)
    assert (wrong, silent) == ("", [])
    passed = []
    for cheat, answer in CHEATS.items():
        if not compared(function, functools.partial(answer, function), inputs, monkeypatch)[0]:
            passed.append(cheat)
    assert passed == []


DROPPED: dict[str, tuple[Function, Function]] = {
    "a cast": (lambda x: x.half().float(), lambda x: x),
    "a cast in between": (lambda x: (x * 3).bfloat16().float() * 2, lambda x: x * 3 * 2),
    "a cast of another kind": (lambda x: x.half().float(), lambda x: x.bfloat16().float()),
    "a cast to float8": (lambda x: x.to(torch.float8_e4m3fn).float(), lambda x: x.half().float()),
    "a cast to integers": (lambda x: (x * 99).int().float(), lambda x: (x * 99).round()),
}


@pytest.mark.parametrize("what", DROPPED)
def test_a_candidate_that_drops_the_users_cast_is_wrong(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, candidate = DROPPED[what]
    assert "relative L2 error" in compared(function, candidate, {"x": sample()}, monkeypatch)[0]


def normal_of_constants(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def normal_otherwise(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    mean = x.flip(-1).cumsum(-1)[:, -1:] * (1.0 / n)
    return (x - mean) / ((((x - mean) ** 2).sum(-1, keepdim=True) / (n - 1)).sqrt() + 1e-6)


HONEST: dict[str, tuple[Function, Function, torch.Tensor]] = {
    "half, with sums in float32": (
        lambda x: (x * x.sum(-1, keepdim=True)).sum(-1) - x.square().sum(-1),
        lambda x: ((x.float() * x.float().sum(-1, keepdim=True)).sum(-1) - x.float().square().sum(-1)).half(),
        sample().half(),
    ),
    "half, and single elements that cancel": (
        lambda x: x.cumsum(-1) - x.cumsum(-1).mean(-1, keepdim=True),
        lambda x: (x.float().cumsum(-1) - x.float().cumsum(-1).mean(-1, keepdim=True)).half(),
        sample(40, 400).half(),
    ),
    "a norm of constant rows": (normal_of_constants, normal_otherwise, torch.full((16, 40), 0.7312)),
    "rounded as an input and computed otherwise": (
        lambda x: (x / 3).bfloat16().float(),
        lambda x: (x * (1 / 3)).bfloat16().float(),
        sample(200, 200),
    ),
    "what rounding loses, computed otherwise": (
        lambda x: x / 3 - (x / 3).half().float(),
        lambda x: x * (1 / 3) - (x * (1 / 3)).half().float(),
        sample(200, 200),
    ),
    "a fused norm without its inner rounding": (
        lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * x,
        lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * x.float()).to(x.dtype),
        sample().half(),
    ),
    "overflow in half": (lambda x: (x * x) / x, lambda x: (x * x) / x, 3e2 * sample().half()),
    "masked with the least number": (
        lambda x: torch.softmax(x.masked_fill(x > 1, torch.finfo(x.dtype).min), -1),
        lambda x: torch.softmax(x.float().masked_fill(x > 1, -float("inf")), -1).to(x.dtype),
        sample().half(),
    ),
}


@pytest.mark.parametrize("what", HONEST)
def test_a_correct_candidate_passes_however_large_the_users_own_error(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, candidate, x = HONEST[what]
    assert compared(function, candidate, {"x": x}, monkeypatch)[0] == ""


def test_elements_that_rounding_does_not_move_must_be_right_beside_some_that_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One quotient by next to nothing is as large as all others together, and no digit of it is certain."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x / x.sum(-1, keepdim=True)

    x = sample(64, 48)
    x[:, 0] += 10.0
    x[0, 0] -= x[0].sum()
    inputs = {"x": x}
    assert compared(function, function, inputs, monkeypatch) == ("", [])

    def wrong(x: torch.Tensor) -> torch.Tensor:
        found = function(x)
        found[1:] *= 1.01
        return found

    said = compared(function, wrong, inputs, monkeypatch)[0]
    assert "elements differ by more than rounding explains" in said
    assert str(int(OUTLIERS * 64 * 48)) in said


def test_where_float64_computes_something_else_the_users_own_result_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_memory(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if x.element_size() == 4 else 3.0)

    assert expected(by_memory, {"x": sample()}, monkeypatch)["ill_conditioned"][0]["is_unexplained"]
    assert compared(by_memory, lambda x: x * 2, {"x": sample()}, monkeypatch) == ("", [])
    for candidate in (lambda x: x * 3, lambda x: x * 2.01, lambda x: x * 0):
        assert "from your code's result" in compared(by_memory, candidate, {"x": sample()}, monkeypatch)[0]


def test_where_zeros_would_pass_too_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum and the same sum turned around differ by rounding alone."""
    x = sample()
    wrong, silent = compared(lambda x: x.sum(-1) - x.flip(-1).sum(-1), lambda x: 0 * x.sum(-1), {"x": x}, monkeypatch)
    assert (wrong, silent) == ("", ["result 0"])
    assert compared(autocast_error, autocast_error, {"x": x}, monkeypatch) == ("", ["result 0"]), "as that of autocast"
    assert "more than rounding explains" in compared(autocast_error, lambda x: x @ x.t(), {"x": x}, monkeypatch)[0]
    assert compared(lambda x: x.sum(-1), lambda x: x.sum(-1), {"x": x}, monkeypatch) == ("", [])


def angles(t: torch.Tensor, order: bool = False) -> torch.Tensor:
    step = -math.log(10000.0) / 64
    f = torch.exp(step * torch.arange(64).float()) if not order else torch.pow(math.exp(step), torch.arange(64.0))
    return torch.sin(t.float()[:, None] * f).sum(-1)


@pytest.mark.parametrize("time", [17, 431, 873, 999])
def test_one_number_is_not_judged_by_the_luck_of_the_users_own(time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sines of large angles: that the input is a whole number leaves what is computed of it no less uncertain."""
    inputs = {"t": torch.tensor([time])}
    sensitivity = expected(angles, inputs, monkeypatch)["sensitivity"][0]
    assert 1e-7 < sensitivity < 1e-3
    assert compared(angles, lambda t: angles(t, order=True), inputs, monkeypatch)[0] == ""
    assert compared(angles, lambda t: angles(t) * 1.01, inputs, monkeypatch)[0]


@pytest.mark.parametrize("seed", range(12))
def test_a_scalar_that_is_well_conditioned_is_held_to_its_precision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(64, 48, seed=seed)
    assert expected(lambda x: x.square().mean(), {"x": x}, monkeypatch)["sensitivity"][0] < 1e-6
    assert compared(lambda x: x.square().mean(), lambda x: x.square().mean() * (1 + 2e-5), {"x": x}, monkeypatch)[0]


def test_what_is_expected_of_doubtful_results_can_go_through_a_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for it in the process's memory."""
    want = expected(
        lambda x: x / x.sum(-1, keepdim=True), {"x": sample(8, 48) - sample(8, 48).mean(-1, keepdim=True)}, monkeypatch
    )
    path = str(tmp_path / "expected.pt")
    export_({"ill_conditioned": want["ill_conditioned"]}, path, in_memory=False)
    again = import_(path, "cpu")["ill_conditioned"][0]
    assert torch.equal(again["spread"], want["ill_conditioned"][0]["spread"]) and again["is_unexplained"] is False


WELL_CONDITIONED: dict[str, Function] = {
    "a scalar": lambda x: x.float().square().mean(),
    "rounded to bfloat16": lambda x: x.float().exp().to(torch.bfloat16).float() * 3,
    "in bfloat16": lambda x: torch.softmax(x.float(), -1).to(x.dtype) * 2,
}


@pytest.mark.parametrize("name", WELL_CONDITIONED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_draws_of_rounding_permit_no_larger_errors(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a candidate within their limits is within those of all draws."""
    function, inputs = WELL_CONDITIONED[name], {"x": sample().to(dtype)}
    few, every = (expected(function, inputs, monkeypatch, wanted=wanted) for wanted in (Draws.FEW, Draws.ALL))
    assert not every["omits_draws"]
    assert few["sensitivity"][0] <= every["sensitivity"][0]
    assert few["ill_conditioned"].keys() == every["ill_conditioned"].keys()
    for key, facts in few["ill_conditioned"].items():
        assert (facts["spread"] <= every["ill_conditioned"][key]["spread"]).all() and facts["outliers"] == 0.0
    if dtype is torch.bfloat16:
        assert few["omits_draws"]


def test_results_that_are_noise_get_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(8, 48) - sample(8, 48).mean(-1, keepdim=True)
    assert not expected(lambda x: x / x.sum(-1, keepdim=True), {"x": x}, monkeypatch, wanted=Draws.FEW)["omits_draws"]
