"""A process may be killed at any point; the next one goes on from what is stored, and measures nothing again."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from growing import TUNING, FakeMeasurer, action, grow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtmc_lsp.core.learning.transitions import Transition
from mtmc_lsp.explore import parquet
from mtmc_lsp.explore.parquet import Writer, compact, only_writer, read_transitions, read_versions

LISTED = [action("fast:a"), action("slow:b"), action("wrong:c"), TUNING]


class Killed(BaseException):
    """As by SIGKILL: nothing after it runs."""


class Disk:
    """Writes journals until the process is killed, perhaps in the middle of a line; counts the steps of sealing too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self._left = steps
        write, write_part = parquet._write, parquet._write_part

        def limited_write(handle: int, data: bytes) -> None:
            if self._left < len(data):
                write(handle, data[: self._left])
                raise Killed
            self._left -= len(data)
            write(handle, data)

        def limited_part(*arguments: object) -> None:
            if self._left < 300:
                raise Killed
            self._left -= 300
            write_part(*arguments)

        monkeypatch.setattr(parquet, "_write", limited_write)
        monkeypatch.setattr(parquet, "_write_part", limited_part)


class KilledWriter(Writer):
    """Does nothing more at its end if the process was killed."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Killed):
            self.flush()
        elif self._handle is not None:
            os.close(self._handle)


def identities(transitions: list[Transition]) -> list[tuple[str, str]]:
    return [(t.version, t.key) for t in transitions]


def run_until_killed(folder: Path, steps: int, measurer: FakeMeasurer, rows_of_part: int) -> bool:
    """Grow until so many bytes are written; whether the process came to its end."""
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, steps)
        try:
            with only_writer(folder):
                writer = KilledWriter(folder, rows_of_part=rows_of_part)
                grow(folder, listed=LISTED, has_gpu=True, measurer=measurer, writer=writer)
                compact(folder)
        except Killed:
            return False
    return True


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.integers(0, 30_000), max_size=6), rows_of_part=st.sampled_from([1, 7, 2000]))
def test_after_kills_at_any_point_the_tree_is_complete_and_nothing_stored_was_measured_again(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], rows_of_part: int
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    for steps in [*kills, 10**9]:
        before = identities(read_transitions(folder)) if any(folder.iterdir()) else []
        measurer = FakeMeasurer(has_gpu=True)
        run_until_killed(folder, steps, measurer, rows_of_part)
        after = identities(read_transitions(folder))
        assert after[: len(before)] == before, "nothing is lost, and the order stays"
        names = {version.id: " ".join(version.schedule["kernels"]) for version in read_versions(folder)}  # type: ignore[arg-type]
        measured = {(names[t.version], names[t.result]) for t in read_transitions(folder)[: len(before)] if t.result}
        assert not measured & set(measurer.judged), "what was stored is not measured again"
    transitions = read_transitions(folder)
    assert max(Counter(identities(transitions)).values()) == 1
    whole = tmp_path_factory.mktemp("whole")
    grow(whole, listed=LISTED, has_gpu=True)
    assert set(identities(transitions)) == set(identities(read_transitions(whole))), "as without any kill"


def test_a_complete_tree_costs_nothing_the_second_time(tmp_path: Path) -> None:
    first = grow(tmp_path)
    assert first.judged
    second = grow(tmp_path)
    assert not second.judged
    assert not second.compiled


def test_a_run_that_ended_early_is_continued(tmp_path: Path) -> None:
    grow(tmp_path, seconds=2.0)
    part = identities(read_transitions(tmp_path))
    grow(tmp_path)
    whole = identities(read_transitions(tmp_path))
    assert 0 < len(part) < len(whole)
    assert whole[: len(part)] == part


def test_without_a_gpu_and_with_one_are_different_measurements(tmp_path: Path) -> None:
    grow(tmp_path, listed=[action("fast:a")], unlisted=(), depth=1)
    with Writer(tmp_path) as writer:
        stored = read_transitions(tmp_path)[0]
        timed = stored.__class__(**{**stored.__dict__, "device": "Fake GPU", "ratio": 1.5})
        writer.add_transition(timed)
        writer.add_transition(timed)
    assert [(t.device, t.ratio) for t in read_transitions(tmp_path)] == [("", None), ("Fake GPU", 1.5)]
