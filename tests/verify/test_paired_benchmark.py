"""A complete timing with a fake clock, and the conditions under which it is rejected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clocks import Costing, FakeClock

from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.results import Speed, Timing
from mtmc_lsp.timing.worker.paired_benchmark import Compiled, Contenders, run_paired_benchmark


def held(
    us: float,
    *,
    eager: float = 100.0,
    work: Callable[[torch.Tensor], torch.Tensor] = torch.tanh,
    seed: int = 0,
    touched: bool = False,
    least_us: float = 0.0,
    **more: Any,
) -> Timing:
    x = torch.linspace(-3, 3, 50)
    candidate = Costing(lambda: work(x), us, **more)
    own = Costing(lambda: torch.tanh(x), eager, graph_us=8.0, peak_bytes=3000)
    compiled = {"compile": Compiled(Costing(lambda: torch.tanh(x), 0.8 * eager), "", 3.0)}
    contest = Contenders(candidate, own, {"x": x}, compiled=compiled, bound_us=20.0, least_us=least_us)
    return run_paired_benchmark(contest, FakeClock(candidate, seed=seed, touched=touched), 0.0)


def test_a_faster_candidate_is_told_against_every_baseline() -> None:
    timing = held(40.0)
    assert timing.speed_over("best") is Speed.FASTER
    assert timing.best == "compile"
    assert timing.against("eager").ratio == pytest.approx(2.5, rel=0.02)
    assert timing.against("compile").ratio == pytest.approx(2.0, rel=0.02)
    # One interval in twenty leaves out the truth, so only its nearness is asked for.
    assert (timing.noise.low, timing.noise.high) == pytest.approx((1.0, 1.0), abs=0.02)
    assert timing.noise.low < timing.noise.high
    assert timing.warm_us == pytest.approx(40.0, rel=0.05)
    assert timing.graph_us is None, "only short calls are replayed"


def test_the_peak_memory_is_compared_with_the_users_code_where_it_is_measured() -> None:
    assert held(40.0, peak_bytes=1000).more_bytes("eager") == -2000
    assert held(40.0, peak_bytes=1000).more_bytes("compile") is None, "its memory is unknown"
    assert held(40.0).more_bytes("eager") is None


def test_the_same_code_is_the_same_and_three_percent_more_is_never_faster() -> None:
    same = [held(80.0, seed=seed).speed_over("best") for seed in range(20)]
    assert same.count(Speed.SAME) >= 19
    slower = [held(80.0 * 1.03, seed=seed).speed_over("best") for seed in range(8)]
    assert set(slower) <= {Speed.SLOWER, Speed.AMBIGUOUS}
    ratios = [held(40.0, seed=seed).against("compile").ratio for seed in range(8)]
    assert max(ratios) / min(ratios) < 1.02


def test_short_calls_are_timed_from_a_graph_too() -> None:
    timing = held(12.0, eager=15.0, graph_us=6.0)
    assert timing.graph_us == pytest.approx(6.0, rel=0.05)
    assert timing.host_us == 5.0
    graphs = {b.name: b.graph_us for b in timing.baselines}
    assert graphs["eager"] == pytest.approx(8.0, rel=0.05)
    assert graphs["compile"] is None, "what cannot be captured is left out"


@pytest.mark.parametrize("follows", [True, False])
def test_weights_that_a_library_gathered_in_memory_of_its_own_follow_new_contents(follows: bool) -> None:
    """cuDNN's recurrent layers do so when they first run: from then on they do not see what is written to the old place."""
    x, w = torch.linspace(-3, 3, 50), torch.linspace(0.5, 2, 50)
    gathered = w.clone()
    contest = Contenders(
        Costing(lambda: torch.tanh(x * w), 40.0),
        Costing(lambda: torch.tanh(x * gathered), 100.0),
        {"x": x, "w": w},
        relocated=lambda: [("w", gathered)] if follows else [],
    )
    if follows:
        assert run_paired_benchmark(contest, FakeClock(contest.candidate), 0.0).speed_over("best") is Speed.FASTER
        assert torch.equal(gathered, w)
    else:
        with pytest.raises(MeasurementRejected, match="new contents"):
            run_paired_benchmark(contest, FakeClock(contest.candidate), 0.0)


def test_work_on_a_side_stream_is_refused_even_when_it_is_short() -> None:
    with pytest.raises(MeasurementRejected, match="clocks disagree"):
        held(10.0, hidden_us=60.0)


def test_a_replaced_clock_is_refused() -> None:
    with pytest.raises(MeasurementRejected, match="clocks were replaced"):
        held(40.0, touched=True)


def test_faster_than_the_memory_is_refused() -> None:
    with pytest.raises(MeasurementRejected, match="memory needs"):
        held(40.0, least_us=45.0)


def test_a_thread_that_goes_on_after_the_call_is_refused() -> None:
    ended = threading.Event()
    before = threading.active_count()

    def later(x: torch.Tensor) -> torch.Tensor:
        if threading.active_count() < before + 40:
            threading.Thread(target=ended.wait, args=(30,), name="sneaky", daemon=True).start()
        return torch.tanh(x)

    try:
        with pytest.raises(MeasurementRejected, match="sneaky"):
            held(40.0, work=later)
    finally:
        ended.set()


def test_slow_user_code_is_not_captured_in_a_graph() -> None:
    captured: list[float] = []

    class Noting(FakeClock):
        def captured(self, run: Costing) -> None:
            captured.append(run.us)

    call, loop, near = (Costing(lambda: torch.zeros(3), us) for us in (10.0, 80_000.0, 60.0))
    setup = Contenders(call, loop, {}, compiled={"compile": Compiled(near)})
    run_paired_benchmark(setup, Noting(call), seconds=0.5)
    assert captured == [10.0, 60.0]
