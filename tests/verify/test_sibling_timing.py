"""Several versions of one target against the version that they change, without a GPU, by pretended clocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from clocks import Costing, FakeClock, SleepClock
from handwritten import RMS

from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker.kernel_compilation import share_kernels
from mtmc_lsp.timing.messages import SiblingsRequest, SiblingTime
from mtmc_lsp.timing.worker import sibling_commands as siblings
from mtmc_lsp.timing.worker.sibling_commands import ALL_ROUNDS, BEFORE, FIRST_ROUNDS, SECOND_ROUNDS, take_samples

SLOWER = RMS.text.replace("    return x *", "    import time\n    time.sleep(0.003)\n    return x *")
MUCH_SLOWER = SLOWER.replace("0.003", "0.02")
WRONG = RMS.text.replace("+ eps)", "+ 1.0)")
RAISES = RMS.text.replace("    return x *", "    raise ValueError('no luck')\n    return x *")
BROKEN = RMS.text.replace("def rms(", "def other(")


def counted(
    us: dict[int, float], groups: list[int], graph_us: float | None = None, before_us: float = 100.0
) -> dict[int, int]:
    """How often each version is sampled."""
    runs = {
        BEFORE: Costing(lambda: None, before_us),
        **{n: Costing(lambda: None, t, graph_us=graph_us) for n, t in us.items()},
    }
    samples = take_samples(FakeClock(runs[BEFORE]), runs, groups)
    return {number: len(values) for number, values in samples.items()}


def test_versions_that_are_far_slower_are_sampled_a_few_times_only() -> None:
    assert counted({0: 90.0, 1: 150.0, 2: 900.0}, [0, 1, 2]) == {
        BEFORE: ALL_ROUNDS,
        0: ALL_ROUNDS,
        1: ALL_ROUNDS,
        2: FIRST_ROUNDS,
    }


def test_slow_user_code_is_sampled_in_the_first_rounds_only() -> None:
    assert counted({0: 900.0}, [0], before_us=300_000.0) == {BEFORE: FIRST_ROUNDS, 0: ALL_ROUNDS}
    assert counted({0: 900.0, 1: 290_000.0}, [0, 1], before_us=300_000.0)[BEFORE] == ALL_ROUNDS


def test_of_a_group_only_the_fastest_are_sampled_to_the_end() -> None:
    us = {number: 80.0 + 2 * number for number in range(6)} | {6: 150.0}
    counts = counted(us, [0] * 7)
    assert [counts[number] for number in range(3)] == [ALL_ROUNDS] * 3
    assert [counts[number] for number in range(3, 6)] == [SECOND_ROUNDS] * 3
    assert counts[6] == FIRST_ROUNDS


def test_where_all_versions_are_far_slower_the_sampling_ends() -> None:
    assert counted({0: 900.0}, [0]) == {BEFORE: FIRST_ROUNDS, 0: FIRST_ROUNDS}
    assert counted({}, []) == {BEFORE: 0}


@pytest.fixture
def timed(
    capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[SiblingTime, ...]]:
    """Times versions of RMS by a clock that counts sleeps, in a fresh state."""
    SleepClock().install(monkeypatch)

    def time(*sources: str, previous: str | None = None, least_us: float = 0.0) -> tuple[SiblingTime, ...]:
        groups = tuple(range(len(sources)))
        data = SiblingsRequest(capture_of(RMS), RMS.text, previous, sources, groups, bound_us=1.0, least_us=least_us)
        return siblings.time_siblings(data).times

    return time


def test_each_version_gets_its_own_answer(timed: Callable[..., tuple[SiblingTime, ...]]) -> None:
    same, slow, wrong, raises, broken = timed(RMS.text, SLOWER, WRONG, RAISES, BROKEN)
    assert not same.error
    assert same.timing is not None and same.timing.median_us == same.after_us
    assert 0.0 < slow.ratio < 0.5
    assert slow.after_us > 3000 > slow.before_us > 0
    assert wrong.error == "the results differ from those of the user's code"
    assert raises.error.startswith("CandidateRaised: a call of this version raises ValueError: no luck")
    assert "rms" in broken.error


def test_versions_are_compared_with_the_version_before(timed: Callable[..., tuple[SiblingTime, ...]]) -> None:
    (time,) = timed(SLOWER, previous=MUCH_SLOWER)
    assert time.before_us > 20_000
    assert time.ratio > 2.0
    assert time.ratio / time.ratio_error > 3.0, "the error is far smaller than the gain"


def test_a_time_that_the_memory_does_not_allow_is_no_time(timed: Callable[..., tuple[SiblingTime, ...]]) -> None:
    (time,) = timed(SLOWER, least_us=1e9)
    assert time.error.endswith("us that the memory needs")


def test_a_kernel_has_one_key_in_tritons_cache_wherever_it_begins(tmp_path) -> None:
    """Versions of a file have the same kernels at other lines."""
    text = RMS.candidate().source
    keys = []
    for number, version in enumerate((text, "\n\n" + text, text.replace("tl.rsqrt", "1.0 / tl.rsqrt"))):
        module = load_user_module(str(tmp_path / "user.py"), version, f"shared_kernels_{number}")
        share_kernels(module)
        keys.append(module.rms_kernel.cache_key)
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]
