"""One measurer per hand-written target, shared by all its candidates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handwritten import Handwritten

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.worker import Worker
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.local import LocalMeasurer
from mtmc_lsp.source.targets import find_target

RUN_SECONDS = 20.0


@pytest.fixture(scope="session")
def capture_of(
    interpreter_worker: Worker, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Handwritten], Capture]:
    """Captures a hand-written target, once."""
    known: dict[str, Capture] = {}

    def capture(target: Handwritten) -> Capture:
        if target.name not in known:
            folder = tmp_path_factory.mktemp(target.name)
            (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n")
            path = folder / f"{target.name.lower()}_file.py"
            path.write_text(target.text)
            source = path.read_bytes()
            found = find_target(source, str(path), target.name)
            known[target.name] = run_capture(find_workload(str(path), source, found), source, interpreter_worker, 120)
        return known[target.name]

    return capture


@pytest.fixture(scope="session")
def measurer_of(capture_of: Callable[[Handwritten], Capture]) -> Iterator[Callable[[Handwritten], LocalMeasurer]]:
    """The measurer of a hand-written target, with limits that suit tests."""
    known: dict[str, LocalMeasurer] = {}

    def measurer(target: Handwritten) -> LocalMeasurer:
        if target.name not in known:
            known[target.name] = LocalMeasurer(
                capture_of(target), sys.executable, archs=("sm_90", "gfx942"), run_seconds=RUN_SECONDS
            )
        return known[target.name]

    yield measurer
    for item in known.values():
        item.close()


@pytest.fixture
def scratch_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"
