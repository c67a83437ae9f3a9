"""Chunks of time steps with gates of any value, values that are not finite, any length, and the precision of the user's loop."""

from __future__ import annotations

import pytest
import torch

from tests.loops.chunk_examples import CHUNKS
from tests.loops.test_chunks import chunked
from tests.loops.test_scan_values import eager, results

INF, NAN = float("inf"), float("nan")


def inputs_of(batch: int = 2, steps: int = 50, keys: int = 5, values: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (batch, steps, keys), "k": (batch, steps, keys), "v": (batch, steps, values)}
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return inputs | {"g": torch.rand(batch, steps, generator=generator)}


def per_channel(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with heads, and a logit for each channel of the key."""
    return {name: value.unsqueeze(0) for name, value in inputs.items()} | {"g": 2 * inputs["k"].unsqueeze(0)}


def assert_equal_to_the_loop(capture, candidate, name: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    ours = results(capture, candidate, inputs)
    for result, expected in zip(ours, eager(CHUNKS, name, inputs), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True, rtol=2e-5, atol=2e-5)
    return ours


@pytest.fixture
def gated(captured):
    capture = captured(CHUNKS, "gated")
    return capture, chunked(capture, CHUNKS)


@pytest.mark.parametrize("steps", [1, 15, 16, 17, 70])
def test_any_number_of_steps_has_the_results_of_the_loop(steps: int, gated) -> None:
    assert_equal_to_the_loop(*gated, "gated", inputs_of(steps=steps))


def test_the_guard_refuses_an_empty_sequence(gated) -> None:
    _, candidate = gated
    assert "q.numel() > 0" in candidate.code.block


def test_gates_of_zero_one_and_between_tiny_and_huge_have_the_results_of_the_loop(gated) -> None:
    inputs = inputs_of()
    inputs["g"][0, 5:9] = torch.tensor([0.0, 1.0, 1e-38, 1e-44])
    inputs["g"][0, 20], inputs["g"][1, 31], inputs["g"][1, 33] = 0.0, 0.0, 50.0
    assert_equal_to_the_loop(*gated, "gated", inputs)
    inputs["g"] = torch.zeros_like(inputs["g"])
    assert_equal_to_the_loop(*gated, "gated", inputs)


def test_a_negative_gate_has_the_results_of_the_loop(gated) -> None:
    inputs = inputs_of()
    inputs["g"][0, 20] = -0.5
    assert_equal_to_the_loop(*gated, "gated", inputs)


@pytest.mark.parametrize("name", ["q", "k", "v", "g"])
@pytest.mark.parametrize("value", [INF, NAN, 1e30])
def test_a_value_that_is_not_finite_has_the_effect_that_it_has_in_the_loop(name: str, value: float, gated) -> None:
    inputs = inputs_of()
    inputs[name][0, 20] = value
    result, *_ = assert_equal_to_the_loop(*gated, "gated", inputs)
    assert result[0, :20].isfinite().all() and result[1].isfinite().all()


def test_decays_per_channel_whose_quotient_overflows_have_the_results_of_the_loop(captured) -> None:
    capture = captured(CHUNKS, "gla")
    candidate = chunked(capture, CHUNKS)
    inputs = per_channel(inputs_of())
    assert_equal_to_the_loop(capture, candidate, "gla", inputs)
    inputs["g"][0, 0, 17:30, 2] = -400.0
    inputs["g"][0, 1, 8, 1] = -INF
    assert_equal_to_the_loop(capture, candidate, "gla", inputs)


def test_a_sequence_of_gates_near_one_is_as_precise_as_the_loop(captured) -> None:
    capture = captured(CHUNKS, "gated")
    candidate = chunked(capture, CHUNKS, chunk=64)
    inputs = inputs_of(batch=1, steps=4096)
    inputs["g"] = 1 - 1e-4 * inputs["g"]
    (exact,) = eager(CHUNKS, "gated", {name: value.double() for name, value in inputs.items()})
    assert exact.dtype == torch.float64
    (ours,) = results(capture, candidate, inputs)
    (theirs,) = eager(CHUNKS, "gated", inputs)
    ours_error, their_error = ((result.double() - exact).norm() / exact.norm() for result in (ours, theirs))
    assert ours_error <= 1.5 * their_error
