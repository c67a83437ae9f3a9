"""Indices of scores that tie within the reference's rounding error, and what depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from wide import compared

from mtmc_lsp.verify.worker.choices import ChoiceRecorder

Function = Callable[..., Any]


def tied_codes() -> dict[str, torch.Tensor]:
    """Codes of which each even one is repeated, up to one unit in the last place of one element."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(32, 16, generator=generator)
    codes[1::2] = codes[::2]
    codes[1::2, 0] = torch.nextafter(codes[::2, 0], torch.tensor(torch.inf))
    return {"x": codes[torch.arange(64) % 32] + 0.1 * torch.randn(64, 16, generator=generator), "codes": codes}


def distances(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return x.square().sum(1, keepdim=True) - 2 * x @ codes.T + codes.square().sum(1)


def other_of_pair(index: torch.Tensor) -> torch.Tensor:
    return index + 1 - 2 * (index % 2)


REFERENCES: dict[str, Function] = {
    "argmin": lambda x, codes: distances(x, codes).argmin(1),
    "min": lambda x, codes: distances(x, codes).min(1)[1],
    "cdist": lambda x, codes: torch.cdist(x, codes).argmin(1).view(8, 8),
    "int32": lambda x, codes: distances(x, codes).argmin(1).to(torch.int32),
    "transposed": lambda x, codes: distances(x, codes).argmin(1).view(8, 8).T.contiguous(),
    "whole": lambda x, codes: distances(x, codes).argmin(1) // 2,
    "rest": lambda x, codes: distances(x, codes).argmin(1) % 2,
    "one hot": lambda x, codes: F.one_hot(distances(x, codes).argmin(1), 32),
    "kthvalue": lambda x, codes: distances(x, codes).kthvalue(1, 1)[1],
    "sort": lambda x, codes: distances(x, codes).sort(1)[1][:, 0].clone(),
}


def with_index(name: str, index: Function) -> Function:
    """A candidate for one of :data:`REFERENCES` that takes its indices from another function."""
    finish: dict[str, Function] = {
        "cdist": lambda i: i.view(8, 8),
        "int32": lambda i: i.to(torch.int32),
        "transposed": lambda i: i.view(8, 8).T.contiguous(),
        "whole": lambda i: i // 2,
        "rest": lambda i: i % 2,
        "one hot": lambda i: F.one_hot(i, 32),
    }
    return lambda x, codes: finish.get(name, lambda i: i)(index(distances(x, codes).argmin(1)))


@pytest.mark.parametrize("name", REFERENCES)
def test_the_index_of_a_score_that_ties_within_rounding_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = with_index(name, other_of_pair)
    assert compared(REFERENCES[name], candidate, tied_codes(), monkeypatch)[0] == ""


def first_wrong(index: torch.Tensor) -> torch.Tensor:
    return index.index_copy(0, torch.tensor([0]), (index[:1] + 3) % 32)


def far(index: torch.Tensor) -> torch.Tensor:
    return (index + 2) % 32


def outside(index: torch.Tensor) -> torch.Tensor:
    return index + 32


@pytest.mark.parametrize("wrong", [first_wrong, far, outside, torch.zeros_like])
@pytest.mark.parametrize("name", [name for name in REFERENCES if name not in ("rest", "one hot")])
def test_the_index_of_another_score_is_wrong(name: str, wrong: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the scores is far from those of other pairs."""
    assert "elements differ" in compared(REFERENCES[name], with_index(name, wrong), tied_codes(), monkeypatch)[0]


def test_an_index_from_scores_in_lower_precision_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = {"x": torch.randn(256, 64, generator=generator), "w": torch.randn(512, 64, generator=generator)}

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.T).argmax(1)

    def in_double(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return reference(x.double(), w.double())

    def in_half(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ w.bfloat16().T).argmax(1)

    assert compared(reference, in_double, inputs, monkeypatch)[0] == ""
    assert "elements differ" in compared(reference, in_half, inputs, monkeypatch)[0]


def quantised(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = distances(x, codes).argmin(1)
    return codes[index] * torch.arange(32).view(32, 1)[index], index


def test_values_that_are_read_at_a_tied_index_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows at both indices differ widely, so only the tie explains the difference."""

    def candidate(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = other_of_pair(distances(x, codes).argmin(1))
        return codes[index] * index[:, None], index

    inputs = tied_codes()
    assert compared(quantised, candidate, inputs, monkeypatch)[0] == ""
    only_values = compared(lambda **t: quantised(**t)[0], lambda **t: candidate(**t)[0], inputs, monkeypatch)
    assert only_values[0] == ""


def test_values_that_are_read_at_a_wrong_index_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidate(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        index = far(distances(x, codes).argmin(1))
        return codes[index] * index[:, None]

    def rounded(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return quantised(x, codes)[0].half().float()

    inputs = tied_codes()
    assert compared(lambda **t: quantised(**t)[0], candidate, inputs, monkeypatch)[0]
    separate = {"x": inputs["x"], "codes": torch.randn(32, 16, generator=torch.Generator().manual_seed(5))}
    assert compared(lambda **t: quantised(**t)[0], rounded, separate, monkeypatch)[0]


def test_one_tied_row_excuses_no_error_in_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(32, 16, generator=generator)
    codes[1] = codes[0]
    inputs = {"x": codes[torch.arange(640) % 32] + 0.1 * torch.randn(640, 16, generator=generator), "codes": codes}

    def candidate(scale: float) -> Function:
        def run(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            index = distances(x, codes).argmin(1)
            index = torch.where(index < 2, 1 - index, index)
            return codes[index] * index[:, None] * torch.where(index[:, None] < 2, 1.0, scale)

        return run

    def reference(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return quantised(x, codes)[0]

    assert compared(reference, candidate(1.0), inputs, monkeypatch)[0] == ""
    assert "explains" in compared(reference, candidate(1.001), inputs, monkeypatch)[0]


def test_an_order_of_tied_scores_is_open_and_every_other_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router of a mixture of experts: two experts tie at the edge of the selection."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(16, 32, generator=generator)
    w[7] = w[3]
    inputs = {"x": torch.randn(40, 32, generator=generator), "w": w}

    def swapped(order: list[int]) -> Function:
        def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, index = (x @ w[list(order)].T).softmax(1).topk(4, 1)
            return values / values.sum(1, keepdim=True), index

        return run

    def named(order: list[int]) -> Function:
        def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, index = swapped(order)(x, w)
            return values, torch.tensor(list(order))[index]

        return run

    plain = list(range(16))
    turned = [7 if i == 3 else 3 if i == 7 else i for i in plain]
    assert compared(named(plain), named(turned), inputs, monkeypatch)[0] == ""
    assert compared(named(plain), swapped([*plain[1:], 0]), inputs, monkeypatch)[0]
    assert "occur twice" in compared(swapped(plain), _with_repeated_index(swapped(plain)), inputs, monkeypatch)[0]


def _with_repeated_index(function: Function) -> Function:
    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, index = function(x, w)
        return values, torch.where(index == 3, 7, index)

    return run


def test_operations_that_choose_are_recognised_by_their_results() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    image = torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    with ChoiceRecorder() as recorder:
        x.argmax(-1)
        x.argmin()
        x.max(dim=1)
        x.topk(2, 0)
        x.argsort(-1)
        x.cummax(1)
        F.max_pool2d(image, 2, return_indices=True)
    assert [(choice.dim, choice.is_order) for choice in recorder.choices.values()] == [
        (-1, False), (0, False), (1, False), (0, True), (-1, True), (1, False), (-1, True),
    ]  # fmt: skip
    with ChoiceRecorder() as recorder:
        x.count_nonzero(1)
        x.long()
        torch.searchsorted(torch.tensor([0.0, 1.0]), x)
        torch.arange(3)
        (x > 1).sum(1)
    assert recorder.choices == {}


def test_indices_that_the_code_neither_uses_nor_returns_cost_no_further_runs() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])
    image = torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    with ChoiceRecorder() as recorder:
        largest, pooled = x.max(1).values, F.max_pool2d(image, 2)
        gathered = x.gather(1, x.min(1, keepdim=True).indices)
        first = x.argsort(1).tolist()
        returned = x.topk(2).indices
    recorder.drop_unused([largest, pooled, gathered, first, returned])
    assert sorted(recorder.choices) == [2, 3, 4]


def test_integers_booleans_and_pooled_images_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal integers and booleans tie; the images' memory is ordered by channels."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 3, (20, 8), generator=generator)
    image = torch.randn(2, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)

    def reference(x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(1), (x > 1).max(1)[1], *F.max_pool2d(image, 2, return_indices=True)

    def last_of_ties(x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, _, *pooled = reference(x, image)
        return 7 - x.flip(1).argmax(1), 7 - (x > 1).flip(1).long().argmax(1), *pooled

    def off_by_one(x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index, flags, values, places = reference(x, image)
        return index, flags, values, places ^ 1

    def smallest(x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmin(1), *reference(x, image)[1:]

    inputs = {"x": whole, "image": image}
    assert compared(reference, last_of_ties, inputs, monkeypatch)[0] == ""
    assert compared(reference, off_by_one, inputs, monkeypatch)[0].startswith("result 3 values")
    assert compared(reference, smallest, inputs, monkeypatch)[0].startswith("result 0 values")


def test_half_precision_scores_tie_by_their_measured_error_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores themselves are exact: the second of two that differ by one unit is wrong."""
    scores = torch.tensor([[1.0, 1.0078125, 0.5]] * 8, dtype=torch.bfloat16)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.int64)

    assert "elements differ" in compared(lambda x: x.argmax(1), wrong, {"x": scores}, monkeypatch)[0]
