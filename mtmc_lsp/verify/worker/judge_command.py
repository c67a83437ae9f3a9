"""Judges a candidate's results in the reference process. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.process.gpu_lock import let_timings_pass
from mtmc_lsp.process.worker.tensor_ipc import import_, release
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.messages import STORED, STORED_AFTER, CaseRequest, JudgeAnswer, JudgeRequest
from mtmc_lsp.verify.sizes.case_sizes import is_larger
from mtmc_lsp.verify.worker.comparison.compare import Comparison, compare_case
from mtmc_lsp.verify.worker.comparison.draws import least_draws
from mtmc_lsp.verify.worker.comparison.small_results import precise_results
from mtmc_lsp.verify.worker.inputs import EXACT
from mtmc_lsp.verify.worker.observation.determinism import are_identical, not_explained
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt
from mtmc_lsp.verify.worker.reference_cache import (
    comparison_device,
    is_cached,
    keep_attempt,
    last_attempt,
    load,
    store,
)
from mtmc_lsp.verify.worker.reference_commands import expected_results, inputs_of, with_oracle
from mtmc_lsp.verify.worker.run_target import module_of, outcome, release_gpu_memory, target_source


def judge(request: JudgeRequest) -> JudgeAnswer:
    """Compare a candidate's results with the reference's and the oracle's.

    An oracle that was left out is computed first, unless the results are the reference's, which need none.
    """
    inputs, expected = _expected(request)
    # Results that were computed on the CPU are compared there.
    devices = {t.device.type for t in outcome(expected) if isinstance(t, torch.Tensor)}
    device = devices.pop() if devices else comparison_device()
    results = import_(request.results, device)
    is_identical = are_identical(expected, results)
    graph, sizes = request.data.call.graph, request.data.case.sizes
    if expected["is_deferred"] and (request.finds_trivial or not is_identical):
        wanted = least_draws(graph, sizes, finds_trivial=request.finds_trivial)
        expected = with_oracle(request.data, request.expected, inputs, expected, wanted)
    # Trivial answers must not pass within higher limits.
    least = least_draws(graph, sizes, finds_trivial=True) if request.finds_trivial else Draws.NONE
    if expected["omits_draws"] and expected["draws"] < least:
        inputs, expected = _computed_again(request, least)
    answer = _judged(request, inputs, expected, results, device)
    while expected["omits_draws"] and any(check.status is CheckStatus.FAILED for check in answer.checks):
        inputs, expected = _computed_again(request, Draws(expected["draws"] + 1))
        answer = _judged(request, inputs, expected, results, device)
    return replace(answer, is_identical=is_identical, has_oracle=expected["has_oracle"])


def _computed_again(request: JudgeRequest, wanted: Draws) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inputs and expected results with more draws, which the next candidate will probably need, too."""
    attempt = last_attempt(request.expected) or Attempt()
    if attempt.runs is not None:
        inputs = attempt.runs.inputs
        expected = expected_results(request.data, attempt.runs.module, inputs, wanted, attempt)
    else:
        inputs, expected = _computed(request.data, wanted, attempt)
    store(request.expected, expected, or_file=False)
    keep_attempt(request.expected, attempt, request.data.inputs)
    return inputs, expected


def _judged(
    request: JudgeRequest,
    inputs: dict[str, torch.Tensor],
    expected: dict[str, Any],
    results: dict[str, Any],
    device: str,
) -> JudgeAnswer:
    """Compare a candidate's results with these expected ones."""
    case = request.data.case
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    _fill_with_expected(results, expected)
    exact = case.distribution in EXACT and request.is_exact
    let_timings_pass()
    graph = request.data.call.graph
    tensors = [result for result in expected["results"][: len(expected["facts"])] if isinstance(result, torch.Tensor)]
    # Results and the graph's outputs have the same numbers if all results are different tensors.
    has_all = len(tensors) == len(expected["facts"]) == len(graph.forward_outputs)
    precise = precise_results(graph) if has_all else frozenset[int]()
    comparison = compare_case(inputs, expected, results, request.precision, exact=exact, precise=precise)
    checks = [Check(c["name"], CheckStatus(c["status"]), "", c["detail"]) for c in comparison["checks"]]
    if case.layout:
        # The layout of results is only part of the contract for the workload's own layout of inputs.
        checks = [_without_stride(check) for check in checks]
    let_timings_pass()
    answer = JudgeAnswer(
        tuple(checks),
        comparison["error"],
        comparison["reference_error"],
        compared=tuple(comparison["results"]),
        undecided=tuple(comparison["inconclusive"]),
        trivial=tuple(trivial_answers(inputs, expected, request.precision) if request.finds_trivial else ()),
        measurements=tuple(comparison["measurements"]),
        counts=tuple(comparison["counts"]),
        unexplained=tuple(_unexplained(request, inputs, expected)),
    )
    release_gpu_memory()
    return answer


def _expected(request: JudgeRequest) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inputs and expected results of a case; computed again if they are not cached."""
    data = request.data
    release(data.inputs)
    if not is_cached(request.expected):
        sizes = {**data.call.graph.sizes, **data.case.sizes}
        # Of very large results, which have no room, more draws are made if they refuse these.
        least = least_draws(data.call.graph, sizes, finds_trivial=request.finds_trivial)
        return _computed(data, least if is_larger(data.call.graph, sizes) else Draws.ALL)
    expected = load(request.expected, comparison_device())
    inputs = load(data.inputs, comparison_device()) if is_cached(data.inputs) else inputs_of(data)[1]
    return inputs, expected


def _computed(
    data: CaseRequest, wanted: Draws, attempt: Attempt | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inputs and expected results, with the ``wanted`` draws of rounding."""
    module, inputs = inputs_of(data)
    return inputs, expected_results(data, module, inputs, wanted, attempt)


def _fill_with_expected(results: dict[str, Any], expected: Mapping[str, Any]) -> None:
    """Replace what the programs that were left out would have stored by the expected values."""
    for group, key in (("results", STORED), ("after", STORED_AFTER)):
        for name, mask in results.get(key, {}).items():
            with contextlib.suppress(LookupError):
                value, other = results[group][name], expected[group][name]
                if value.shape == other.shape:
                    value.copy_(torch.where(mask.to(value.device), value, other))


def _unexplained(request: JudgeRequest, inputs: dict[str, torch.Tensor], expected: dict[str, Any]) -> list[int]:
    """Results that differ between the candidate's calls, but not between those of the user's code."""
    if not request.differing:
        return []
    data = request.data
    module = module_of(data.call, target_source(data.user_source, data.call), None)
    return not_explained(request.differing, module, data.call, inputs, expected, data.case)


def _without_stride(check: Check) -> Check:
    if check.name.endswith(" stride") and check.status is CheckStatus.FAILED:
        return Check(check.name, CheckStatus.SKIPPED, check.case, check.detail)
    return check


def trivial_answers(inputs: Mapping[str, torch.Tensor], expected: Mapping[str, Any], precision: str) -> list[str]:
    """The trivial answers that would pass: zeros, the mean, and copies of the inputs.

    Empty results do not count, and neither do means of single numbers.
    """
    if expected["after"]:
        # If the reference changes its inputs, no constant answer is complete.
        return []
    results = [r for r in expected["results"] if isinstance(r, torch.Tensor)]
    answers: dict[str, list[torch.Tensor]] = {"zeros": [torch.zeros_like(r) for r in results]}
    if any(r.numel() > 1 for r in results):
        answers["the mean"] = [_mean(r) for r in results]
    for name, value in inputs.items():
        fits = [value.shape == r.shape and value.dtype == r.dtype for r in results]
        if fits and all(fits):
            answers[f"a copy of {name}"] = [value] * len(results)
    return [name for name, answer in answers.items() if _passes(answer, expected, precision)]


def _mean(result: torch.Tensor) -> torch.Tensor:
    return torch.full_like(result, result.double().mean().item()) if result.numel() else result


def _passes(answer: list[torch.Tensor], expected: Mapping[str, Any], precision: str) -> bool:
    comparison = Comparison(precision)
    answers = iter(answer)
    for i, result in enumerate(expected["results"]):
        if isinstance(result, torch.Tensor):
            same_shape = next(answers).to(result.device).expand(result.shape)
            like = laid_out(same_shape, result.stride(), result.dtype)
            sensitivity, ties = expected["sensitivity"].get(i, 0.0), expected["ties"].get(i)
            ill_conditioned = expected["ill_conditioned"].get(i)
            oracle, conditioning = expected["oracle"][i], expected["conditioning"].get(i, 0.0)
            comparison.tensor("", like, result, oracle, sensitivity, ties, ill_conditioned, conditioning)
    return all(check["status"] != "failed" for check in comparison.finish()[0])
