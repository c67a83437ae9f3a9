"""Runs the use script on a candidate that passed all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.core.errors import FailureKind, MtmcError, TensorSharingFailed, WorkerFailed
from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.case_runner import STOPS
from mtmc_lsp.verify.cases import VALUES, Case, argument_elements
from mtmc_lsp.verify.messages import UseRequest
from mtmc_lsp.verify.outcomes import CaseOutcome, failed_run, first_failed
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.trials import Trial

USE = "use"
LEAST_SIZE = 3
"""Sizes of the case: with one column, many functions are constant."""


def use_case(cases: Sequence[Case], capture: Capture, seed: int) -> Case:
    """The smallest case with random values and no small dimension."""
    possible = [case for case in cases if case.expects_kernel]
    telling = [
        case
        for case in possible
        if all(case.sizes.get(name, LEAST_SIZE) >= LEAST_SIZE for name in capture.variable_sizes)
    ]
    smallest = min(telling or possible or cases[:1], key=lambda case: argument_elements(capture, case.sizes))
    return Case(smallest.sizes, "normal", seed, VALUES)


def used_outcome(
    candidate: Adapter, reference: Reference, process: CandidateProcess, trial: Trial, case: Case
) -> CaseOutcome:
    """Use the candidate in each step that works for the reference.

    Raises:
        WorkerFailed: the run was cancelled, or its time is over.
    """
    try:
        prepared = reference.use_script(trial, case)
    except MtmcError as error:
        if error.kind in STOPS:
            raise
        return _skipped(case, error.message)
    script = prepared.script
    if not script.uses:
        return _skipped(case, script.skipped or "no step works for the reference")
    results = reference.path_for_results()
    request = UseRequest(prepared.data, candidate.source(trial), script.uses)
    try:
        answer = reference.pool.call(process, request, reference.run_seconds)
        if answer.status != "ran":
            return failed_run(case, VerdictStatus(answer.status), f"in use: {answer.reason}", answer.failure)
        process.take_results(results)
    except WorkerFailed as error:
        if error.kind is FailureKind.CANCELLED:
            raise
        is_timeout = error.kind in (FailureKind.TIMEOUT, FailureKind.DEADLINE)
        status = VerdictStatus.TIMEOUT if is_timeout else VerdictStatus.CRASHED
        return failed_run(case, status, f"in use: {error.message}", error.kind)
    try:
        checks = tuple(replace(check, case=case.label) for check in reference.judge_use(prepared, results))
    except TensorSharingFailed as error:
        return CaseOutcome(case, VerdictStatus.RUNTIME_ERROR, reason=f"its results cannot be read: {error.message}")
    wrong = first_failed(checks)
    status = VerdictStatus.CORRECT if wrong is None else VerdictStatus.INCORRECT
    return CaseOutcome(case, status, checks, f"{USE}: {wrong.detail}" if wrong is not None else "", ran=False)


def _skipped(case: Case, why: str) -> CaseOutcome:
    return CaseOutcome(case, VerdictStatus.CORRECT, (Check(USE, CheckStatus.SKIPPED, case.label, why),), ran=False)
