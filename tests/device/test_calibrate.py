"""``mtmc calibrate``: the table, the JSON document, and the use of measured numbers in later plans."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.app import calibrate as calibrate_app
from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.target_file import OpenTarget, Request, open_target
from mtmc_lsp.commands.calibrate import calibrate
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel, Origin
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture, Environment
from mtmc_lsp.device.calibration import FILL_AND_DRAIN, Calibration
from mtmc_lsp.device.calibration_cache import cached_device
from mtmc_lsp.process.messages import StartAnswer, StartRequest
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.timing.messages import CalibrationRequest, EnvironmentRequest

GPU = Environment("3.11", "2.11.0", "3.6.0", "NVIDIA A10", "sm_86", "550.1")
MEASURED = Calibration(
    name="NVIDIA A10",
    arch="sm_86",
    sm_count=72,
    shared_bytes=101_376,
    l2_bytes=6 << 20,
    peak_bandwidth=0.0,
    warp_size=32,
    max_warps_per_sm=48,
    registers_per_sm=65536,
    shared_bytes_per_sm=102_400,
    bandwidth=0.4e12,
    read_bandwidth=0.5e12,
    l2_bandwidth=1.6e12,
    launch_gap_us=3.0,
    flops={"fp32": 14e12, "tf32": 50e12, "fp16": 66e12, "bf16": 65e12, "fp16x3": 22e12},
    fp64_flops=0.4e12,
)
TEXT = "import torch\n\n# mtmc: x=f32[4096,4096]\ndef f(x):\n    return torch.relu(x * 2 + 1)\n"


class FakeWorker:
    """Answers like a worker on an A10."""

    environment = GPU

    def __init__(self, *arguments: object, **more: object) -> None: ...
    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None: ...
    def call(self, request: Any, seconds: float, *_: object) -> Any:
        answers: dict[type, Any] = {
            EnvironmentRequest: self.environment,
            StartRequest: StartAnswer(Isolation(), "GPU-0", 1 << 34, ""),
            CalibrationRequest: MEASURED,
        }
        return answers[type(request)]


class CapturedPipeline(Pipeline):
    """A pipeline whose capture is given."""

    given: Capture

    def _start_fork_server(self) -> None:
        return None

    def _run_capture(self) -> Capture:
        return self.given


def planned(target: OpenTarget, capture: Capture) -> tuple[list[MacroAction], DeviceModel]:
    with CapturedPipeline(target) as pipeline:
        pipeline.given = capture
        return pipeline.plan()


@pytest.fixture(autouse=True)
def _fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate_app, "Worker", FakeWorker)
    monkeypatch.setattr(calibrate_app, "checked_python", lambda python: python)
    monkeypatch.setattr(FakeWorker, "environment", GPU)


def test_the_table_has_measured_numbers_and_those_of_the_data_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(sys.executable) == 0
    text = capsys.readouterr().out
    assert "NVIDIA A10 (sm_86), torch 2.11.0, driver 550.1" in text
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    copy = next(line for line in text.splitlines() if "copy bandwidth" in line)
    assert copy.split() == ["copy", "bandwidth", "0.4", "0.535", "TB/s", "0.75", "interpolated"]
    assert any("TF32 products" in name for name in rows)
    assert "plans for this GPU, driver and torch version use these numbers" in text


def test_the_json_document_has_the_model_the_data_file_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(sys.executable, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stored"] is True
    assert document["device"]["bandwidth"] == 0.4e12
    assert document["device"]["provenance"]["bandwidth"]["origin"] == "measured"
    assert document["data"]["bandwidth"] == 0.535e12
    read = next(row for row in document["table"] if row["name"] == "read bandwidth")
    assert (read["measured"], read["unit"], read["origin"]) == (0.5, "TB/s", "interpolated")


def test_numbers_that_were_not_measured_come_from_the_data_file() -> None:
    model = calibrate_app.calibrate(sys.executable).measured
    assert model.is_calibrated
    assert model.title == "NVIDIA A10"
    assert model.peak_bandwidth == 0.6e12, "this torch reports no memory clock"
    assert model.fp8_flops == 0.0
    assert model.clock_hz == 1.46e9
    assert model.provenance["clock_hz"].origin is Origin.INTERPOLATED
    assert model.launch_us == pytest.approx(FILL_AND_DRAIN * 3.0)


def test_a_cache_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert calibrate(sys.executable) == 0
    assert "Not stored" in capsys.readouterr().out


def test_without_a_gpu_there_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "environment", replace(GPU, gpu="", capability="", driver=""))
    with pytest.raises(EnvironmentNotAble, match="there is no GPU to calibrate") as raised:
        calibrate(sys.executable)
    assert raised.value.exit_code == 3
    assert "mtmc doctor" in raised.value.remedy
    assert cached_device(GPU) is None


def test_the_next_plan_uses_a_stored_calibration(captured, tmp_path: Path) -> None:
    capture = captured(TEXT, "f")
    opened = open_target(Request(tmp_path / "model.py", "f", Settings(archs=("sm_86",)), sys.executable))
    without_gpu, _ = planned(opened, capture)
    calibrate_app.calibrate(sys.executable)
    on_gpu = replace(capture, environment=GPU, workload=replace(capture.workload, device="cuda"))
    actions, device = planned(opened, on_gpu)
    assert device == cached_device(GPU)
    assert device.bandwidth == MEASURED.bandwidth
    saved, before = (
        next(a.expected.saved_us for a in found if a.kind.value == "fuse") for found in (actions, without_gpu)
    )
    assert saved / before == pytest.approx(0.535 / 0.4, rel=0.05), "the user's memory is slower than the data file's"


class CountedWorker(FakeWorker):
    """Counts the workers, notes the GPU that each sees, and counts the calibrations."""

    seen: list[str]
    calibrations: int

    def __init__(self, *arguments: object, env: dict[str, str] | None = None, **more: object) -> None:
        self.seen.append((env or {})["CUDA_VISIBLE_DEVICES"])

    def call(self, request: Any, seconds: float, *_: object) -> Any:
        type(self).calibrations += isinstance(request, CalibrationRequest)
        return super().call(request, seconds)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountedWorker]:
    monkeypatch.setattr(calibrate_app, "Worker", CountedWorker)
    monkeypatch.setattr(calibrate_app, "versions", lambda python: {"torch": "2.11.0"})
    monkeypatch.setattr(calibrate_app, "query_gpus", lambda fields: ["NVIDIA A10, 550.1"] * 2)
    monkeypatch.setattr(CountedWorker, "seen", [], raising=False)
    monkeypatch.setattr(CountedWorker, "calibrations", 0, raising=False)
    return CountedWorker


def test_a_bench_measures_equal_gpus_once_and_later_ones_start_no_worker(counted: type[CountedWorker]) -> None:
    assert calibrate_app.calibrate_first(sys.executable, ["0", "1"]) == ["NVIDIA A10"]
    assert (counted.seen, counted.calibrations) == (["0"], 1)
    known = cached_device(GPU)
    assert known is not None and known.bandwidth == MEASURED.bandwidth
    assert calibrate_app.calibrate_first(sys.executable, ["0", "1"]) == []
    assert counted.seen == ["0"]


def test_different_gpus_are_looked_at_one_by_one(counted: type[CountedWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_app, "query_gpus", lambda fields: ["NVIDIA A10, 550.1", "NVIDIA L4, 550.1"])
    assert calibrate_app.calibrate_first(sys.executable, ["0", "1"]) == ["NVIDIA A10"]
    assert (counted.seen, counted.calibrations) == (["0", "1"], 1)


def test_without_a_gpu_nothing_starts_before_a_bench(counted: type[CountedWorker]) -> None:
    assert calibrate_app.calibrate_first(sys.executable, []) == []
    assert counted.seen == []


def test_a_bench_goes_on_if_the_gpu_cannot_be_measured(
    counted: type[CountedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise EnvironmentNotAble("no interpreter")

    monkeypatch.setattr(counted, "call", lost)
    assert calibrate_app.calibrate_first(sys.executable, ["0"]) == []
    assert cached_device(GPU) is None
