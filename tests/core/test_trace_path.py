"""What the first verdict of a run waited for, by the trace of its processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "trace_run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(command: str, pid: int, start: float, end: float, by: int = 1) -> dict[str, Any]:
    return {"event": "asked", "command": command, "pid": pid, "at": end, "seconds": end - start, "by": by}


EVENTS = [
    {"event": "started", "pid": 7, "at": 0.0, "by": 1, "how": "fork"},
    asked("capture.capture", 7, 0.0, 5.0),
    asked("process.start", 8, 1.0, 2.0),
    asked("compile.launches", 9, 6.0, 6.5),
    asked("verify.reference", 8, 6.0, 9.0),
    asked("timing.prepare", 10, 6.0, 12.0),
    asked("verify.candidate", 11, 9.0, 10.0),
    asked("verify.judge", 8, 10.0, 11.0),
    asked("verify.candidate", 11, 11.0, 12.5),
    asked("verify.candidate", 12, 14.0, 15.0),
    asked("capture.capture", 20, 3.0, 4.0, by=2),
]


def test_each_command_is_the_last_that_ended_before_the_next_one(script: ModuleType) -> None:
    path = script.critical_path([event for event in EVENTS if event["by"] == 1])
    commands = [(command, pid) for _, _, command, pid in path]
    assert commands == [
        ("capture.capture", 7),
        ("verify.reference", 8),
        ("verify.candidate", 11),
        ("verify.judge", 8),
        ("verify.candidate", 11),
    ], "the timing ended later than the verification began, and the second version came after the first verdict"


def test_the_wait_for_our_own_process_is_printed(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.show_paths(EVENTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run of process 1" and len(lines) == 7, "a run without a verification has no path"
    assert lines[3].split() == ["6.00", "9.00", "1.00", "verify.reference", "(8)"]
