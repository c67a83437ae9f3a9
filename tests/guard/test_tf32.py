"""Kernels with the precision of TF32 run only where the user allows it, with either of torch's settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS, TF32_HELPERS
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.guard.worker.observed_calls import explain
from mtmc_lsp.process.module_files import load_file
from mtmc_lsp.verify.source_scan import scan
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.planning.situations import act, start

TARGET = """

# mtmc: x=f32[N,64] w=f32[64,64] N=128
def scores(x, w):
    return torch.relu(x @ w)
"""
# A worker captures several files, and keeps the settings of earlier ones.
FULL = 'import torch\n\ntorch.backends.cuda.matmul.fp32_precision = "none"\ntorch.set_float32_matmul_precision("highest")\n'
SETTINGS = {
    "older": f'{FULL}torch.set_float32_matmul_precision("high")\n',
    "newer": f'{FULL}torch.backends.cuda.matmul.fp32_precision = "tf32"\n',
}
OFF = "TF32 is off for matrix products; the kernels were made for calls that allow it"


@pytest.fixture(scope="module")
def module(checker: Checker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The file with one kernel of the precision of TF32; its guard accepts CPU tensors."""
    text = SETTINGS["older"] + TARGET
    path = tmp_path_factory.mktemp("tf32") / "optimised_scores.py"
    path.write_text(on_cpu(fused(checker, text), text))
    yield load_file(path)
    del sys.modules[path.stem]


def fused(checker: Checker, text: str) -> str:
    """The file with the target as one kernel."""
    capture = checker.capture(text, "scores")
    return act(capture, start(capture, text), ActionKind.FUSE, *(node.name for node in capture.graph.nodes)).source


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Both settings are those of a new process: a mix of them makes torch raise wherever they are read."""
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "none"


def decided(module: ModuleType) -> str:
    """Why the guard refuses a call; empty if it does not."""
    arguments = torch.ones(128, 64), torch.ones(64, 64)
    with torch.no_grad():
        return "" if module.scores_fits(*arguments) else explain(module.scores_fits, arguments, {}).reason


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_capture_reads_either_setting(checker: Checker, setting: str) -> None:
    assert checker.capture(SETTINGS[setting] + TARGET, "scores").graph.tf32_libraries == ("cublas",)
    assert checker.capture(FULL + TARGET, "scores").graph.tf32_libraries == ()


def test_the_guard_refuses_where_the_user_wants_full_precision(module: ModuleType) -> None:
    torch.set_float32_matmul_precision("high")
    assert decided(module) == ""
    torch.set_float32_matmul_precision("highest")
    assert decided(module) == OFF
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert decided(module) == ""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert decided(module) == OFF


def test_torch_compile_traces_the_condition(module: ModuleType) -> None:
    torch.set_float32_matmul_precision("high")

    @torch.compile(backend="eager", fullgraph=True)
    def allowed(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if module._may_products_use_tf32() else x

    assert allowed(torch.zeros(1)).item() == 1
    torch.set_float32_matmul_precision("highest")
    assert allowed(torch.zeros(1)).item() == 0


def test_kernels_of_full_precision_do_not_ask(checker: Checker) -> None:
    assert "_may_products_use_tf32" not in fused(checker, FULL + TARGET)


@pytest.mark.parametrize("library", TF32_HELPERS)
def test_the_scan_accepts_the_function_that_reads_the_setting_and_no_other_of_its_name(library: str) -> None:
    """It handles the exception of the setting that is unused; a candidate that handles exceptions is refused."""
    helper = f"import torch\n\n\n{GUARD_HELPERS[TF32_HELPERS[library]]}"
    assert all(check.status is CheckStatus.PASSED for check in scan(helper, "m.py"))
    other = helper.replace(" except RuntimeError", " except Exception")
    assert [check.name for check in scan(other, "m.py") if check.status is CheckStatus.FAILED] == ["text: no fallback"]


def test_the_scan_accepts_a_version_whose_guard_reads_the_setting(checker: Checker) -> None:
    text = SETTINGS["newer"] + TARGET
    source = fused(checker, text)
    assert TF32_HELPERS["cublas"] in source
    assert all(check.status is CheckStatus.PASSED for check in scan(source, "m.py", text))
