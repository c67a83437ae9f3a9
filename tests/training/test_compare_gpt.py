"""The comparison of trainings: curves, the table, and the whole command without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "compare_gpt.py"
sys.path.append(str(SCRIPT.parent))
import compare_gpt  # noqa: E402


def row(variant: str, losses: list[float], rate: float = 100.0, **values: Any) -> dict[str, Any]:
    facts = {
        "commit": "c",
        "gpu": "g",
        "torch": "t",
        "triton": "t",
        "optimise seconds": 9.0,
        "parts": {"gated": "improved"},
    }
    calls = {"gated": [4, 4]} if variant == "ours" else {}
    made = {"variant": variant, "losses": losses, "tokens per second": rate, "peak MiB": 10.0, "calls": calls, **facts}
    return made | values


def test_a_curve_is_compared_by_means_of_equal_parts() -> None:
    assert compare_gpt.windows([float(i) for i in range(12)]) == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5]
    assert compare_gpt.windows([1.0, 2.0]) == [1.0, 2.0]


def test_a_variant_agrees_if_it_is_nearer_to_eager_mode_than_the_seeds_are_to_each_other() -> None:
    eager = [row("eager", [3.0, 2.0]), row("eager", [3.2, 2.2])]
    near = [row("ours", [3.05, 2.05], 200.0, **{"peak MiB": 5.0}), row("ours", [3.25, 2.25], 200.0)]
    text, is_good = compare_gpt.summary([*eager, *near])
    assert is_good
    assert "| ours | 3.150, 2.150 | 0.0500 | 200 | 2.00x | 10 |" in text
    assert "Spread of the seeds in eager mode: 0.2000." in text
    assert "Calls that kernels took: gated 4 of 4." in text
    far = [row("ours", [3.0, 3.0]), row("ours", [3.0, 3.0])]
    assert not compare_gpt.summary([*eager, *far])[1]


def test_a_kernel_that_never_ran_is_not_a_comparison() -> None:
    rows = [row("eager", [3.0]), row("ours", [3.0], calls={"gated": [4, 4], "rotated": [0, 8]})]
    assert not compare_gpt.summary(rows)[1]
    assert not compare_gpt.summary([row("eager", [3.0]), row("ours", [3.0], calls={})])[1]
    assert not compare_gpt.summary([row("eager", [3.0]), row("ours", [3.0], calls={"gated": [0, 0]})])[1]


def test_a_part_inside_a_block_with_kernels_need_not_be_called() -> None:
    rows = [row("eager", [3.0]), row("ours", [3.0], calls={"Block": [8, 8], "gated": [0, 0]})]
    text, is_good = compare_gpt.summary(rows)
    assert is_good
    assert "Calls that kernels took: Block 8 of 8, gated 0 of 0." in text


def test_a_part_is_described_by_its_status_and_speedup() -> None:
    results = (ROOT / "benchmarks" / "results" / "h200-training.jsonl").read_text().splitlines()
    improved = next(each for each in map(json.loads, results) if each["status"] == "improved")
    ratio = improved["final"]["speedup"]["vs_eager"]["ratio"]
    assert compare_gpt.outcome(improved) == f"improved {ratio:.2f}x"
    assert compare_gpt.outcome({"status": "no_gain"}) == "no_gain"


@pytest.mark.slow
def test_a_gpt_trains_with_kernels_as_without(tmp_path: Path) -> None:
    """The whole command: two parts are optimised and verified, written into a copy, and trained by Triton's interpreter."""
    out = tmp_path / "gpt.jsonl"
    command = [
        sys.executable,
        str(SCRIPT),
        "--out",
        str(out),
        "--tiny",
        "--steps",
        "6",
        "--batch",
        "2",
        "--length",
        "16",
    ]
    command += ["--seeds", "0", "1", "--variants", "eager", "ours", "--filter", "*ated", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["variant"], each["seed"]) for each in rows] == [("eager", 0), ("eager", 1), ("ours", 0), ("ours", 1)]
    assert rows[-1]["calls"] == {"rotated": [24, 24], "gated": [12, 12]}
    for eager, ours in zip(rows[:2], rows[2:], strict=True):
        assert ours["losses"] == pytest.approx(eager["losses"], abs=0.01)
        assert ours["losses"][-1] < ours["losses"][0]
