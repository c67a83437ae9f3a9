"""The trace of a run's processes, for developers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mtmc_lsp.process import trace
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.messages import ReleaseRequest
from mtmc_lsp.process.worker_process import Worker


def events(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_trace_has_the_start_the_commands_and_the_end_of_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.jsonl"
    monkeypatch.setenv(trace.TRACE, str(file))
    with ForkServer(sys.executable) as server, Worker(sys.executable, cwd=str(tmp_path), fork_server=server) as worker:
        worker.call(ReleaseRequest(), 60)
        worker.call(ReleaseRequest(), 60)
    seen = events(file)
    started = {event["pid"]: event["how"] for event in seen if event["event"] == trace.STARTED}
    assert sorted(map(str, started.values())) == [trace.FORK, trace.SERVER]
    forked = next(pid for pid, how in started.items() if how == trace.FORK)
    assert [event["command"] for event in seen if event["event"] == trace.ASKED] == ["process.release"] * 2
    assert {event["pid"] for event in seen if event["event"] == trace.ENDED} == set(started)
    ended = next(event for event in seen if event["event"] == trace.ENDED and event["pid"] == forked)
    assert isinstance(ended["cpu"], float) and ended["cpu"] >= 0.0


def test_a_trace_that_cannot_be_written_does_not_disturb_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trace.TRACE, str(tmp_path))
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        worker.call(ReleaseRequest(), 60)


def test_nothing_is_recorded_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trace.TRACE, raising=False)
    monkeypatch.chdir(tmp_path)
    with Worker(sys.executable, cwd=str(tmp_path)) as worker:
        worker.call(ReleaseRequest(), 60)
    assert not list(tmp_path.iterdir())
