"""What may be concluded from samples, and what a timing must withstand; no GPU needed for the rules themselves."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from clocks import Costing, FakeClock
from handwritten import RMS

from mtmc_lsp.core.dtypes import TOLERANCE
from mtmc_lsp.core.errors import CandidateRaised, EnvironmentNotAble, MeasurementRejected, error_from_json
from mtmc_lsp.core.results import Ratio, Speed
from mtmc_lsp.device.calibration_cache import cached_device, remember_device
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.timing.bounds import bound_us, least_us
from mtmc_lsp.timing.worker.paired_benchmark import (
    Compiled,
    Contenders,
    check_plausible,
    run_paired_benchmark,
    summarise,
)
from mtmc_lsp.timing.worker.sampling import (
    FEW_SAMPLES,
    MAX_SAMPLES,
    MIN_SAMPLES,
    Warm,
    clocks_agree,
    interleaved,
    ratio_of,
    speed_of,
    warm,
)
from mtmc_lsp.timing.worker.timing_integrity import TF32_TOLERANCE, Retest, rounded_within

QUIET = Ratio(1.0, 0.995, 1.005)


def noisy(median: float, count: int = 60, spread: float = 0.01, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [median * (1 + generator.gauss(0, spread)) for _ in range(count)]


def test_twice_as_fast_is_faster_and_its_interval_mostly_holds_two() -> None:
    """A 95 % interval holds the truth in 38 of 40 trials, give or take."""
    ratios = [ratio_of(noisy(200.0, seed=2 * i), noisy(100.0, seed=2 * i + 1)) for i in range(40)]
    assert sum(ratio.low <= 2.0 <= ratio.high for ratio in ratios) >= 34
    assert all(ratio.high - ratio.low < 0.05 for ratio in ratios)
    assert all(speed_of(ratio, QUIET) is Speed.FASTER for ratio in ratios)


def test_a_copy_of_the_same_code_is_the_same_at_least_19_times_of_20() -> None:
    """Samples of one distribution, twice."""
    speeds = []
    for seed in range(40):
        first, second, control = (noisy(100.0, seed=3 * seed + i) for i in range(3))
        speeds.append(speed_of(ratio_of(first, second), ratio_of(control, second)))
    assert speeds.count(Speed.SAME) >= 38
    assert Speed.SLOWER not in speeds or speeds.count(Speed.SLOWER) <= 1


def test_three_percent_slower_is_never_called_faster() -> None:
    for seed in range(20):
        ratio = ratio_of(noisy(100.0, seed=2 * seed), noisy(103.0, seed=2 * seed + 1))
        assert speed_of(ratio, QUIET) is Speed.SLOWER


def test_a_gain_within_the_noise_of_the_control_is_not_called_faster() -> None:
    assert speed_of(Ratio(1.02, 1.005, 1.04), Ratio(1.0, 0.97, 1.03)) is not Speed.FASTER
    assert speed_of(Ratio(1.2, 0.9, 1.5), QUIET) is Speed.AMBIGUOUS


def test_work_that_the_devices_events_do_not_see_is_noticed() -> None:
    """Twenty calls of 10 us whose work on another stream takes 100 us, and twenty honest ones."""
    assert clocks_agree(20 * 10.0, 20 * 10.0 + 60.0)
    assert not clocks_agree(20 * 10.0, 20 * 100.0)
    with pytest.raises(MeasurementRejected, match="clocks disagree"):
        check_plausible(median=10.0, batch=Warm(20, 200.0, 5000.0), least_us=0.0)


def test_a_time_below_what_the_memory_needs_is_rejected() -> None:
    with pytest.raises(MeasurementRejected, match="memory needs"):
        check_plausible(median=5.0, batch=Warm(20, 100.0, 150.0), least_us=9.0)
    check_plausible(median=10.0, batch=Warm(20, 100.0, 150.0), least_us=9.0)


def test_the_headline_is_against_the_best_baseline_and_a_failed_one_says_why() -> None:
    samples = {
        "candidate": [(t, 30.0) for t in noisy(50.0)],
        "control": [(t, 30.0) for t in noisy(50.0, seed=5)],
        "eager": [(t, 40.0) for t in noisy(200.0)],
        "compile": [(t, 40.0) for t in noisy(100.0)],
        "max-autotune": [(t, 40.0) for t in noisy(90.0)],
        "previous": [(t, 30.0) for t in noisy(60.0)],
    }

    def contest(**compiled: Compiled) -> Contenders:
        named = {name.replace("_", "-"): made for name, made in compiled.items()}
        return Contenders(int, int, {}, compiled=named, bound_us=40.0)

    made = Compiled(int, "", 12.5)
    timing = summarise(
        samples,
        {"candidate": 44.0, "eager": 150.0},
        contest(compile=made, max_autotune=made),
        {"candidate": 4096, "eager": 8192},
    )
    assert timing.best == "max-autotune"
    assert timing.speed_over("best") is Speed.FASTER
    assert timing.roofline == pytest.approx(0.8, rel=0.02)
    assert timing.host_us == 30.0
    assert timing.graph_us == 44.0
    assert timing.more_bytes("eager") == -4096
    assert timing.against("previous").ratio == pytest.approx(1.2, rel=0.02)
    assert [b.compile_seconds for b in timing.baselines] == [None, 12.5, 12.5, None]
    del samples["compile"], samples["max-autotune"]
    timing = summarise(samples, {}, contest(compile=Compiled(None, "torch.compile failed: KeyError")), {})
    assert timing.best == "eager"
    assert [b.name for b in timing.baselines] == ["eager", "compile", "previous"], "what was not asked for is not named"
    failed = next(b for b in timing.baselines if b.name == "compile")
    assert failed.speedup is None
    assert failed.note == "torch.compile failed: KeyError"


# Looking again at results -----------------------------------------------------------------------------------------


def retested(candidate, *, calls: int = 3, **named) -> None:
    x = torch.linspace(-3, 3, 100)
    inputs = {"x": x}
    retest = Retest(lambda: candidate(x), lambda: torch.tanh(x), inputs, random=False, **named)
    before = x.clone()
    retest.before()
    for _ in range(calls):
        retest.call()
    retest.after()
    assert torch.equal(x, before), "the inputs are put back"


def test_an_honest_candidate_withstands_a_second_look() -> None:
    retested(torch.tanh)


def test_an_exception_of_the_timed_code_is_reported_as_its_own() -> None:
    def raising(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for\n this dtype")

    with pytest.raises(
        CandidateRaised, match="a call of this version raises NotImplementedError: no kernel for this dtype"
    ):
        retested(raising)


def test_a_timed_code_that_runs_out_of_memory_is_not_blamed() -> None:
    def raising(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        retested(raising)


def test_products_in_tf32_may_differ_by_what_their_operands_lose() -> None:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (1 + 5e-4)

    retested(rounded, tolerance=TF32_TOLERANCE)
    with pytest.raises(MeasurementRejected, match="before timing"):
        retested(rounded)


@pytest.mark.parametrize("seed", range(20))
def test_results_may_differ_as_much_as_rounding_moves_the_reference(seed: int) -> None:
    """A sum that cancels has no certain digit; a wrong result of a sum that does not cancel is noticed."""
    torch.manual_seed(seed)
    x = torch.cat([torch.full((50,), 1e5), torch.full((50,), -1e5)]) + torch.linspace(-1, 1, 100)

    def retest(off: float, reference) -> Retest:
        return Retest(lambda: reference(x) + off, lambda: reference(x), {"x": x}, random=False)

    retest(0.01, torch.sum).before()
    with pytest.raises(MeasurementRejected, match="before timing"):
        retest(1e3, torch.sum).before()
    with pytest.raises(MeasurementRejected, match="before timing"):
        retest(1e3, lambda x: x.abs().sum() * 1e-2).before()
    chaos = Retest(lambda: torch.zeros_like(x), lambda: (x * 1e8).sin(), {"x": x}, random=False)
    with pytest.raises(MeasurementRejected, match="before timing"):
        chaos.before()


def test_what_is_rounded_on_the_way_is_no_more_exact_at_the_end(captured) -> None:
    text = "# mtmc: x=f32[N] N=8\ndef f(x):\n    return {} * 2\n"
    assert rounded_within(captured(text.format("x.exp()"), "f").graph) == TOLERANCE["float32"]
    assert rounded_within(captured(text.format("x.bfloat16().float()"), "f").graph) == TOLERANCE["bfloat16"]


def test_a_result_that_is_kept_from_the_first_call_is_noticed() -> None:
    """The same tensor with new contents must give a new result."""
    known: dict[int, torch.Tensor] = {}

    def cached(x: torch.Tensor) -> torch.Tensor:
        return known.setdefault(x.data_ptr(), torch.tanh(x))

    with pytest.raises(MeasurementRejected, match="new contents"):
        retested(cached)


def test_a_candidate_that_stops_working_after_some_calls_is_noticed() -> None:
    calls = []

    def tired(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return torch.tanh(x) if len(calls) < 3 else torch.zeros_like(x)

    with pytest.raises(MeasurementRejected, match="while timed"):
        retested(tired)


def test_a_candidate_that_leaves_results_unwritten_is_noticed() -> None:
    with pytest.raises(MeasurementRejected, match="before timing"):
        retested(lambda x: torch.full_like(x, float("nan")))


def test_a_candidate_that_gives_no_tensor_is_noticed() -> None:
    with pytest.raises(MeasurementRejected, match="before timing"):
        retested(lambda x: None)


def test_a_target_that_overwrites_its_argument_can_be_looked_at_again() -> None:
    x = torch.ones(10)
    retest = Retest(lambda: x.add_(1).mul(2), lambda: x.add_(1).mul(2), {"x": x}, random=False)
    retest.before()
    retest.call()
    retest.call()
    retest.after()
    assert torch.equal(x, torch.ones(10))


def test_what_a_call_writes_into_its_arguments_is_looked_at_where_it_returns_nothing() -> None:
    x = torch.ones(10)

    def look(works: int) -> None:
        left = iter(range(works))
        retest = Retest(lambda: x.add_(next(left, works) < works) is x, lambda: x.add_(1) is x, {"x": x}, random=False)
        retest.before()
        retest.call()
        retest.after()

    for works, when in ((0, "before timing"), (2, "on new contents")):
        with pytest.raises(MeasurementRejected, match=f"result 1 differs {when}"):
            look(works)


# Ceilings ---------------------------------------------------------------------------------------------------------


def test_the_bound_counts_inputs_once_and_outputs_once(capture_of) -> None:
    device = planning_model(("sm_90",))
    capture = capture_of(RMS)
    traffic = 4 * (2 * 37 * 72 + 72)
    assert bound_us(capture, device) == pytest.approx(traffic / device.bandwidth * 1e6)
    assert 0 < least_us(capture, device) < bound_us(capture, device)
    faster = replace(device, peak_bandwidth=2 * device.bandwidth)
    assert least_us(capture, faster) < least_us(capture, device), "a copy that others slowed down is no ceiling"


def test_a_table_of_which_few_rows_are_read_does_not_count_whole(captured) -> None:
    """A gather may be far faster than reading its whole table."""
    capture = captured("# mtmc: w=f32[100000,64] i=i64[8]\ndef look_up(w, i):\n    return w[i]\n", "look_up")
    device = planning_model(("sm_90",))
    assert bound_us(capture, device) < 1e-2


def test_products_bound_the_time_too(captured) -> None:
    capture = captured("# mtmc: a=f32[512,512] b=f32[512,512]\ndef product(a, b):\n    return a @ b\n", "product")
    device = planning_model(("sm_90",))
    flops = 2 * 512**3
    assert bound_us(capture, device) == pytest.approx(
        max(flops / device.flops["fp16x3"], 3 * 4 * 512**2 / device.bandwidth) * 1e6
    )


def test_the_device_to_plan_for_without_a_gpu_is_one_that_was_asked_for() -> None:
    assert planning_model(("sm_80",)).arch == "sm_80"
    assert planning_model(("sm_80", "sm_90")).arch == "sm_90"
    assert not planning_model(("sm_90",)).is_calibrated


def test_measured_ceilings_are_kept_for_this_gpu_driver_and_torch_alone(capture_of, scratch_home) -> None:
    environment = replace(capture_of(RMS).environment, gpu="Some GPU", driver="1.2")
    assert cached_device(environment) is None
    device = replace(planning_model(("sm_90",)), is_calibrated=True)
    remember_device(environment, device)
    assert cached_device(environment) == device
    assert cached_device(replace(environment, driver="1.3")) is None
    next((scratch_home / "mtmc").iterdir()).write_text("{}")
    assert cached_device(environment) is None, "a cache that cannot be read is measured again"


# Without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_timed(measurer_of) -> None:
    measurer = measurer_of(RMS)
    assert measurer.time(RMS.candidate(), None) is None
    assert measurer.device().is_calibrated is False
    with pytest.raises(EnvironmentNotAble, match="CUDA GPU"):
        measurer.quick([RMS.candidate()], seconds=1.0)


def test_a_rejected_measurement_stays_one_across_processes() -> None:
    assert isinstance(error_from_json(MeasurementRejected("too fast").to_json()), MeasurementRejected)


def test_sampling_ends_when_the_medians_stand_and_goes_on_while_they_do_not() -> None:
    calls = {name: Costing(lambda: None, us) for name, us in (("candidate", 100.0), ("eager", 130.0))}
    quiet = interleaved(FakeClock(calls["candidate"], noise=0.001), calls, seconds=60.0)
    assert MIN_SAMPLES <= len(quiet["candidate"]) < 2 * MIN_SAMPLES
    noisy = interleaved(FakeClock(calls["candidate"], noise=0.05), calls, seconds=60.0)
    assert len(noisy["eager"]) == MAX_SAMPLES


def test_the_sampling_of_a_trial_ends_when_it_is_clear_which_version_is_faster() -> None:
    calls = {"candidate": Costing(lambda: None, 50.0), "eager": Costing(lambda: None, 100.0)}
    clear = interleaved(FakeClock(calls["candidate"], noise=0.05), calls, seconds=60.0, rival="eager")
    calls["eager"].us = 53.0
    close = interleaved(FakeClock(calls["candidate"], noise=0.05), calls, seconds=60.0, rival="eager")
    assert (len(clear["candidate"]), len(close["candidate"])) == (25, 200)


@pytest.mark.parametrize(("eager_us", "ends"), [(100.0, True), (90.0, True), (102.0, False)])
def test_the_sampling_of_an_edit_ends_when_no_gain_is_in_reach(eager_us: float, ends: bool) -> None:
    calls = {"candidate": Costing(lambda: None, 100.0), "eager": Costing(lambda: None, eager_us)}
    clock = FakeClock(calls["candidate"], noise=0.012)
    samples = interleaved(clock, calls, seconds=60.0, rival="eager", is_final=True)
    assert (len(samples["candidate"]) < MAX_SAMPLES) == ends


@pytest.mark.parametrize(("us", "count"), [(100.0, MAX_SAMPLES), (5_000.0, 50), (200_000.0, FEW_SAMPLES)])
def test_long_calls_of_an_edit_are_sampled_a_few_times(us: float, count: int) -> None:
    calls = {"candidate": Costing(lambda: None, us), "eager": Costing(lambda: None, 1.02 * us)}
    samples = interleaved(FakeClock(calls["candidate"], noise=0.02), calls, seconds=0.5, rival="eager", is_final=True)
    assert len(samples["eager"]) == pytest.approx(count, abs=2)


def test_user_code_that_is_slow_and_far_slower_is_sampled_a_few_times() -> None:
    """A loop of launches takes 80 ms; 25 samples of it would take the whole budget of a trial."""
    calls = {"candidate": Costing(lambda: None, 200.0), "control": Costing(lambda: None, 200.0)}
    far = calls | {"eager": Costing(lambda: None, 80_000.0)}
    samples = interleaved(FakeClock(calls["candidate"], noise=0.001), far, seconds=0.5)
    assert (len(samples["eager"]), len(samples["control"])) == (3, len(samples["candidate"]))
    assert len(samples["candidate"]) >= MIN_SAMPLES
    ratio = ratio_of([us for us, _ in samples["eager"]], [us for us, _ in samples["candidate"]])
    assert ratio.ratio == pytest.approx(400.0, rel=0.02) and 390.0 < ratio.low <= ratio.high < 410.0
    slower = calls | {"candidate": Costing(lambda: None, 20_000.0), "eager": Costing(lambda: None, 80_000.0)}
    assert len(interleaved(FakeClock(slower["candidate"], noise=0.001), slower, seconds=0.5)["eager"]) == 5
    near = calls | {"eager": Costing(lambda: None, 800.0), "candidate": Costing(lambda: None, 500.0)}
    assert len(interleaved(FakeClock(near["candidate"]), near, seconds=0.5)["eager"]) >= MIN_SAMPLES
    seconds = calls | {"eager": Costing(lambda: None, 2_000_000.0)}
    samples = interleaved(FakeClock(calls["candidate"], noise=0.001), seconds, seconds=0.5, rival="eager")
    assert (len(samples["eager"]), len(samples["candidate"])) == (1, MIN_SAMPLES)
    ratio = ratio_of([us for us, _ in samples["eager"]], [us for us, _ in samples["candidate"]])
    assert ratio.ratio == pytest.approx(10_000.0, rel=0.02) and ratio.low <= ratio.ratio <= ratio.high
    less = seconds | {"candidate": Costing(lambda: None, 250_000.0)}
    assert len(interleaved(FakeClock(less["candidate"], noise=0.001), less, seconds=0.5)["eager"]) == 5
    short = calls | {"eager": Costing(lambda: None, 2_000.0)}
    assert len(interleaved(FakeClock(calls["candidate"], noise=0.001), short, seconds=2.0)["eager"]) >= MIN_SAMPLES


@pytest.mark.parametrize(
    ("candidate_us", "eager_us", "noise", "rival", "is_short"),
    [
        (145_000.0, 180_000.0, 0.003, "eager", True),
        (145_000.0, 180_000.0, 0.003, "", True),
        # It is clear which one is faster, although the medians vary.
        (145_000.0, 280_000.0, 0.02, "eager", True),
        # A difference that counts needs more samples where they vary.
        (145_000.0, 150_000.0, 0.03, "eager", False),
        (145_000.0, 180_000.0, 0.03, "", False),
        # Twenty-five rounds of short calls fit into the limit.
        (500.0, 600.0, 0.003, "eager", False),
    ],
)
def test_of_calls_that_take_long_a_few_samples_are_enough_if_they_decide(
    candidate_us: float, eager_us: float, noise: float, rival: str, is_short: bool
) -> None:
    """Others wait while a trial of calls of 0.15 s uses the GPU alone."""
    for seed in range(5):
        candidate, eager = (Costing(lambda: None, us) for us in (candidate_us, eager_us))
        calls = {"candidate": candidate, "control": candidate, "eager": eager}
        samples = interleaved(FakeClock(candidate, noise=noise, seed=seed), calls, seconds=0.5, rival=rival)
        assert (len(samples["candidate"]) < MIN_SAMPLES) is is_short
        times = {name: [us for us, _ in values] for name, values in samples.items()}
        ratio, control = (ratio_of(times[name], times["candidate"]) for name in ("eager", "control"))
        assert ratio.ratio == pytest.approx(eager_us / candidate_us, rel=4 * noise)
        assert speed_of(ratio, control) is Speed.FASTER or not is_short


def test_a_loop_of_launches_that_takes_a_second_is_called_once_while_nothing_else_runs() -> None:
    """Its first call, which shows that the host bounds it, is a sample; one call before gives its results and memory."""

    class HostBound(FakeClock):
        def cold(self, run: Costing, ahead_us: float = 0.0) -> tuple[float, float]:
            run()
            return self._noisy(self._cost(run).us), self._cost(run).us

    made: list[bool] = []
    alone = [False]

    def loop() -> torch.Tensor:
        made.append(alone[0])
        return torch.ones(3)

    @contextlib.contextmanager
    def gpu() -> Iterator[None]:
        alone[0] = True
        yield
        alone[0] = False

    candidate, eager = Costing(lambda: torch.ones(3), 200.0, peak_bytes=10), Costing(loop, 1.5e6, peak_bytes=70)
    setup = Contenders(candidate=candidate, eager=eager, inputs={})
    timing = run_paired_benchmark(setup, HostBound(candidate, noise=0.001), 0.5, gpu())
    assert made == [False, True, False]
    assert timing.against("eager").ratio == pytest.approx(7500.0, rel=0.02)
    assert (timing.baselines[0].peak_bytes, timing.peak_bytes) == (70, 10)


def test_only_calls_that_the_device_bounds_are_kept_from_a_late_host() -> None:
    ahead: dict[float, set[float]] = {}

    class Noting(FakeClock):
        def cold(self, run: Costing, ahead_us: float = 0.0) -> tuple[float, float]:
            ahead.setdefault(run.us, set()).add(ahead_us)
            return super().cold(run)

    calls = {"candidate": Costing(lambda: None, 6.0), "eager": Costing(lambda: None, 500.0)}
    interleaved(Noting(calls["candidate"], noise=0.001), calls, seconds=60.0)
    assert ahead == {6.0: {0.0}, 500.0: {0.0, 15.0}}, "the host takes 5 us"


def test_a_host_that_keeps_up_in_a_row_is_not_timed_where_it_is_slow_after_a_wait() -> None:
    def found(in_row_us: float) -> set[float]:
        ahead: set[float] = set()

        class AfterAWait(FakeClock):
            def cold(self, run: Costing, ahead_us: float = 0.0) -> tuple[float, float]:
                ahead.add(ahead_us)
                return super().cold(run)[0], 70.0

        call = Costing(lambda: None, 100.0)
        clock = AfterAWait(call, noise=0.001)
        clock.in_row_us = in_row_us
        interleaved(clock, {"candidate": call}, seconds=60.0)
        return ahead

    assert found(in_row_us=40.0) == {0.0, 210.0}, "100 us of work are launched in 40"
    assert found(in_row_us=80.0) == {0.0}, "the device waits for the host in a row as well"


def test_a_host_that_is_the_bound_is_timed_however_unevenly_it_runs() -> None:
    """Within a row that it holds up the device takes as long as it does; of two rows one may be twice as slow."""
    slow = random.Random(0)

    class Uneven(FakeClock):
        def cold(self, run: Costing, ahead_us: float = 0.0) -> tuple[float, float]:
            assert ahead_us == 0.0
            return super().cold(run)[0], 120.0

        def batch(self, run: Costing, count: int) -> tuple[float, float, float]:
            host = 100.0 * slow.choice([1.0, 2.0]) * count
            return host + 20.0, host + 30.0, host

    for _ in range(20):
        call = Costing(lambda: None, 100.0)
        interleaved(Uneven(call, noise=0.001), {"candidate": call}, seconds=60.0)


def test_a_host_that_is_late_now_and_then_is_no_work_beside_the_events() -> None:
    late = iter([9000.0, 0.0, 9000.0, 0.0, 9000.0])
    always = iter([9000.0] * 5)

    def clock(by) -> FakeClock:
        class Late(FakeClock):
            def batch(self, run: Costing, count: int) -> tuple[float, float, float]:
                event, wall, launched = super().batch(run, count)
                return event, wall + next(by), launched

        return Late(call)

    call = Costing(lambda: None, 100.0)
    batch = warm(clock(late), call, 100.0)
    assert clocks_agree(batch.event_us, batch.wall_us)
    batch = warm(clock(always), call, 100.0)
    assert not clocks_agree(batch.event_us, batch.wall_us)


def test_of_long_calls_fewer_are_made_in_a_row() -> None:
    call = Costing(lambda: None, 9000.0)
    assert warm(FakeClock(call), call, 9000.0).calls == 3
    assert warm(FakeClock(call), call, 50.0).calls == 20
    assert warm(FakeClock(call), call, 30_000.0).calls == 1
    batch = warm(FakeClock(call), call, 2500.0)
    assert batch.calls == 8
    assert batch.event_us == pytest.approx(8 * 9000.0, rel=0.02)
