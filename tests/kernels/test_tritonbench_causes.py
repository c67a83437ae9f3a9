"""The table of causes of a TritonBench run, and why an edit was not kept."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mtmc_lsp.app.bench.tritonbench_summary import cause_of, summarise_kernels
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import BaselineTime, Ratio, Speed, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.kernels.refusals import Stage, refusal_of
from mtmc_lsp.report.kernels.bench import show_kernel_bench

SCRIPT = Path(__file__).parents[2] / "scripts" / "tritonbench_causes.py"
RAN = {"runs": True, "reason": "", "tried": ["autotune"], "applied": [], "refused": [], "speedup": None}
OLD = {key: value for key, value in RAN.items() if key != "refused"} | {"failed": []}
"""A record of an earlier version."""


def refused(*stages: Stage) -> dict[str, Any]:
    return {"refused": [{"change": "autotune", "kernel": "k", "stage": stage.value} for stage in stages]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (RAN | {"runs": False, "reason": "the call takes too long under the interpreter"}, "not run: too long"),
        (
            RAN | {"runs": False, "reason": "the time limit was reached before the original had run"},
            "not run: the time",
        ),
        (RAN | {"runs": False, "reason": "TypeError: x"}, "not run: the original raises another error"),
        (RAN | {"tried": []}, "run: no edit is legal"),
        (RAN | {"tried": [], "end_reason": "the time limit was reached"}, "run: the time ended"),
        (RAN | {"tried": [], "end_reason": ""}, "run: the time ended"),
        (RAN | {"tried": [], "end_reason": "no further edit is legal"}, "run: no edit is legal"),
        (RAN | {"tried": [], "limit": "the launch takes most of the time: 9 us"}, "run: the launch takes most"),
        (
            RAN | {"tried": [], "limit": "the kernels reach 97% of the bandwidth"},
            "run: the kernels are at the roofline",
        ),
        (RAN | refused(Stage.WRONG, Stage.NOT_FASTER), "tried: no edit is faster"),
        (RAN | refused(Stage.LAUNCH_BOUND), "tried: the launch takes most of the time"),
        (RAN | refused(Stage.WRONG, Stage.TIME_ENDED), "tried: the time ended"),
        (RAN | refused(Stage.COMPILE), "tried: an edit does not compile"),
        (RAN | {"applied": ["autotune"], "speedup": 1.2}, "an edit was kept"),
        (RAN | {"applied": ["autotune"]}, "an edit was verified, and not timed"),
        (OLD, "tried: none was kept"),
        (OLD | {"failed": ["autotune: another program computed on the GPU"]}, "tried: another program"),
        (OLD | {"rejected": ["autotune: slower"]}, "tried: no edit is faster"),
        (OLD | {"rejected": ["x: 5 us, and the launch takes most of it"]}, "tried: the launch takes most of the time"),
    ],
)
def test_a_file_counts_under_the_stage_at_which_it_ended(record: dict[str, Any], expected: str) -> None:
    assert cause_of(record).startswith(expected)


def test_every_stage_has_a_cause() -> None:
    assert all(cause_of(RAN | refused(stage)).startswith("tried: ") for stage in Stage)


ACTION = MacroAction(ActionKind.EDIT, ("k",), (1, 1), {"change": "autotune", "kernel": "k"}, "", None, "Tune k")
STEP = Step(1, ACTION, StepStatus.FAILED, "")
RATIO = Ratio(0.9, 0.85, 0.95)


def timing(host_us: float) -> Timing:
    baselines = (BaselineTime("eager", 90.0, RATIO, Speed.SLOWER),)
    return Timing(100.0, baselines, "eager", Ratio(1.0, 0.99, 1.01), 25, "", 0.5, host_us=host_us)


def verdict(status: VerdictStatus) -> Verdict:
    return Verdict(status, (), "observed")


@pytest.mark.parametrize(
    ("step", "stage"),
    [
        (replace(STEP, failure=FailureKind.COMPILE_ERROR), Stage.COMPILE),
        (replace(STEP, verdict=verdict(VerdictStatus.COMPILE_ERROR)), Stage.COMPILE),
        (replace(STEP, status=StepStatus.REJECTED, reason="k does not compile for sm_90: x"), Stage.COMPILE),
        (replace(STEP, status=StepStatus.REJECTED, reason="k spills 8 bytes on sm_90"), Stage.STATISTICS),
        (replace(STEP, verdict=verdict(VerdictStatus.INCORRECT)), Stage.WRONG),
        (replace(STEP, verdict=verdict(VerdictStatus.UNCERTIFIABLE)), Stage.NOT_COMPARED),
        (replace(STEP, status=StepStatus.REJECTED, timing=timing(10.0)), Stage.NOT_FASTER),
        (replace(STEP, status=StepStatus.REJECTED, timing=timing(90.0)), Stage.LAUNCH_BOUND),
        (replace(STEP, reason="another program computed on the GPU during the timing"), Stage.DISTURBED),
        (replace(STEP, failure=FailureKind.CANCELLED), Stage.TIME_ENDED),
        (replace(STEP, failure=FailureKind.GPU_CONTEXT_LOST), Stage.ERROR),
    ],
)
def test_a_refused_edit_names_its_stage(step: Step, stage: Stage) -> None:
    refusal = refusal_of(step)
    assert refusal is not None
    assert (refusal.change, refusal.kernel, refusal.stage) == ("autotune", "k", stage)
    assert refusal.ratio == (0.9 if step.timing is not None else None)


def test_a_kept_edit_has_no_refusal() -> None:
    assert refusal_of(replace(STEP, status=StepStatus.ACCEPTED)) is None


def test_gains_in_tests_alone_are_counted_apart() -> None:
    common = {"read": True, "compiled": True, "fault": "", "call": None, "execution": None} | RAN
    kept = common | {"applied": ["direct-launch"], "speedup": 2.0}
    summary = summarise_kernels([kept | {"problem": "a", "in_test": True}, kept | {"problem": "b"}])
    assert (summary.faster, summary.in_test) == (2, 1)
    out = io.StringIO()
    show_kernel_bench(Console(file=out, width=200), summary, [])
    assert (
        "2 of 2 are faster (1 in their tests, and not with the largest inputs), geometric mean 2.00x" in out.getvalue()
    )


def test_the_script_prints_files_edits_and_seconds(tmp_path: Path) -> None:
    common = {"problem": "softmax", "read": True, "compiled": True, "fault": "", "call": None, "execution": None}
    refusal = refusal_of(replace(STEP, status=StepStatus.REJECTED, timing=timing(10.0)))
    record = common | RAN | {"refused": [to_json(refusal)], "seconds": {"time": 2.5, "check": 4.0}}
    results = tmp_path / "g.jsonl"
    results.write_text(json.dumps(record) + "\n")
    summary = summarise_kernels([record])
    assert summary.refused == {"autotune": {"not faster": 1}}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(results), "--files"], capture_output=True, text=True, check=True
    )
    assert "| tried: no edit is faster | 1: softmax |" in done.stdout
    assert "| autotune | not faster 1 |" in done.stdout
    assert done.stdout.index("| check | 4 |") < done.stdout.index("| time | 2 |")
