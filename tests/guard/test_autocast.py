"""Kernels for calls under autocast run only under it, with its dtype, and the reasons say so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from mtmc_lsp.capture.worker.autocast.regions import gpu_autocast_on_cpu
from mtmc_lsp.guard.conditions import conditions_in
from mtmc_lsp.guard.worker.observed_calls import explain
from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker, planned

TEXT = """import torch


# mtmc: x=f32[N,64] w=f32[64,64] N=128 autocast=f16
def scores(x, w):
    return torch.relu(x @ w)
"""


@pytest.fixture(scope="module")
def source(checker: Checker) -> str:
    """The file with kernels for calls under autocast."""
    return planned(checker.capture(TEXT, "scores")).source


@pytest.fixture(scope="module")
def module(source: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The file as a module; its guard accepts CPU tensors."""
    path = tmp_path_factory.mktemp("autocast") / "scores_under_autocast.py"
    path.write_text(on_cpu(source, TEXT))
    yield load_file(path)
    del sys.modules[path.stem]


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float16, ""),
        (torch.bfloat16, "autocast's dtype is bfloat16; the kernels were made for float16"),
        (None, "autocast is off; the kernels were made for calls under it"),
    ],
)
def test_the_guard_asks_for_the_workloads_autocast(module: ModuleType, dtype: torch.dtype | None, reason: str) -> None:
    arguments = torch.ones(128, 64), torch.ones(64, 64)
    with torch.no_grad(), gpu_autocast_on_cpu(), torch.autocast("cuda", dtype, enabled=dtype is not None):
        assert bool(module.scores_fits(*arguments)) == (not reason)
        if reason:
            assert explain(module.scores_fits, arguments, {}).reason == reason


def test_the_conditions_are_shown(source: str) -> None:
    block = source[source.index("# mtmc: begin") : source.index("# mtmc: end")]
    assert {"torch.is_autocast_enabled()", "torch.get_autocast_dtype('cuda') == torch.float16"} <= {
        *conditions_in(block)
    }
