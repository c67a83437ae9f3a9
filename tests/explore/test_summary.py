"""What ``mtmc explore --show`` prints of a folder."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from growing import TUNING, capture, grow, program
from rich.console import Console

from mtmc_lsp.explore.parquet import Writer
from mtmc_lsp.explore.summary import summarise
from mtmc_lsp.report.transition_tables import MAX_FAMILIES, show_store


def shown(folder: Path) -> list[str]:
    out = Console(file=io.StringIO(), width=400)
    show_store(out, summarise(folder))
    return [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_programs_versions_and_transitions_are_counted_by_action_and_by_outcome(tmp_path: Path) -> None:
    grow(tmp_path, has_gpu=True, depth=1)
    grow(tmp_path, has_gpu=True, depth=1, listed=[TUNING], unlisted=(), width=20)
    lines = shown(tmp_path)
    assert lines[:4] == [
        "1 programs, 10 versions, 12 transitions (7 timed) in 16.0 s of trials",
        "families: norm 1",
        "Fake GPU: 12 transitions",
        "torch 2.13.0, triton 3.9.0, mtmc 0.1.0 (abc)",
    ]
    table = [line.split() for line in lines[5:]]
    assert table[0] == ["action", "transitions", "not-legal", "compile-error", "wrong", "slower", "faster", "seconds"]
    assert table[1][:7] == ["fuse", "9", "2", "1", "2", "2", "2"]
    assert table[2][:7] == ["autotune", "3", "0", "0", "0", "1", "2"]
    assert table[3][:7] == ["all", "12", "2", "1", "2", "3", "4"]
    assert [row[0] for row in table if row] == [
        *("action", "fuse", "autotune", "all"),
        *("chosen", "random", "runner-up", "roofline", "variant"),
    ]


def test_many_families_are_not_all_listed(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for number in range(MAX_FAMILIES + 3):
            item = program(capture(name=f"f{number}"), family=f"family{number}")
            writer.add_program(item)
            writer.add_program(replace(item, name="again"))
    lines = shown(tmp_path)
    assert lines[0] == "15 programs, 0 versions, 0 transitions (0 timed) in 0.0 s of trials"
    assert lines[1].endswith("family5 1, family6 1, and 3 more")
    assert len(lines) == 2, "there is no table without transitions"
