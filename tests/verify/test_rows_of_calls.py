"""Rows of calls are timed where the host bounds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clocks import Costing, FakeClock

from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.results import BaselineTime, Ratio, Speed, Timing
from mtmc_lsp.timing.worker.sampling import LEAST_ROWS, MOST_ROWS, in_rows, interleaved, ratio_of


class HostTakes(FakeClock):
    """A clock of calls whose host takes ``us``, and whose device takes ``graph_us``; a busy device hides the host's time."""

    def cold(self, run: Costing, ahead_us: float = 0.0) -> tuple[float, float]:
        return self._noisy(run.graph_us or 0.0), run.us

    def batch(self, run: Costing, count: int) -> tuple[float, float, float]:
        device, host = self._noisy((run.graph_us or 0.0) * count), self._noisy(run.us * count)
        return max(device, host), max(device, host) + 10.0, host


def test_rows_of_calls_show_what_the_host_does_where_single_calls_hide_it() -> None:
    runs = {
        "candidate": Costing(lambda: None, 12.0, graph_us=4.0),
        "control": Costing(lambda: None, 12.0, graph_us=4.0),
        "eager": Costing(lambda: None, 23.0, graph_us=4.0),
    }
    clock = HostTakes(runs["candidate"], noise=0.001)
    single = interleaved(clock, runs, seconds=60.0)
    assert ratio_of(*([us for us, _ in single[name]] for name in ("eager", "candidate"))).ratio == pytest.approx(
        1.0, rel=0.01
    )
    rows = in_rows(clock, runs, "eager")
    assert ratio_of(*([us for us, _ in rows[name]] for name in ("eager", "candidate"))).ratio == pytest.approx(
        23 / 12, rel=0.01
    )
    assert LEAST_ROWS <= len(rows["eager"]) == len(rows["candidate"]) <= MOST_ROWS
    assert rows["eager"][0] == pytest.approx((23.0, 23.0), rel=0.02)


def test_rows_that_the_device_bounds_are_not_timed() -> None:
    runs = {name: Costing(lambda: None, 12.0, graph_us=40.0) for name in ("candidate", "control", "eager")}
    assert in_rows(HostTakes(runs["candidate"], noise=0.001), runs, "eager") == {}


def test_a_timing_with_rows_is_stored_whole() -> None:
    same = Ratio(1.0, 0.99, 1.01)
    rows = Timing(12.0, (BaselineTime("eager", 23.0, Ratio(1.9, 1.8, 2.0), Speed.FASTER),), "eager", same, 25, "", 0.1)
    timing = replace(rows, median_us=4.0, rows=rows)
    assert from_json(Timing, to_json(timing)) == timing
    assert from_json(Timing, {**to_json(timing), "rows": None}).rows is None
