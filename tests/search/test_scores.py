"""What a bench's results come to, against numbers worked out by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from mtmc_lsp.app.bench.summary import check_one_build, summarise, why_nothing
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.report.bench_tables import show_summary


def ratio(value: float) -> dict[str, float]:
    return {"ratio": value, "low": value, "high": value}


def record(
    name: str, status: str, *, eager: float = 0.0, compiled: float = 0.0, speed: str = "", **more: Any
) -> dict[str, Any]:
    level, _, _ = name.partition("/")
    best = "eager" if eager < compiled else "compile"
    baselines = [
        {"name": name, "speedup": ratio(value), "median_us": 10.0 * value, "speed": speed if name == best else "FASTER"}
        for name, value in (("eager", eager), ("compile", compiled))
    ]
    timing = {"baselines": baselines, "best": best} if speed else None
    verdict = {"status": "correct"} if status in ("improved", "unmeasured") or speed else None
    kept = bool(speed) or status == "unmeasured"
    step = {
        "status": "accepted" if kept else "failed",
        "verdict": verdict,
        "timing": timing,
        "reason": "it is 3 % slower",
    }
    return {"problem": name, "level": level, "status": status, "wall_seconds": 10.0, "steps": [step], **more}


RECORDS = [
    record("level1/a", "improved", eager=4.0, compiled=2.5, speed="FASTER"),
    record("level1/b", "no_gain", eager=1.5, compiled=0.5, speed="SLOWER"),
    record("level1/c", "no_gain"),
    record("level2/d", "incorrect", wall_seconds=40.0),
    {
        "problem": "level2/e",
        "level": "level2",
        "status": "refused",
        "wall_seconds": 20.0,
        "error": {"message": "Model draws 7 random numbers"},
    },
    {
        "problem": "level2/f",
        "level": "level2",
        "status": "refused",
        "wall_seconds": 20.0,
        "error": {"message": "Model draws 12 random numbers"},
    },
]
ASKED = [(r["problem"], r["level"]) for r in RECORDS] + [("level2/g", "level2")]


def test_means_are_over_what_was_timed_and_fast_p_over_all_problems() -> None:
    """Without a kept version the user's own code stands: 1.00x against eager, unknown against the compiler."""
    everything, first, second = summarise(RECORDS, ASKED).scores
    eager, compiled, best = everything.means
    assert (everything.problems, first.problems, second.problems) == (7, 3, 4)
    assert (eager.count, compiled.count, best.count) == (4, 2, 2)
    assert eager.geometric == pytest.approx((4.0 * 1.5 * 1.0 * 1.0) ** 0.25)
    assert eager.arithmetic == pytest.approx(7.5 / 4)
    assert (eager.fast_1, eager.fast_2) == (2 / 7, 1 / 7)
    assert compiled.geometric == pytest.approx(math.sqrt(2.5 * 0.5))
    assert best.arithmetic == pytest.approx((2.5 + 0.5) / 2)
    assert first.means[0].fast_1 == pytest.approx(2 / 3)


def test_delivered_counts_every_file_as_it_is_after_the_run() -> None:
    """The file of b stays eager, 3x as slow as compiled code; those of c to f stay eager, and their compiled time is unknown."""
    everything = summarise(RECORDS, ASKED).scores[0]
    eager, compiled, best = everything.delivered
    assert (everything.faster, everything.answered) == (1, 4)
    assert (eager.count, eager.geometric) == (6, pytest.approx(4.0 ** (1 / 6)))
    assert (compiled.count, compiled.geometric) == (2, pytest.approx(math.sqrt(2.5 / 3)))
    assert best.geometric == pytest.approx(math.sqrt(2.5 / 3))


def with_peaks(made: dict[str, Any], ours: int, eager: int) -> dict[str, Any]:
    timing = made["steps"][0]["timing"]
    timing["peak_bytes"], timing["baselines"][0]["peak_bytes"] = ours, eager
    return made


def test_memory_is_that_of_the_delivered_files() -> None:
    fast = {"eager": 4.0, "compiled": 2.5, "speed": "FASTER"}
    less = with_peaks(record("level1/a", "improved", **fast), 50_000_000, 200_000_000)
    more = with_peaks(record("level1/b", "improved", **fast), 103_000, 100_000)
    same = with_peaks(record("level1/c", "improved", **fast), 0, 512)
    kept = with_peaks(record("level1/d", "no_gain", **fast), 50, 1)
    summary = summarise([less, more, same, kept])
    score = summary.scores[0]
    assert score.memory == pytest.approx((0.25 * 1.03) ** 0.25)
    assert score.more_memory == 1
    out = Console(width=200, file=io.StringIO())
    show_summary(out, summary)
    assert "peak memory of eager  more memory" in out.file.getvalue()  # type: ignore[attr-defined]
    assert " 71%" in out.file.getvalue()  # type: ignore[attr-defined]
    assert summarise([record("level1/a", "improved", **fast)]).scores[0].memory is None


def test_a_version_that_was_too_slow_to_be_verified_is_an_answer_without_an_error() -> None:
    slow = record("level1/s", "no_gain", eager=0.5, compiled=0.4, speed="SLOWER")
    slow["steps"][0] |= {"status": "rejected", "verdict": None}
    assert summarise([slow]).scores[0].correct == 1


def test_what_was_kept_until_the_time_was_up_counts_and_nothing_else_does() -> None:
    kept = record("level3/h", "timeout", eager=3.0, compiled=1.5, speed="FASTER")
    eager, compiled, _ = summarise([kept, record("level3/i", "timeout")]).scores[0].means
    assert (eager.count, eager.arithmetic, eager.fast_2) == (1, 3.0, 0.5)
    assert compiled.arithmetic == 1.5


def test_correct_are_those_with_a_verified_version() -> None:
    everything = summarise(RECORDS, ASKED).scores[0]
    assert everything.correct == 2
    assert everything.speeds == {"FASTER": 1, "SLOWER": 1}
    assert everything.statuses == {"improved": 1, "no_gain": 2, "incorrect": 1, "refused": 2, "not_run": 1}
    assert everything.median_seconds == 15.0


def test_reasons_that_differ_in_a_number_are_one_and_what_was_not_run_is_named() -> None:
    found = summarise(RECORDS, ASKED)
    assert found.unsolved[0].problems == ("level2/e", "level2/f")
    assert found.unsolved[0].reason == "the model draws N random numbers"
    assert found.not_run == ("level2/g",)


def test_baselines_without_a_time_are_counted_by_their_reason() -> None:
    def untimed(note: str) -> dict[str, Any]:
        baselines = [
            {"name": "eager", "speedup": ratio(2.0), "note": ""},
            {"name": "compile", "speedup": None, "note": note},
        ]
        return record("level1/a", "improved", eager=2.0, compiled=1.5, speed="FASTER", baselines=baselines)

    notes = ["torch.compile was still compiling after 9 s", "torch.compile was still compiling after 12 s", "failed"]
    summary = summarise([untimed(note) for note in notes])
    assert summary.untimed == {"torch.compile was still compiling after N s": 2, "failed": 1}
    out = Console(width=120, file=io.StringIO())
    show_summary(out, summary)
    assert "2 of 3 problems: torch.compile was still compiling after N s" in out.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_gpu_there_are_no_speedups() -> None:
    score = summarise([record("level1/a", "unmeasured", torch_calls=["aten.conv2d.default"] * 3)]).scores[0]
    assert score.correct == 1
    assert all(means.count == 0 and means.geometric is None and means.fast_1 == 0 for means in score.means)


def test_why_nothing_was_kept_is_told_by_error_last_step_or_operations() -> None:
    assert why_nothing(RECORDS[0]) == ""
    assert why_nothing(RECORDS[2]) == "it is 3 % slower"
    assert why_nothing(RECORDS[4]) == "Model draws 7 random numbers"
    nothing = {"status": "no_gain", "steps": [], "torch_calls": ["aten.conv2d.default"]}
    assert why_nothing(nothing) == "no action is worth trying; operations: aten.conv2d.default"


def test_results_of_two_commits_are_not_mixed_in_one_table() -> None:
    first, second = (
        {**item, "version": "0.1.0", "commit": commit} for item, commit in zip(RECORDS, "ab", strict=False)
    )
    check_one_build([first, {**second, "commit": "a"}], "r.jsonl")
    with pytest.raises(RequestError, match=r"commit a; mtmc 0\.1\.0, commit b") as caught:
        check_one_build([first, second], "r.jsonl")
    assert "--mixed" in caught.value.remedy
    with pytest.raises(RequestError, match="unknown version"):
        check_one_build([first, RECORDS[1]], "r.jsonl")
    assert summarise([first, second]).builds == ("mtmc 0.1.0, commit a", "mtmc 0.1.0, commit b")


def test_reasons_that_differ_in_their_lines_are_one() -> None:
    steps = [record(f"level1/{name}", "no_gain") for name in "ab"]
    for step, lines in zip(steps, ("line 3", "lines 4 to 7"), strict=True):
        step["steps"][0]["reason"] = f"the built-in coder has no kernel for this action on {lines}: no"
    assert [len(group.problems) for group in summarise(steps).unsolved] == [2]
