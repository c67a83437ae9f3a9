"""A file with a test and larger inputs: cheaper launches show in its test, faster kernels in the larger inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.app.kernels import optimize
from mtmc_lsp.app.kernels.opening import KernelTarget
from mtmc_lsp.app.kernels.optimize import KernelOptimization
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.results import BaselineTime, Ratio, Speed, Timing
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Environment, Workload, WorkloadSource
from mtmc_lsp.kernels.messages import CaseTrace, TraceCase
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive
from tests.kernels.test_free_blocks import ROWS
from tests.kernels.test_optimizer import SOUND, Scripted

TEST = "\n\ndef test_rows():\n    return rows(torch.ones(8, 8))\n"
RATIOS = {Speed.FASTER: 2.0, Speed.SAME: 1.0, Speed.SLOWER: 0.5}


class Session:
    seconds: Mapping[str, float] = {}

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None: ...

    def cases(self) -> list[TraceCase]:
        return [SOUND.case]

    def kernel_names(self, traces: Sequence[CaseTrace]) -> tuple[str, ...]:
        return ("rows_kernel",)


class Tools(Scripted):
    """Times versions from a script: by whether the test is timed, and a word of the text."""

    has_gpu, is_interpreted, gpu_problem = True, True, ""
    environment = Environment("3.11", "2.11", "3.6", "H200", "sm_90", "13.0")

    def __init__(self, speeds: Mapping[tuple[bool, str], Speed | None]) -> None:
        super().__init__("")
        self.speeds, self.times_test = speeds, False
        self.calls: list[tuple[bool, str]] = []

    @contextmanager
    def timing_test(self) -> Iterator[None]:
        self.times_test = True
        yield
        self.times_test = False

    def baseline(self, bound_us: float) -> Timing | None:
        return self._timing(Speed.SAME)

    def time(self, text: bytes, previous: bytes | None, bound_us: float, least_us: float) -> Timing | None:
        words = {"autotune": b"triton.autotune", "direct": b"@DirectLaunch"}
        new = [word for word, part in words.items() if part in text and part not in (previous or b"")]
        word = new[0] if new else "other"
        self.calls.append((self.times_test, word))
        speed = self.speeds.get((self.times_test, word), Speed.SAME)
        if speed is None:
            raise WorkerFailed("kernels.time was cancelled", kind=FailureKind.CANCELLED)
        return self._timing(speed)

    def _timing(self, speed: Speed) -> Timing:
        ratio = RATIOS[speed]
        baselines = tuple(
            BaselineTime(n, 50.0 * ratio, Ratio(ratio, ratio, ratio), speed) for n in ("eager", "previous")
        )
        host = 49.0 if self.times_test else 5.0
        return Timing(50.0, baselines, "eager", Ratio(1.0, 1.0, 1.0), 25, "", 0.5, host_us=host, graph_us=20.0)


def optimised(
    speeds: Mapping[tuple[bool, str], Speed | None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_test: bool = True,
) -> tuple[KernelOptimization, Any, Tools]:
    file = folder / "model.py"
    text = ROWS.replace("def rows(x):", "# mtmc: x=f32[M,N] M=64 N=64\ndef rows(x):")
    file.write_text(text + TEST)
    opened = open_target(parse_request(f"{file}::rows", Settings(), sys.executable))
    workload = parse_directive(opened.text, opened.definition, str(file))
    assert workload is not None
    driver = find_target(opened.text, str(file), "test_rows")
    observed = Workload(driver, WorkloadSource.SCRIPT) if has_test else None
    tools = Tools(speeds)
    monkeypatch.setattr(optimize, "KernelSession", Session)
    monkeypatch.setattr(optimize, "KernelTools", lambda *_, **__: tools)
    run = KernelOptimization(opened, is_stored=False, target=KernelTarget(opened, driver, workload, None, observed))
    return run, run.run(30.0), tools


FASTER_IN_TEST = {(True, "direct"): Speed.FASTER}


@pytest.mark.parametrize(
    ("speeds", "kept", "is_of_test"),
    [
        ({}, (), False),
        (FASTER_IN_TEST, ("direct-launch",), True),
        ({**FASTER_IN_TEST, (False, "autotune"): Speed.FASTER}, ("direct-launch", "autotune"), False),
        ({(False, "autotune"): Speed.FASTER}, ("autotune",), False),
        ({**FASTER_IN_TEST, (False, "direct"): Speed.SLOWER}, (), False),
        ({**FASTER_IN_TEST, (False, "direct"): None}, ("direct-launch",), True),
    ],
)
def test_cheaper_launches_are_kept_if_the_test_gets_faster_and_larger_inputs_no_slower(
    speeds: dict[tuple[bool, str], Speed | None],
    kept: tuple[str, ...],
    is_of_test: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, result, tools = optimised(speeds, tmp_path, monkeypatch)
    assert tuple(step.action.params["change"] for step in result.steps if step.status.value == "accepted") == kept
    assert [step.index for step in result.steps] == list(range(1, len(result.steps) + 1))
    assert run.times_test == run.gains_in_test == is_of_test
    assert result.status is (RunStatus.IMPROVED if kept else RunStatus.NO_GAIN)
    assert ("@DirectLaunch" in result.final.source) == ("direct-launch" in kept)
    assert ("triton.autotune" in result.final.source) == ("autotune" in kept)
    assert tools.calls[0] == (True, "direct")
    assert not tools.times_test


def test_without_larger_inputs_the_workload_alone_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, result, tools = optimised(FASTER_IN_TEST, tmp_path, monkeypatch, has_test=False)
    assert result.status is RunStatus.NO_GAIN
    assert tools.calls and not any(is_test for is_test, _ in tools.calls)


def test_no_other_edit_is_timed_on_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, tools = optimised({}, tmp_path, monkeypatch)
    assert [word for is_test, word in tools.calls if is_test] == ["direct"]
