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
from mtmc_lsp.timing.worker import slow_original
from mtmc_lsp.timing.worker.paired_benchmark import Compiled, Contenders, run_paired_benchmark
from mtmc_lsp.timing.worker.slow_original import Original


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


class Loop(Costing):
    """User code that is a loop of launches; the calls are counted."""

    def __init__(self, us: float, work: Callable[[], torch.Tensor]) -> None:
        super().__init__(work, us, peak_bytes=3000)
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return super().__call__()


def timed_beside(loop: Loop, original: Original, candidate: Costing, x: torch.Tensor) -> Timing:
    contest = Contenders(candidate, loop, {"x": x}, original=original, ends_when_clear=True)
    return run_paired_benchmark(contest, FakeClock(candidate), seconds=0.5)


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Original:
    """Every call counts as slow, whatever the machine's load."""
    monkeypatch.setattr(slow_original, "SLOW_SECONDS", 0.0)
    return Original()


def test_a_loop_of_seconds_is_called_three_times_and_by_later_timings_not_at_all(original: Original) -> None:
    x = torch.linspace(-3, 3, 50)
    loop = Loop(2e6, lambda: torch.tanh(x))
    first = timed_beside(loop, original, Costing(lambda: torch.tanh(x), 1000.0), x)
    assert loop.calls == 3, "its results, a sample, its results for new values"
    assert first.against("eager").ratio == pytest.approx(2000.0, rel=0.02)
    assert first.speed_over("eager") is Speed.FASTER and first.samples >= 25
    second = timed_beside(loop, original, Costing(lambda: torch.tanh(x), 500.0), x)
    assert loop.calls == 3 and second.baseline("eager").peak_bytes == 3000
    assert second.against("eager").ratio == pytest.approx(4000.0, rel=0.02)
    assert x.equal(torch.linspace(-3, 3, 50))


@pytest.mark.parametrize("when", ["before timing", "new contents"])
def test_results_of_an_earlier_call_of_a_slow_loop_refuse_a_wrong_version(original: Original, when: str) -> None:
    x = torch.linspace(-3, 3, 50)
    loop, right = Loop(2e6, lambda: torch.tanh(x)), torch.tanh(x)
    timed_beside(loop, original, Costing(lambda: torch.tanh(x), 1000.0), x)
    wrong = {"before timing": lambda: 1.01 * torch.tanh(x), "new contents": lambda: right.clone()}[when]
    with pytest.raises(MeasurementRejected, match=when):
        timed_beside(loop, original, Costing(wrong, 1000.0), x)
    assert loop.calls == 3 + 4, "calls on rounded inputs do not explain the difference"


def test_a_version_that_is_not_far_faster_is_timed_beside_the_loop(original: Original) -> None:
    x = torch.linspace(-3, 3, 50)
    loop = Loop(2e6, lambda: torch.tanh(x))
    timed_beside(loop, original, Costing(lambda: torch.tanh(x), 1000.0), x)
    timed_beside(loop, original, Costing(lambda: torch.tanh(x), 150_000.0), x)
    assert loop.calls == 3 + 1, "13x: one sample"
    timed_beside(loop, original, Costing(lambda: torch.tanh(x), 1_500_000.0), x)
    assert loop.calls >= 4 + 5


def test_a_loop_on_other_inputs_is_called_again(original: Original) -> None:
    x, y = torch.linspace(-3, 3, 50), torch.linspace(-2, 2, 50)
    loop = Loop(2e6, lambda: torch.tanh(x))
    timed_beside(loop, original, Costing(lambda: torch.tanh(x), 1000.0), x)
    x.copy_(y)
    timed_beside(loop, original, Costing(lambda: torch.tanh(x), 1000.0), x)
    assert loop.calls == 6


def test_a_loop_that_changes_its_inputs_is_called_again(original: Original) -> None:
    x = torch.zeros(50)
    loop = Loop(2e6, lambda: x.add_(1.0).clone())
    for _ in range(2):
        timed_beside(loop, original, Costing(lambda: x.add_(1.0).clone(), 1000.0), x)
    assert loop.calls == 6 and not original.samples


def test_slow_user_code_is_not_captured_in_a_graph() -> None:
    captured: list[float] = []

    class Noting(FakeClock):
        def captured(self, run: Costing) -> None:
            captured.append(run.us)

    call, loop, near = (Costing(lambda: torch.zeros(3), us) for us in (10.0, 80_000.0, 60.0))
    setup = Contenders(call, loop, {}, compiled={"compile": Compiled(near)})
    run_paired_benchmark(setup, Noting(call), seconds=0.5)
    assert captured == [10.0, 60.0]
