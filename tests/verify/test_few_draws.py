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
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.messages import JudgeAnswer
from mtmc_lsp.verify.worker import expectations, judge_command, reference_cache, reference_commands
from mtmc_lsp.verify.worker.comparison.compare import compare_case
from mtmc_lsp.verify.worker.comparison.draws import least_draws
from mtmc_lsp.verify.worker.oracle_runs import limits
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt
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


def with_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = recurrence(x)
    return rows, rows.argmax(1)


@pytest.mark.parametrize("function", [recurrence, with_index])
@pytest.mark.parametrize("indices", [True, False], ids=["may choose", "without indices"])
def test_another_attempt_makes_only_the_missing_draws(
    function: Callable[..., Any], indices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("has_loops", "keeps_runs"):
        monkeypatch.setattr(limits, name, lambda graph: True)
    monkeypatch.setattr(limits, "loops_without_indices", lambda graph: not indices)
    x, calls = {"x": sample()[:, :2].contiguous()}, [0]
    x["x"][1, 0] = 1.0 / 3.0

    def counted(x: torch.Tensor) -> Any:
        calls[0] += 1
        return function(x)

    def calls_of(wanted: Draws, attempt: Attempt) -> tuple[int, dict[str, Any]]:
        before = calls[0]
        found = expected(counted, x, monkeypatch, wanted=wanted, attempt=attempt)
        return calls[0] - before, found

    attempt = Attempt()
    steps = [calls_of(wanted, attempt) for wanted in Draws]
    assert [found["omits_draws"] for _, found in steps] == [True, True, False] and attempt.runs is None
    for wanted, (_, found) in zip(Draws, steps, strict=True):
        _, direct = calls_of(wanted, Attempt())
        assert found["sensitivity"] == direct["sensitivity"] and found["conditioning"] == direct["conditioning"]
        assert repr(found["ties"]) == repr(direct["ties"])
        assert repr(found["ill_conditioned"]) == repr(direct["ill_conditioned"])
        assert all(map(torch.equal, found["oracle"], direct["oracle"]))
    needed = calls_of(Draws.ALL, Attempt())[0]
    # The exact run is made again to record choices, and so are the draws if there are any.
    again = (1 + (limits.FEW_DRAWS if function is with_index else 0)) if indices else 0
    assert sum(count for count, _ in steps) == needed + again


def test_only_loops_begin_without_draws(captured: Callable[[str, str], Any]) -> None:
    """And the workload's case of a long one with few: those that round each operation would take longer than the run.

    That of a slow loop begins without any, too.
    """
    loop = captured(LOOPS, "recurrence").graph
    (name,) = next(node.loop for node in loop.nodes if node.loop is not None).count.symbols()
    long, slow = (replace(loop, sizes={**loop.sizes, name: length}) for length in (2001, 20_000))
    plain = captured("import torch\n# mtmc: x=f32[N,D] N=4 D=8\ndef f(x):\n    return x.softmax(-1)\n", "f").graph
    draws = [
        [least_draws(graph, graph.sizes, finds_trivial=trivial) for trivial in (False, True)]
        for graph in (loop, long, slow, plain)
    ]
    none, few, every = Draws.NONE, Draws.FEW, Draws.ALL
    assert draws == [[none, every], [none, few], [none, none], [few, every]]
    # The sizes of the case count, not those of the workload.
    assert least_draws(plain, {"N": 1 << 27}, finds_trivial=True) is Draws.FEW


class Softmax16:
    """A loss whose scores are rounded to bfloat16, so that rounding moves its gradient far; it notes its runs."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.dtypes.append(x.untyped_storage().nbytes() // x.numel())
        scores = (x @ w).float()
        return torch.logsumexp(scores, -1).mean(), torch.softmax(scores, -1)


def scores() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(64, 64, generator=generator).bfloat16() for name in ("x", "w")}


def test_of_a_large_case_each_kind_of_draw_is_made_once_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, each run of a loss over a vocabulary takes seconds and tens of gigabytes."""
    runs = {}
    found = {}
    for is_large in (False, True):
        monkeypatch.setattr(limits, "is_larger", lambda graph, sizes, is_large=is_large: is_large)
        code = Softmax16()
        found[is_large] = expected(code, scores(), monkeypatch, wanted=Draws.FEW)
        runs[is_large] = len(code.dtypes)
    assert runs[True] == 4 < runs[False]
    assert found[True]["omits_draws"] and not found[False]["omits_draws"]
    assert all(found[True]["sensitivity"][i] <= found[False]["sensitivity"][i] for i in (0, 1))
    assert torch.equal(found[True]["oracle"][1], found[False]["oracle"][1])


@pytest.mark.parametrize("fault", ["a row", "a scale", "zeros", "other scores", ""])
def test_a_fault_in_a_large_case_is_refused_with_one_draw_and_with_all(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "is_larger", lambda graph, sizes: True)
    for wanted in (Draws.FEW, Draws.ALL):
        reference = expected(Softmax16(), scores(), monkeypatch, wanted=wanted)
        # The same in another order of rounding.
        x, w = scores().values()
        total, softmax = Softmax16()((x.float() @ w.float()).bfloat16(), torch.eye(64).bfloat16())
        if fault == "a row":
            softmax[5] = softmax[6]
        elif fault == "a scale":
            softmax *= 1.5
        elif fault == "zeros":
            softmax = torch.zeros_like(softmax)
        elif fault == "other scores":
            softmax = torch.softmax(2 * (x @ w).float(), -1)
        assert bool(problems(reference, [total, softmax])) is bool(fault), wanted


def test_without_memory_for_a_draw_a_large_case_keeps_its_exact_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their limits are lower then. Without any, a candidate would be compared with the reference's results alone."""
    run = OracleRuns.perturbed_run

    def without_memory(oracle: OracleRuns, *arguments: Any, rounds_results: bool = False, **more: Any) -> Any:
        if rounds_results:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(oracle, *arguments, **more)

    found, returned = {}, list[bool]()
    monkeypatch.setattr(expectations, "return_idle_memory", lambda *, ran_out: returned.append(ran_out))
    for is_large in (True, False):
        monkeypatch.setattr(limits, "is_larger", lambda graph, sizes, is_large=is_large: is_large)
        with monkeypatch.context() as patch:
            patch.setattr(OracleRuns, "perturbed_run", without_memory)
            found[is_large] = expected(Softmax16(), scores(), monkeypatch, wanted=Draws.FEW)
    assert found[True]["has_oracle"] and found[True]["omits_draws"] and not found[False]["has_oracle"]
    assert returned == [True], "what an oracle that does not fit has taken goes back at once"
    assert found[True]["oracle"][1].dtype == torch.float64
    monkeypatch.setattr(limits, "is_larger", lambda graph, sizes: True)
    enough = expected(Softmax16(), scores(), monkeypatch, wanted=Draws.FEW)
    assert all(found[True]["sensitivity"][i] <= enough["sensitivity"][i] for i in (0, 1))


@pytest.mark.parametrize("fault", [0.0, 0.05])
def test_exact_results_of_very_large_16_bit_results_are_kept_in_float32(
    fault: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They judge as those in float64 do, and need half of the memory."""

    def code(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ w * 0.1), (x.float() @ w.float()).sum(1)

    x, w = scores().values()
    candidate = [torch.tanh((x.float() @ w.float()).bfloat16() * 0.1), (x.float() @ w.float()).sum(1)]
    candidate[0][3] *= 1.0 + 16 * fault
    found = {}
    for piece in (10, 1 << 26):
        monkeypatch.setattr(expectations, "PIECE", piece)
        found[piece] = expected(code, scores(), monkeypatch, wanted=Draws.FEW)
        assert bool(problems(found[piece], candidate)) is bool(fault)
    kept, exact = found[10]["oracle"], found[1 << 26]["oracle"]
    # Results in float32 need the precision of float64.
    assert [value.dtype for value in kept] == [torch.float32, torch.float64]
    assert all(value.dtype == torch.float64 for value in exact)
    assert torch.equal(kept[0], exact[0].float()) and torch.equal(kept[1], exact[1])


@pytest.mark.parametrize(("is_large", "made"), [(False, Draws.ALL), (True, Draws.FEW)])
def test_results_that_have_no_room_are_computed_again_with_the_draws_that_a_case_begins_with(
    is_large: bool, made: Draws, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Draws] = []
    monkeypatch.setattr(judge_command, "is_larger", lambda graph, sizes: is_large)
    monkeypatch.setattr(judge_command, "_computed", lambda data, wanted: computed.append(wanted))
    call = SimpleNamespace(graph=Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={}))
    data = SimpleNamespace(call=call, inputs="", case=Case({}, "normal", 3))
    request: Any = SimpleNamespace(data=data, expected="not kept", finds_trivial=False)
    judge_command._expected(request)
    assert computed == [made]


def test_an_error_that_one_draw_does_not_explain_gets_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the reference's results would stand for the exact ones."""
    monkeypatch.setattr(limits, "is_larger", lambda graph, sizes: True)
    dtypes: list[int] = []

    def code(x: torch.Tensor) -> torch.Tensor:
        dtypes.append(x.element_size())
        # Depends on the precision, and on no rounding.
        return x * (1.0 if x.element_size() == 4 else 1.1)

    found = expected(code, {"x": sample()}, monkeypatch, wanted=Draws.FEW)
    assert found["ill_conditioned"][0]["is_unexplained"] and not found["omits_draws"]
    assert found["draws"] == Draws.ALL


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
        facts = {"is_deferred": False, "has_oracle": True, "results": [], "after": {}}
        return {"omits_draws": draws < Draws.ALL, "draws": int(draws), **facts}

    def compute(data: object, wanted: Draws, attempt: Attempt) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        computed.append(wanted)
        return {}, with_draws(wanted)

    def judged(request: object, inputs: object, expected: dict[str, Any], *_: object) -> JudgeAnswer:
        status = CheckStatus.PASSED if expected["draws"] >= passes_from else CheckStatus.FAILED
        return JudgeAnswer((Check("values", status),))

    monkeypatch.setattr(judge_command, "_expected", lambda request: ({}, with_draws(Draws.NONE)))
    monkeypatch.setattr(judge_command, "_computed", compute)
    monkeypatch.setattr(judge_command, "_judged", judged)
    monkeypatch.setattr(judge_command, "import_", lambda *_: {"results": [], "after": {}})
    monkeypatch.setattr(judge_command, "store", lambda *_, **__: None)
    call = SimpleNamespace(graph=Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={}))
    data = SimpleNamespace(call=call, inputs="", case=Case({}, "normal", 3))
    request: Any = SimpleNamespace(data=data, results="", expected="", finds_trivial=finds_trivial)
    (check,) = judge_command.judge(request).checks
    assert computed == made
    assert (check.status is CheckStatus.PASSED) is (passes_from <= Draws.ALL)


def test_the_runs_of_an_attempt_are_kept_while_its_results_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_loops", "keeps_runs"):
        monkeypatch.setattr(limits, name, lambda graph: True)
    attempt = Attempt()
    found = expected(recurrence, {"x": sample()}, monkeypatch, wanted=Draws.NONE, attempt=attempt)
    reference_cache.keep_attempt("results", attempt)
    assert reference_cache.last_attempt("results") is None, "the results are not in memory"
    reference_cache.store("results", found, or_file=False)
    reference_cache.keep_attempt("results", attempt)
    kept = reference_cache.last_attempt("results")
    assert kept is attempt and kept.runs is not None
    for inputs, is_kept in (("missing", False), ("inputs", True)):
        reference_cache.store("inputs", {"x": sample()}, or_file=False)
        reference_cache.keep_attempt("results", attempt, inputs)
        assert (reference_cache.last_attempt("results") is attempt) is is_kept, "the runs hold the inputs, too"
    plain = kept.runs.reference["results"]
    found = expected(recurrence, {"x": sample()}, monkeypatch, wanted=Draws.ALL, attempt=kept)
    assert found["results"] is plain and not found["omits_draws"]
    reference_cache.keep_attempt("results", kept)
    assert reference_cache.last_attempt("results") is None, "no draws are missing"


def test_the_judge_continues_the_attempt_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_loops", "keeps_runs"):
        monkeypatch.setattr(limits, name, lambda graph: True)
    attempt, x = Attempt(), {"x": sample()}
    reference_cache.store(
        "kept", expected(recurrence, x, monkeypatch, wanted=Draws.NONE, attempt=attempt), or_file=False
    )
    reference_cache.keep_attempt("kept", attempt)
    call = SimpleNamespace(graph=Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={}), uses_random=False)
    case = Case({}, "normal", 3)
    data = SimpleNamespace(call=call, capture=call, case=case, is_first=False, inputs="")
    monkeypatch.setattr(reference_commands, "device_for", lambda *_: "cpu")
    request: Any = SimpleNamespace(data=data, expected="kept")
    inputs, found = judge_command._computed_again(request, Draws.ALL)
    direct = expected(recurrence, x, monkeypatch)
    assert torch.equal(inputs["x"], x["x"]) and found["sensitivity"] == direct["sensitivity"]
    assert reference_cache.load("kept", "cpu") is found and reference_cache.last_attempt("kept") is None
