"""A user's loop of small operations runs in float64 on the host, and on the GPU only as often as its own results need."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process import gpu_lock
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.messages import CaseRequest
from mtmc_lsp.verify.worker import reference_commands
from mtmc_lsp.verify.worker.comparison.compare import compare_case
from mtmc_lsp.verify.worker.oracle_runs import host, runs
from mtmc_lsp.verify.worker.oracle_runs.host import has_small_iterations

SERIES = """
import torch

FACTORS = []


# mtmc: x=f32[B,T] B=4 T=300
def series(x):
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + torch.tanh(x[:, t])
        out[:, t] = h
    return FACTORS.pop(0) * out if FACTORS else out
"""


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the code ran, for a processor that stands in for a GPU on which each run is slow."""
    seen: list[str] = []
    run_case, on_host = runs.run_case, host.Host.run

    def noting(*args: Any, **more: Any) -> dict[str, Any]:
        seen.append("host" if is_inside else "GPU")
        return run_case(*args, **more)

    def inside(self: host.Host, *args: Any, **more: Any) -> dict[str, Any] | None:
        is_inside.append(True)
        try:
            return on_host(self, *args, **more)
        finally:
            is_inside.pop()

    is_inside: list[bool] = []
    monkeypatch.setattr(runs, "run_case", noting)
    monkeypatch.setattr(host.Host, "run", inside)
    monkeypatch.setattr(host, "is_on_gpu", lambda device: True)
    monkeypatch.setattr(host, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(host, "TIME_LIMIT", 1e9)
    monkeypatch.setattr(host, "ROUNDING_LIMIT", 1e9)
    monkeypatch.setattr(host, "_failed", set())
    return seen


def expected_of(capture: Capture, wanted: Draws = Draws.FEW, *factors: float, text: str = SERIES) -> dict[str, Any]:
    case = Case(capture.graph.sizes, "normal", 3)
    data = CaseRequest(capture, user_source=text, case=case, inputs="", is_first=True)
    module, inputs = reference_commands.inputs_of(data)
    module.FACTORS[:] = factors
    return reference_commands.expected_results(data, module, inputs, wanted)


def test_runs_in_float64_of_a_slow_loop_are_made_on_the_host(
    captured: Callable[[str, str], Capture], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = captured(SERIES, "series")
    found = expected_of(capture)
    assert places == ["GPU", "host", "host"], "as it is, exact, with perturbed inputs"
    places.clear()
    monkeypatch.setattr(host, "SLOW_SECONDS", 1e9)
    other = expected_of(capture)
    assert places == ["GPU"] * 3
    assert torch.equal(found["oracle"][0], other["oracle"][0]) and found["oracle"][0].dtype == torch.float64
    assert found["sensitivity"] == other["sensitivity"] and found["conditioning"] == other["conditioning"]


def test_a_wrong_candidate_is_refused_against_the_oracle_of_the_host(
    captured: Callable[[str, str], Capture], places: list[str]
) -> None:
    """The decay is wrong in the last steps, or a step is left out."""
    found = expected_of(captured(SERIES, "series"))
    assert "host" in places
    right = found["results"][0]
    late, skipped = right.clone(), right.clone()
    late[:, 290:] *= 1.0001
    skipped[2, 150] = skipped[2, 149]
    for results, is_right in ((right, True), (late, False), (skipped, False)):
        observed = {"results": [results], "facts": found["facts"], "after": {}, "changed_state": []}
        checks = compare_case({}, found, observed, "budget")["checks"]
        assert all(check["status"] != "failed" for check in checks) == is_right


def test_a_host_that_takes_too_long_is_tried_once(
    captured: Callable[[str, str], Capture], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = captured(SERIES, "series")
    monkeypatch.setattr(host, "TIME_LIMIT", -1e9)
    found = expected_of(capture, Draws.NONE)
    assert places == ["GPU", "host", "GPU"]
    assert expected_of(capture, Draws.NONE)["oracle"][0].equal(found["oracle"][0])
    assert places[3:] == ["GPU", "GPU"]


def test_runs_that_round_each_operation_may_take_longer_on_the_host(
    captured: Callable[[str, str], Capture], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SERIES.replace("return FACTORS.pop(0) * out if FACTORS else out", "return h")
    capture = captured(text, "series")
    expected_of(capture, Draws.ALL, text=text)
    assert places[0] == "GPU" and len(places) > 3 and set(places[1:]) == {"host"}
    places.clear()
    monkeypatch.setattr(host, "ROUNDING_LIMIT", -1e9)
    expected_of(capture, Draws.ALL, text=text)
    # The exact run, three with perturbed inputs, and the first that rounds, which ends.
    assert places[:6] == ["GPU", *["host"] * 5] and set(places[6:]) == {"GPU"}


@pytest.mark.parametrize("wanted", [Draws.NONE, Draws.ALL])
def test_code_that_computes_something_else_on_the_host_runs_on_the_gpu(
    captured: Callable[[str, str], Capture], places: list[str], wanted: Draws
) -> None:
    capture = captured(SERIES, "series")
    right = expected_of(capture, wanted)["oracle"][0]
    places.clear()
    found = expected_of(capture, wanted, 1.0, 1.001)
    assert places[:3] == ["GPU", "host", "GPU"] and set(places[3:]) <= {"GPU"}
    assert torch.equal(found["oracle"][0], right)


def test_code_that_raises_on_the_host_runs_on_the_gpu(
    captured: Callable[[str, str], Capture], places: list[str]
) -> None:
    capture = captured(SERIES, "series")
    found = expected_of(capture, Draws.NONE, 1.0, "a tensor of the GPU")  # type: ignore[arg-type]
    assert places == ["GPU", "host", "GPU"] and found["has_oracle"]


def test_only_loops_of_few_float32_values_are_for_the_host(captured: Callable[[str, str], Capture]) -> None:
    sizes = {"B": 4, "T": 300}
    capture = captured(SERIES, "series")
    assert has_small_iterations(capture.graph, sizes)
    assert not has_small_iterations(capture.graph, {**sizes, "B": 100_000})
    half = captured(SERIES.replace("f32", "f16"), "series")
    assert not has_small_iterations(half.graph, sizes)
    flat = captured(SERIES.replace("for t in range(x.shape[1])", "for t in range(2)"), "series")
    assert not has_small_iterations(flat.graph, sizes)


def test_work_of_the_host_does_not_take_the_gpu_between_two_timings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(gpu_lock.tempfile, "tempdir", str(tmp_path))
    folder, taken = gpu_lock.lock_folder("g"), []

    def time_alone() -> None:
        with gpu_lock.alone("g", folder):
            taken.append("timed")

    with gpu_lock.sharing("g", folder), gpu_lock.unshared():
        monkeypatch.setattr(gpu_lock, "_is_free", lambda *_: False)
        gpu_lock.let_timings_pass()
        timing = threading.Thread(target=time_alone, daemon=True)
        timing.start()
        timing.join(20)
        assert taken == ["timed"]
