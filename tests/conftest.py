"""Shared helpers: write a user's file, capture it, render and check candidates."""

from __future__ import annotations

import compileall
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from tests.worker_memory import close_large

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Have our modules compiled once, as they are where they were installed: tests start hundreds of processes that import them."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "mtmc_lsp", quiet=2)


SLOW = frozenset(
    line for line in (ROOT / "tests" / "slow_tests.txt").read_text("utf-8").splitlines() if not line.startswith("#")
)
"""Modules, functions and their variants with the mark ``slow``, beside those that set it themselves."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests before pytest selects by mark."""
    for item in items:
        function, _, _ = item.nodeid.partition("[")
        if not SLOW.isdisjoint((item.nodeid, function, item.path.relative_to(ROOT).as_posix())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs of a test are the same in each run, whichever tests ran before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a user's file into a project of its own."""

    def write(text: str, name: str = "model.py") -> Path:
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def interpreter_worker(tmp_path_factory: pytest.TempPathFactory):
    """One worker under Triton's interpreter for all captures of a test process."""
    env = {} if os.environ.get("MTMC_TEST_GPU") else {"TRITON_INTERPRET": "1"}
    worker = Worker(sys.executable, cwd=str(tmp_path_factory.mktemp("cwd")), env=env)
    yield worker
    worker.close()


@pytest.fixture
def captured(user_file, interpreter_worker) -> Callable[[str, str], Capture]:
    """Captures a target of a user's text."""

    def capture(text: str, name: str) -> Capture:
        path = user_file(text)
        source = path.read_bytes()
        target = find_target(source, str(path), name)
        close_large(interpreter_worker)
        return run_capture(find_workload(str(path), source, target), source, interpreter_worker, 120)

    return capture
