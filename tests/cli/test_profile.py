"""``mtmc profile``: on the CPU as a user runs it, and on a pretended GPU from what a worker saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runner import mtmc, project

from mtmc_lsp.app import profile as profiling
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.report.page import render
from mtmc_lsp.report.profile import operator_table, profile_page, summary_lines
from mtmc_lsp.timing.messages import ProfileAnswer, ProfileRequest
from mtmc_lsp.timing.worker.profile_command import covered, gaps

MODEL = """\
import torch


# mtmc: x=f32[N,256] w=f32[256,256] N=512
def mixed(x, w):
    y = x @ w
    return torch.softmax(y, -1) * 2
"""
KERNEL = "ampere_sgemm"
SEEN: dict[str, Any] = {
    "device": "cuda",
    "calls": 10,
    "wall_us": 120.0,
    "gpu_us": 50.0,
    "gap_us": 25.0,
    "operators": [
        {"name": "aten::mul", "calls": 1.0, "cpu_us": 9.0, "gpu_us": 10.0},
        {"name": "aten::matmul", "calls": 1.0, "cpu_us": 20.0, "gpu_us": 40.0},
        {"name": "aten::nothing", "calls": 1.0, "cpu_us": 0.0, "gpu_us": 0.0},
    ],
    "kernels": [{"name": "mul", "calls": 1.0, "us": 10.0}, {"name": KERNEL, "calls": 2.0, "us": 40.0}],
}
NCU = """==PROF== Connected
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Device","Metric Name","Metric Unit","Metric Value"
"0","1","python","h","ampere_sgemm","1","7","0","dram__bytes.sum","byte","1,000"
"0","1","python","h","ampere_sgemm","1","7","0","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","40.0"
"1","1","python","h","ampere_sgemm","1","7","0","dram__bytes.sum","byte","3,000"
"1","1","python","h","ampere_sgemm","1","7","0","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","60.0"
"1","1","python","h","mul","1","7","0","sm__throughput.avg.pct_of_peak_sustained_elapsed","%","n/a"
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_operators_are_told_by_the_cpus_time_and_that_is_said(tmp_path: Path) -> None:
    project(tmp_path, MODEL)
    answer = mtmc(tmp_path, "profile", "model.py::mixed", "--json", "--html", "p.html")
    assert answer.code == 0, answer.err
    found = answer.document["profile"]
    assert found["device"] == "cpu"
    assert any("sorted by CPU time" in note for note in found["notes"])
    assert answer.document["roofline"] is None
    operators = {row["name"]: row for row in found["operators"]}
    assert operators["aten::matmul"]["lines"] == [6]
    assert operators["aten::matmul"]["work"]["flops"] == 2 * 512 * 256 * 256
    assert operators["aten::softmax"]["lines"] == operators["aten::mul"]["lines"] == [7]
    assert all(row["calls"] == 1 and row["cpu_us"] > 0 for row in operators.values())
    # One call's operators cannot take much longer than the call, of which there is a median.
    assert operators["aten::matmul"]["cpu_us"] > 0
    assert found["kernels"] == []
    page = (tmp_path / "p.html").read_text()
    assert "the points are estimates" in page
    assert "<svg" in page


@pytest.fixture
def on_gpu(captured: Callable[[str, str], Capture], monkeypatch: pytest.MonkeyPatch):
    """A profile made of what a worker on a GPU would have seen."""
    capture = captured(MODEL, "mixed")
    device = planning_model(("sm_90",))

    class Seeing:
        def __init__(self, *a: object, **k: object) -> None: ...
        def __enter__(self) -> Seeing:
            return self

        def __exit__(self, *error: object) -> None: ...
        def call(self, request: ProfileRequest, seconds: float, *_: object) -> ProfileAnswer:
            return from_json(ProfileAnswer, SEEN)

    monkeypatch.setattr(profiling, "Worker", Seeing)
    target = SimpleNamespace(python="python", project=Path.cwd(), text=MODEL.encode(), whole=MODEL.encode())
    return capture, device, profiling.profile_calls(target, capture, device)


def test_on_a_gpu_operators_are_ordered_by_their_kernels_and_held_against_the_roofline(on_gpu) -> None:
    _, device, found = on_gpu
    assert [row.name for row in found.operators] == ["aten::matmul", "aten::mul"], "what takes no time is left out"
    product = found.operators[0]
    moved, flops = 4 * (512 * 256 + 256 * 256 + 512 * 256), 2 * 512 * 256 * 256
    assert product.work.bytes == moved
    assert product.work.flops == flops
    least = max(moved / device.bandwidth, flops / device.flops["fp32"]) * 1e6
    assert product.roofline == pytest.approx(least / 40.0)
    assert found.launches == 3
    assert 0 < found.roofline < 1
    text = " ".join(summary_lines(found, device))
    assert "120.0 us per call" in text
    assert "the GPU is idle for 25.0 us" in text
    assert "(data sheet)" in text
    head, rows = operator_table(found)
    assert rows[0][head.index("share")] == "80%"


def test_the_page_has_the_whole_call_and_its_operators_on_the_roofline(on_gpu) -> None:
    capture, device, found = on_gpu
    page = profile_page("mixed", capture, found, device)
    assert set(page.charts) == {"roofline"}
    html = render(page)
    for name in ("whole call", "aten::matmul", KERNEL):
        assert name in html
    assert "the points are estimates" not in html


def test_the_time_of_overlapping_kernels_counts_once_and_pauses_between_calls_are_no_gaps() -> None:
    spans = [(0, 10), (5, 12), (14, 20), (120, 130), (131, 140)]
    assert covered(spans) == 12 + 6 + 10 + 9
    assert gaps(spans, calls=2) == 2 + 1, "the pause of 100 is between the two calls"
    assert gaps(spans, calls=1) == 2 + 1 + 100
    assert gaps([], calls=3) == 0
    assert covered([]) == 0


def test_what_nsight_compute_counts_is_added_or_averaged_over_launches() -> None:
    found = profiling.read_ncu(NCU)
    assert found[KERNEL] == {"bytes": 4000.0, "of_memory": 0.5}
    assert found.get("mul", {}) == {}
    assert profiling.read_ncu("==ERROR== no permission") == {}


def test_asking_for_nsight_compute_where_it_is_not_says_so(tmp_path: Path) -> None:
    project(tmp_path, MODEL)
    answer = mtmc(tmp_path, "profile", "model.py::mixed", "--ncu", PATH="/nonexistent")
    assert answer.code == 3
    assert "Nsight Compute is not installed" in answer.err
