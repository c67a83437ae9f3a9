"""The table of causes of a TritonBench run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "tritonbench_causes.py"
RAN = {"runs": True, "reason": "", "tried": ["autotune"], "applied": [], "failed": [], "speedup": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"runs": False, "reason": "the call takes too long under the interpreter"}, "not run: too long"),
        ({"runs": False, "reason": "TypeError: x"}, "not run: the original raises another error"),
        ({"tried": []}, "run: no edit was tried"),
        ({"tried": [], "end_reason": "the time limit was reached"}, "run: the time ended"),
        ({"failed": ["autotune: another program computed on the GPU"]}, "tried: another program"),
        ({"failed": ["autotune: wrong", "cache: another program computed on the GPU"]}, "tried: an edit failed"),
        ({"rejected": ["autotune: slower"]}, "tried: the edits verified, and none was faster"),
        ({"applied": ["autotune"], "speedup": 1.2}, "an edit was kept"),
        ({"applied": ["autotune"]}, "an edit was verified, and not timed"),
    ],
)
def test_a_file_counts_under_the_stage_at_which_it_ended(changes: dict[str, Any], expected: str) -> None:
    assert runpy.run_path(str(SCRIPT))["cause"]({**RAN, **changes}).startswith(expected)
