"""Scans of time steps with values that are not finite, at any length, and with the precision of the user's loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from tests.codegen import harness
from tests.loops.examples import LOOPS
from tests.loops.scans import SCANS
from tests.loops.test_scans import scanned

INF, NAN = float("inf"), float("nan")


def results(capture, candidate, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The candidate's results, at the sizes of the inputs."""
    sizes = dict(capture.graph.sizes)
    for item in capture.graph.inputs:
        sizes |= {str(name): size for name, size in zip(item.type.shape, inputs[item.name].shape, strict=True)}
    capture = replace(capture, graph=replace(capture.graph, sizes=sizes))
    return harness.results(capture, candidate, inputs)


def eager(text: str, name: str, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    scope: dict[str, Callable[..., object]] = {}
    exec(text, scope)
    result = scope[name](**{key: value.clone() for key, value in inputs.items()})
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("segments", [1, 4])
def test_a_value_that_is_not_finite_has_the_effect_that_it_has_in_the_users_loop(segments: int, captured) -> None:
    """The other tiles, and the steps before, have the same bits as without it."""
    capture = captured(LOOPS, "recurrence")
    candidate = scanned(capture, LOOPS, steps=16, segments=segments, block=16)
    a, b = torch.rand(3, 70, 20), torch.randn(3, 70, 20)
    clean = results(capture, candidate, {"a": a, "b": b})[0]
    a, b = a.clone(), b.clone()
    b[0, 33, 2], b[0, 40, 3], a[0, 50, 4] = INF, NAN, INF
    a[0, 60, 2], a[0, 61, 3] = 0.0, 0.0
    inputs = {"a": a, "b": b}
    (result,) = results(capture, candidate, inputs)
    (expected,) = eager(LOOPS, "recurrence", inputs)
    torch.testing.assert_close(result, expected, equal_nan=True)
    assert result[0, 59, 2] == INF and result[0, 60, 2].isnan(), "zero times infinity, as in the user's loop"
    assert torch.equal(result[1:], clean[1:]) and torch.equal(result[0, :, 16:], clean[0, :, 16:])
    torch.testing.assert_close(result[0, :33], clean[0, :33])


def test_a_reset_by_a_mask_forgets_infinities_and_nan(captured) -> None:
    capture = captured(SCANS, "resets")
    candidate = scanned(capture, SCANS, steps=16)
    x, done = torch.randn(3, 40, 5), torch.zeros(3, 40)
    x[0, 5, 0], x[0, 7, 1], done[0, 20], done[1, 3] = INF, NAN, 1.0, 1.0
    (result,) = results(capture, candidate, {"x": x, "done": done})
    (expected,) = eager(SCANS, "resets", {"x": x, "done": done})
    torch.testing.assert_close(result, expected, equal_nan=True)
    assert result[0, 20:].isfinite().all() and not result[0, 19, :2].isfinite().any()


@pytest.mark.parametrize("name", ["differences", "extremes", "cusum", "log_sum_exp", "strength"])
def test_other_updates_pass_on_infinities_and_nan_as_the_users_loop_does(name: str, captured) -> None:
    capture = captured(SCANS, name)
    candidate = scanned(capture, SCANS, steps=16, segments=4)
    (item,) = capture.graph.inputs
    x = torch.rand(70, 8) + 1
    x[20, 0], x[30, 1], x[40, 2], x[50, 3] = NAN, INF, -INF, INF
    x[51, 3], x[60, 1] = -INF, -INF
    inputs = {item.name: x if name == "cusum" else x.T.contiguous()}
    pairs = zip(results(capture, candidate, inputs), eager(SCANS, name, inputs), strict=True)
    for result, expected in pairs:
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_coefficients_that_overflow_together_leave_a_state_of_zero(captured) -> None:
    """The product of 70 factors of 1e3 is infinite, and zero times infinity is not a number."""
    capture = captured(LOOPS, "recurrence")
    a, b = torch.full((1, 70, 20), 1e3), torch.zeros(1, 70, 20)
    b[0, 69] = 1.0
    (result,) = results(capture, scanned(capture, LOOPS, steps=32), {"a": a, "b": b})
    assert torch.equal(result, b)


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("name", ["chained", "extremes", "cusum"])
def test_a_scan_is_right_at_any_number_of_steps(name: str, segments: int, captured) -> None:
    capture = captured(SCANS, name)
    candidate = scanned(capture, SCANS, steps=16, segments=segments)
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 130):
        shape = (length, 6) if name == "cusum" else (3, length, 5)[: 3 if name == "chained" else 2]
        x = torch.randn(shape, dtype=torch.float64 if name == "chained" else torch.float32)
        for result, expected in zip(results(capture, candidate, {"x": x}), eager(SCANS, name, {"x": x}), strict=True):
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 0.9, 0.999, 0.99999, 1.0])
@pytest.mark.parametrize("segments", [1, 16])
def test_a_long_scan_is_as_precise_as_the_users_loop(decay: float, segments: int, captured) -> None:
    capture = captured(LOOPS, "recurrence")
    candidate = scanned(capture, LOOPS, steps=512, segments=segments, block=8)
    a, b = torch.full((1, 65536, 8), decay), torch.randn(1, 65536, 8)
    (result,) = results(capture, candidate, {"a": a, "b": b})
    (users,) = eager(LOOPS, "recurrence", {"a": a, "b": b})
    (exact,) = eager(LOOPS, "recurrence", {"a": a.double(), "b": b.double()})
    errors = [(value - exact).norm() / exact.norm() for value in (result, users)]
    assert errors[0] <= max(2 * errors[1], 3e-7), errors


@pytest.mark.parametrize("weight", [0.1, 1e-3, 1e-5])
def test_a_long_moving_average_is_as_precise_as_the_users_loop(weight: float, captured) -> None:
    text = SCANS.replace("x[t], 0.1)", f"x[t], {weight})")
    capture = captured(text, "one_series")
    candidate = scanned(capture, text, steps=512, segments=16)
    x = torch.randn(65536) + 1
    (result,) = results(capture, candidate, {"x": x})
    (users,) = eager(text, "one_series", {"x": x})
    (exact,) = eager(text, "one_series", {"x": x.double()})
    errors = [(value - exact).norm() / exact.norm() for value in (result, users)]
    assert errors[0] <= max(2 * errors[1], 3e-7), errors


@pytest.mark.parametrize("shift", [0.0, -1e-3])
def test_a_long_score_in_log_space_is_as_precise_as_the_users_loop(shift: float, captured) -> None:
    capture = captured(SCANS, "forward_score")
    candidate = scanned(capture, SCANS, steps=512, segments=16)
    x, d = torch.randn(65536, 2), torch.full((65536, 2), shift)
    (result,) = results(capture, candidate, {"x": x, "d": d})
    (users,) = eager(SCANS, "forward_score", {"x": x, "d": d})
    (exact,) = eager(SCANS, "forward_score", {"x": x.double(), "d": d.double()})
    errors = [(value - exact).norm() / exact.norm() for value in (result, users)]
    assert errors[0] <= max(2 * errors[1], 3e-7), errors
