"""Optimised files whose guards accept CPU tensors, loaded as modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.conftest import ROOT
from tests.planning.situations import fully_fused, start


@pytest.fixture(scope="session")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    """Captures and checks targets in long-lived workers."""
    shared_checker = Checker(tmp_path_factory.mktemp("checker"))
    yield shared_checker
    shared_checker.close()


@pytest.fixture(scope="session")
def optimised(checker: Checker) -> Callable[[str, str], tuple[Capture, str]]:
    """Captures a target of a text; gives the capture and the file with as few kernels as possible."""

    def optimise(text: str, name: str) -> tuple[Capture, str]:
        capture = checker.capture(text, name)
        return capture, fully_fused(capture, start(capture, text)).source

    return optimise


@pytest.fixture(scope="module")
def load(
    optimised: Callable[[str, str], tuple[Capture, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], ModuleType]]:
    """Loads the optimised file of a target."""
    folder: Path = tmp_path_factory.mktemp("guards")
    loaded: dict[str, ModuleType] = {}

    def load_module(text: str, name: str) -> ModuleType:
        module_name = f"optimised_{name.lower()}"
        if module_name not in loaded:
            path = folder / f"{module_name}.py"
            path.write_text(on_cpu(optimised(text, name)[1], text))
            loaded[module_name] = load_file(path)
        return loaded[module_name]

    yield load_module
    for module_name in loaded:
        del sys.modules[module_name]


@pytest.fixture
def run_program(
    optimised: Callable[[str, str], tuple[Capture, str]], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program beside the optimised file ``model.py``, with kernels under Triton's interpreter."""

    def run(text: str, name: str, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "model.py").write_text(on_cpu(optimised(text, name)[1], text))
        (tmp_path / "program.py").write_text(program)
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
