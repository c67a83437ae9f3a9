"""Draws of rounding are left out where a user's loop makes each expensive; they only permit larger errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from wide import expected

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.messages import JudgeAnswer
from mtmc_lsp.verify.worker import judge_command
from mtmc_lsp.verify.worker.comparison.compare import compare_case
from mtmc_lsp.verify.worker.comparison.draws import least_draws
from mtmc_lsp.verify.worker.oracle_runs import limits
from mtmc_lsp.verify.worker.oracle_runs.runs import OracleRuns
from tests.loops.examples import LOOPS


def sample() -> torch.Tensor:
    return torch.randn(16, 24, generator=torch.Generator().manual_seed(1))


def recurrence(x: torch.Tensor) -> torch.Tensor:
    h, rows = x[:, 0], []
    for t in range(x.shape[1]):
        h = 0.7 * h + x[:, t]
        rows.append(h)
    return torch.stack(rows, 1)


def problems(reference: dict[str, Any], results: list[Any]) -> list[str]:
    observed = {"results": results, "facts": reference["facts"], "after": {}, "changed_state": []}
    checks = compare_case({}, reference, observed, "budget")["checks"]
    return [f"{check['name']}: {check['detail']}" for check in checks if check["status"] == "failed"]


@pytest.mark.parametrize(("wanted", "runs"), [(Draws.NONE, 2), (Draws.FEW, 3)])
def test_without_draws_a_loop_runs_once_as_it_is_and_once_in_float64(
    wanted: Draws, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        result = recurrence(x)
        dtypes.append(torch.float32 if result.element_size() == 4 else torch.float64)
        return result

    found = expected(noting, {"x": sample()}, monkeypatch, wanted=wanted)
    assert dtypes == [torch.float32, *[torch.float64] * (runs - 1)]
    assert found["omits_draws"] is (wanted is Draws.NONE) and found["draws"] == wanted


def test_limits_without_draws_are_no_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    none, few = (
        expected(recurrence, {"x": sample()}, monkeypatch, wanted=wanted) for wanted in (Draws.NONE, Draws.FEW)
    )
    assert none["sensitivity"].get(0, 0.0) <= few["sensitivity"][0] and not none["ill_conditioned"]
    assert torch.equal(none["oracle"][0], few["oracle"][0])
    assert not problems(none, [recurrence(sample())])
    wrong = recurrence(sample())
    wrong[3, 5:] *= 1.001
    assert problems(none, [wrong])


def test_without_draws_an_index_must_be_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding decides it here, so either is right; that follows from draws, which the judge then makes."""
    x = sample()
    x[2, 4] = x[2, 9] = 10.0

    def best(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(0), (x + 0.1).argmax(1)

    none, every = (expected(best, {"x": x}, monkeypatch, wanted=wanted) for wanted in (Draws.NONE, Draws.ALL))
    sums, index = best(x)
    assert not problems(none, [sums, index]) and not problems(every, [sums, index])
    other = index.clone()
    other[2] = 13 - index[2]
    assert problems(none, [sums, other]) and not problems(every, [sums, other])
    other[2] = 0
    assert problems(none, [sums, other]) and problems(every, [sums, other])


def test_results_that_rounding_moves_far_get_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    centred = sample() - sample().mean(-1, keepdim=True)
    found = expected(lambda x: x / x.sum(-1, keepdim=True), {"x": centred}, monkeypatch, wanted=Draws.NONE)
    assert found["draws"] > Draws.NONE and found["ill_conditioned"]


def test_more_draws_follow_from_the_exact_run_of_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    exact_run = OracleRuns.exact_run

    def noting(oracle: OracleRuns, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made.append(True)
        return exact_run(oracle, *args, **kwargs)

    def centred(x: torch.Tensor) -> torch.Tensor:
        return x / x.sum(-1, keepdim=True)

    monkeypatch.setattr(OracleRuns, "exact_run", noting)
    monkeypatch.setattr(limits, "loops_without_indices", lambda graph: True)
    x = {"x": sample() - sample().mean(-1, keepdim=True)}
    retried = expected(centred, x, monkeypatch, wanted=Draws.NONE)
    assert retried["draws"] > Draws.NONE and made == [True]
    direct = expected(centred, x, monkeypatch, wanted=Draws(retried["draws"]))
    assert retried["sensitivity"] == direct["sensitivity"] and retried["conditioning"] == direct["conditioning"]
    assert torch.equal(retried["oracle"][0], direct["oracle"][0])


def test_only_loops_begin_without_draws(captured: Callable[[str, str], Any]) -> None:
    """And the workload's case of a long one with few: those that round each operation would take longer than the run."""
    loop = captured(LOOPS, "recurrence").graph
    (name,) = next(node.loop for node in loop.nodes if node.loop is not None).count.symbols()
    long = replace(loop, sizes={**loop.sizes, name: 2001})
    plain = captured("import torch\n# mtmc: x=f32[N,D] N=4 D=8\ndef f(x):\n    return x.softmax(-1)\n", "f").graph
    draws = [[least_draws(graph, finds_trivial=trivial) for trivial in (False, True)] for graph in (loop, long, plain)]
    assert draws == [[Draws.NONE, Draws.ALL], [Draws.NONE, Draws.FEW], [Draws.FEW, Draws.ALL]]


@pytest.mark.parametrize(
    ("passes_from", "finds_trivial", "made"),
    [
        (Draws.NONE, False, []),
        (Draws.FEW, False, [Draws.FEW]),
        (Draws.ALL, False, [Draws.FEW, Draws.ALL]),
        (3, False, [Draws.FEW, Draws.ALL]),
        (Draws.NONE, True, [Draws.ALL]),
    ],
)
def test_the_judge_makes_the_draws_that_a_candidate_needs(
    passes_from: int, finds_trivial: bool, made: list[Draws], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Draws] = []

    def with_draws(draws: Draws) -> dict[str, Any]:
        return {"omits_draws": draws < Draws.ALL, "draws": int(draws), "results": [], "after": {}}

    def compute(data: object, wanted: Draws) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        computed.append(wanted)
        return {}, with_draws(wanted)

    def judged(request: object, inputs: object, expected: dict[str, Any], *_: object) -> JudgeAnswer:
        status = CheckStatus.PASSED if expected["draws"] >= passes_from else CheckStatus.FAILED
        return JudgeAnswer((Check("values", status),))

    monkeypatch.setattr(judge_command, "_expected", lambda request: ({}, with_draws(Draws.NONE)))
    monkeypatch.setattr(judge_command, "_computed", compute)
    monkeypatch.setattr(judge_command, "_judged", judged)
    monkeypatch.setattr(judge_command, "import_", lambda *_: {})
    monkeypatch.setattr(judge_command, "store", lambda *_, **__: None)
    call = SimpleNamespace(graph=Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={}))
    request: Any = SimpleNamespace(
        data=SimpleNamespace(call=call), results="", expected="", finds_trivial=finds_trivial
    )
    (check,) = judge_command.judge(request).checks
    assert computed == made
    assert (check.status is CheckStatus.PASSED) is (passes_from <= Draws.ALL)
