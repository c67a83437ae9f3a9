"""Losses over a vocabulary as training code writes them: captured, computed in chunks of rows, and right."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from mtmc_lsp.actions.base import Situation
from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.messages import CaseRequest
from mtmc_lsp.verify.worker.reference_commands import inputs_of
from mtmc_lsp.verify.worker.run_target import run_case
from tests.codegen.checker import Checker
from tests.training.linear_losses import in_chunks
from tests.training.targets import HEAD, cases, text_of
from tests.training.user_losses import USER_LOSSES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "training" / "linear_losses.py"
PREFERENCES = {"preferences of pairs", "preferences with a likelihood"}
"""Their gradients are no multiples of one upstream gradient, or the loss of a row depends on a sum over other rows."""


@pytest.mark.parametrize("name", USER_LOSSES)
def test_results_and_gradients_in_chunks_are_those_of_the_users_code(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + USER_LOSSES[name])
    assert capture.graph.backward is not None, capture.workload.assumed
    assert checker.first_failure(capture, in_chunks(capture), cases(capture)) == ""
    if name in PREFERENCES:
        with pytest.raises(CannotCode, match=r"not a multiple of the upstream gradient|combines several rows"):
            in_chunks(capture, early=True)
    else:
        assert checker.first_failure(capture, in_chunks(capture, early=True), cases(capture)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", USER_LOSSES)
def test_chunks_are_the_first_proposal_at_large_sizes(checker: Checker, name: str) -> None:
    text = USER_LOSSES[name]
    for size, value in {"B": 4, "S": 1024, "N": 4096, "D": 128, "E": 128, "V": 8192}.items():
        text = re.sub(rf"\b{size}=\d+", f"{size}={value}", text)
    text = text.replace("d=32, v=200", "d=128, v=8192").replace("[2,8,32]", "[4,1024,128]").replace("[2,8]", "[4,1024]")
    capture = checker.capture(HEAD + text)
    first = proposals(Situation(capture.graph, Schedule(), planning_model(("sm_90",))))[0]
    assert first.kind is ActionKind.CHUNK_ROWS


def benchmark(name: str, **sizes: int) -> str:
    """The benchmark with fewer rows and classes."""
    text = BENCHMARKS.read_text()
    for size, value in {"B": 4, "T": 8, "N": 32, "V": 300, **sizes}.items():
        text = re.sub(rf"\b{size}=\d+", f"{size}={value}", text)
    head, *targets = text.split("\n\n\n")
    return f"{head}\n\n\n{next(target for target in targets if f'def {name}(' in target)}"


@pytest.mark.parametrize("name", re.findall(r"^def (\w+)", BENCHMARKS.read_text(), re.MULTILINE))
def test_a_benchmark_is_captured_and_computed_in_chunks(checker: Checker, name: str) -> None:
    capture = checker.capture(benchmark(name, D=64), name)
    assert capture.graph.backward is not None, capture.workload.assumed
    every = cases(capture)
    assert checker.first_failure(capture, in_chunks(capture, rows=7), [every[0], every[-2]]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", re.findall(r"^def (\w+)", BENCHMARKS.read_text(), re.MULTILINE))
def test_a_benchmark_has_a_finite_loss_and_gradients(checker: Checker, name: str) -> None:
    """With rows as long as in the benchmark, because their length decides the size of the logits."""
    capture = checker.capture(benchmark(name), name)
    case = Case(dict(capture.graph.sizes), "normal", 1)
    module, inputs = inputs_of(CaseRequest(capture, user_source=text_of(capture), case=case, inputs=""))
    results = run_case(module, capture, inputs, "cpu", contextlib.nullcontext(), case.seed, case.kind)["results"]
    assert len(results) > 2
    assert all(bool(result.isfinite().all()) and bool(result.any()) for result in results)
