"""The server prepares the workers of the first run, for trusted files only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.process.fork_server import LENT, ForkServer
from mtmc_lsp.server import warm_workers
from mtmc_lsp.server.warm_workers import WarmWorkers


class FakeForkServer:
    """Notes what becomes of it."""

    started: list[FakeForkServer] = []

    def __init__(self, python: str, env: object, *, preload: bool) -> None:
        self.python, self.preload, self.is_closed = python, preload, False

    def start(self) -> None:
        self.started.append(self)

    def close(self) -> None:
        self.is_closed = True

    @contextlib.contextmanager
    def lend(self) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
        yield {"LENT": self.python}, ()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[FakeForkServer]:
    monkeypatch.setattr(FakeForkServer, "started", [])
    monkeypatch.setattr(warm_workers, "ForkServer", FakeForkServer)
    return FakeForkServer.started


def test_files_of_one_interpreter_share_a_fork_server(started: list[FakeForkServer], tmp_path: Path) -> None:
    workers = WarmWorkers()
    for name in ("a.py", "b.py"):
        workers.prepare(str(tmp_path / name), "/usr/bin/python3")
    (server,) = started
    assert (server.python, server.preload) == ("/usr/bin/python3", True)
    with workers.lend() as (variables, _):
        assert variables == {"LENT": "/usr/bin/python3"}


def test_the_fork_server_of_another_interpreter_takes_its_place(started: list[FakeForkServer], tmp_path: Path) -> None:
    workers = WarmWorkers()
    for python in ("/one/python", "/two/python"):
        workers.prepare(str(tmp_path / "a.py"), python)
    assert [server.is_closed for server in started] == [True, False]
    workers.close()
    assert started[-1].is_closed
    workers.prepare(str(tmp_path / "a.py"), "/three/python")
    assert len(started) == 2, "the server has ended"


def test_wrong_settings_are_left_to_the_run(started: list[FakeForkServer], tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.mtmc]\nno-such-setting = 1\n")
    workers = WarmWorkers()
    workers.prepare(str(tmp_path / "a.py"), None)
    assert not started
    with workers.lend() as offer:
        assert offer == ({}, ())


def test_a_process_can_borrow_it() -> None:
    script = (
        "from mtmc_lsp.process.fork_server import ForkServer, likely_variables\n"
        "import sys\n"
        "server = ForkServer(sys.argv[1], likely_variables(), preload=True)\n"
        "print('borrowed' if server._borrow() else 'not borrowed')\n"
    )
    workers = WarmWorkers()
    workers.prepare(os.path.abspath("any.py"), sys.executable)
    assert isinstance(workers._fork_server, ForkServer)
    try:
        with workers.lend() as (variables, descriptors):
            assert LENT in variables
            done: Any = subprocess.run(
                [sys.executable, "-c", script, sys.executable],
                env={**os.environ, **variables},
                pass_fds=descriptors,
                capture_output=True,
                text=True,
                check=True,
            )
        assert done.stdout == "borrowed\n"
    finally:
        workers.close()
