"""Comparisons of many tensors: by their memory, all of a group at once, and by their values where the memory differs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from mtmc_lsp.verify.worker.comparison import batched_reads
from mtmc_lsp.verify.worker.comparison.batched_reads import unequal
from mtmc_lsp.verify.worker.float64_execution import Float64Mode

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int64", "bool", "float8_e4m3fn", "complex64")
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: t.clone(),
    "transposed": lambda t: t.mT.contiguous().mT,
    "with gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:1].clone().expand(t.shape),
    "behind one element": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "a scalar": lambda t: t.flatten()[0].clone(),
    "empty": lambda t: t[:0].clone(),
}
CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "none": lambda t: None,
    "the last element": lambda t: t.view(-1)[-1:].copy_(torch.ones_like(t.view(-1)[-1:])),
    "NaN": lambda t: t.view(-1)[:1].copy_(torch.full((1,), float("nan"))),
    "minus zero": lambda t: t.view(-1)[1:2].copy_(-torch.zeros(1)),
}


@pytest.fixture(params=["joined", "on the host"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, on tensors of the host."""
    if request.param == "joined":
        monkeypatch.setattr(batched_reads, "_is_on_host", lambda tensor: False)
    return str(request.param)


def tensors(dtype: str, layout: str, change: str) -> torch.Tensor:
    torch.manual_seed(3)
    value = torch.randn(6, 5) if dtype != "bool" else torch.randn(6, 5) > 0
    value = torch.where(torch.arange(30).view(6, 5) == 1, torch.zeros(()), value.float()).to(getattr(torch, dtype))
    if value.dtype.is_floating_point or change == "none" or change == "the last element":
        CHANGES[change](value)
    return LAYOUTS[layout](value)


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape != b.shape
        or a.dtype != b.dtype
        or repr(a.tolist()).replace("-0.0", "0.0") != repr(b.tolist()).replace("-0.0", "0.0")
    )


def test_they_find_what_a_comparison_of_each_value_finds() -> None:
    every = {key: tensors(*key) for key in itertools.product(DTYPES, LAYOUTS, CHANGES)}
    pairs = {}
    for (dtype, layout, change), a in every.items():
        for other_layout, other_change in itertools.product(LAYOUTS, CHANGES):
            pairs[dtype, layout, change, other_layout, other_change] = (a, every[dtype, other_layout, other_change])
    pairs["other dtype"] = (torch.zeros(4), torch.zeros(4).half())
    expected = {key for key, pair in pairs.items() if differ(*pair)}
    assert unequal(pairs) == expected
    assert expected and len(expected) < len(pairs)


def test_one_element_of_one_of_many_tensors_shows() -> None:
    first = {i: torch.randn(3, i + 1) for i in range(200)}
    second = {i: value.clone() for i, value in first.items()}
    assert unequal({i: (first[i], second[i]) for i in first}) == set()
    second[117][2, 5] += 1e-6
    assert unequal({i: (first[i], second[i]) for i in first}) == {117}


def test_large_groups_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    joined: list[int] = []
    original = batched_reads._joined

    def noted(words: list[torch.Tensor]) -> torch.Tensor:
        joined.append(len(words))
        return original(words)

    monkeypatch.setattr(batched_reads, "_joined", noted)
    values = [torch.randn(16) for _ in range(64)]
    pairs = {i: (value, value.clone()) for i, value in enumerate(values)}
    assert not unequal(pairs)
    assert joined == ([64, 64] if where == "joined" else [])
    joined.clear()
    monkeypatch.setattr(batched_reads, "MOST_JOINED", 1024)
    pairs[63][1][0] += 1
    assert unequal(pairs) == {63}
    assert joined == ([16] * 8 if where == "joined" else [])


def test_under_the_oracle_s_mode_memory_is_compared_as_it_is() -> None:
    value, narrow = torch.randn(40, dtype=torch.float64), torch.ones(1)
    mode = Float64Mode(torch.float32)
    inputs = {"value": value, "one": narrow.double()}
    with mode, mode.with_inputs(inputs, {"value": value.float(), "one": narrow}):
        assert inputs["one"].dtype == narrow.dtype
        pairs = {"a": (value, value.clone()), "b": (value, value + 1e-12), "c": (inputs["one"], narrow)}
        assert unequal(pairs) == {"b"}
