"""Runs one candidate on one case in its process, and lets the reference process judge the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mtmc_lsp.core.errors import FailureKind, MtmcError, RequestError, TensorSharingFailed, WorkerFailed
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.verify.adapters import FULL_SIZE_FACTOR, Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.cases import is_exact
from mtmc_lsp.verify.messages import CallPlan, CandidateAnswer, CandidateRequest
from mtmc_lsp.verify.outcomes import (
    LARGER,
    LAUNCHED_BEFORE,
    NOT_LAUNCHED,
    CaseOutcome,
    failed_run,
    judged_outcome,
    reveals_trivial,
    skipped,
    with_refusal,
)
from mtmc_lsp.verify.reference import PreparedCase, Reference
from mtmc_lsp.verify.trials import Trial

MANY_CALLS = 24
"""Further calls on the smallest case: a candidate may be right only in its first calls."""
STOPS = (FailureKind.CANCELLED, FailureKind.DEADLINE)
"""Failures that end the verification, whatever the candidate."""


class CaseRunner:
    """Runs the cases of one candidate at the sizes of one trial."""

    def __init__(
        self,
        reference: Reference,
        process: CandidateProcess,
        candidate: Adapter,
        trial: Trial,
        *,
        finds_trivial: bool = True,
    ) -> None:
        """Set what runs where.

        Args:
            finds_trivial: whether to find the trivial answers that a case would accept.
        """
        self._reference, self._process, self._candidate, self.trial = reference, process, candidate, trial
        self._finds_trivial = finds_trivial
        self._trivial: frozenset[str] | None = None
        """Answers without any computation that passed on all cases so far that can tell; ``None`` before the first."""
        self._has_retried = False
        self._lacks_memory = False
        """Whether a case needs more memory than the GPU has."""
        self.calls = 0
        """The number of calls of the candidate so far."""

    def outcome(self, prepared: PreparedCase, plan: CallPlan) -> CaseOutcome | None:
        """The outcome of a case; ``None`` if the reference does not accept it, which it must for the workload itself.

        If the candidate's process or the reference's dies on a case, both start again and the case is repeated, once for each
        candidate: a death may be the work of an earlier call whose failure the GPU reported late. A candidate that fails in
        the fresh process as well has failed.
        """
        try:
            self._reference.wait_for(prepared)
        except MtmcError as error:
            if prepared.data.is_first or error.kind in STOPS:
                raise
            return None
        outcome = self._outcome(prepared, plan)
        if outcome.failure is None or not outcome.failure.is_death or self._has_retried:
            return outcome
        self._has_retried = True
        self._process.next()
        return self._outcome(prepared, plan)

    def _outcome(self, prepared: PreparedCase, plan: CallPlan) -> CaseOutcome:
        try:
            return self._run(prepared, plan)
        except TensorSharingFailed:
            # The GPU memory of one process cannot be opened in the other, so this and all later cases use files.
            prepared = self._reference.without_shared_memory(prepared)
        try:
            return self._run(prepared, plan)
        except TensorSharingFailed as error:
            # The candidate's results themselves are unreadable.
            self._reference.share_memory_again()
            reason = f"its results cannot be read: {error.message}"
            return CaseOutcome(prepared.case, VerdictStatus.RUNTIME_ERROR, reason=reason)

    def _run(self, prepared: PreparedCase, plan: CallPlan) -> CaseOutcome:
        """Run the candidate and judge its results.

        Raises:
            TensorSharingFailed: the tensors do not get from one process to the other.
        """
        case = prepared.case
        factor = FULL_SIZE_FACTOR if self.trial.few else 1.0
        results = self._reference.path_for_results()
        self.calls += 1 + plan.changes_contents + plan.repeats
        self._reference.share_inputs(prepared)
        try:
            request = CandidateRequest(prepared.data, self._candidate.source(self.trial), plan)
            answer = self._answer(request, factor * self._reference.run_seconds)
            if answer.status == "ran":
                self._process.take_results(results)
        except WorkerFailed as error:
            if error.kind is FailureKind.CANCELLED:
                raise
            is_timeout = error.kind in (FailureKind.TIMEOUT, FailureKind.DEADLINE)
            status = VerdictStatus.TIMEOUT if is_timeout else VerdictStatus.CRASHED
            return failed_run(case, status, error.message, error.kind)
        except RequestError as error:
            if self.trial.is_full:
                raise
            return failed_run(case, VerdictStatus.RUNTIME_ERROR, error.message, error.kind)
        if answer.fault:
            return CaseOutcome(case, VerdictStatus.INCORRECT, reason=answer.fault, ran=False, is_access_fault=True)
        if answer.is_refusal and case.may_be_refused:
            return skipped(case, LARGER, f"it raises {answer.reason}", ran=False)
        if answer.status != "ran":
            if answer.failure.is_gpu_failure:
                # A failed kernel makes every later GPU call of the process fail.
                self._process.next()
            return failed_run(case, VerdictStatus(answer.status), answer.reason, answer.failure)
        # The replay of a CUDA graph launches nothing that can be counted; its first call did.
        launches = answer.all_launches if self._candidate.replays_launches else answer.launches
        if prepared.data.is_first and self._candidate.needs_kernel and not launches:
            reason = LAUNCHED_BEFORE if answer.all_launches else with_refusal(NOT_LAUNCHED, answer.refusal)
            return CaseOutcome(case, VerdictStatus.RUNTIME_ERROR, reason=reason, lacks_kernel=True)
        if self.trial.capture.uses_random and case.expects_kernel and not answer.launches:
            # Torch's random numbers are not those of a kernel.
            return skipped(case, "values", "no kernel ran, so torch drew other random numbers", ran=True)
        if answer.uncompared:
            outcome = skipped(case, "values", answer.uncompared, ran=True)
            return replace(outcome, uncompared=answer.uncompared, unread=answer.unread, programs=answer.programs)
        return self._judged(prepared, answer, results, plan)

    def _answer(self, request: CandidateRequest, seconds: float) -> CandidateAnswer:
        """The candidate's answer; a call that runs out of GPU memory is repeated in a new process, last with the GPU alone."""
        pool = self._reference.pool
        answer = pool.call(self._process, request, seconds)
        for is_alone in (False, True):
            if answer.failure is not FailureKind.GPU_OUT_OF_MEMORY or self._lacks_memory:
                return answer
            self._process.next()
            answer = (pool.call_alone if is_alone else pool.call_with_room)(self._process, request, seconds)
        self._lacks_memory = answer.failure is FailureKind.GPU_OUT_OF_MEMORY
        return answer

    def _judged(self, prepared: PreparedCase, answer: CandidateAnswer, results: Path, plan: CallPlan) -> CaseOutcome:
        case = prepared.case
        # An answer that failed once is refuted, and the comparisons with large results take a while.
        finds_trivial = self._finds_trivial and reveals_trivial(case) and self._trivial != frozenset()
        try:
            judged = self._reference.judge(
                prepared,
                results,
                is_exact=is_exact(self.trial.capture),
                differing=answer.differing or (),
                finds_trivial=finds_trivial,
            )
        except MtmcError as error:
            if not error.kind.is_death:
                raise
            reason = f"the process that compares its results died: {error.message}"
            return failed_run(case, VerdictStatus.CRASHED, reason, error.kind)
        trivial = frozenset(judged.trivial) if finds_trivial else None
        if trivial is not None:
            self._trivial = trivial if self._trivial is None else self._trivial & trivial
        return judged_outcome(
            case,
            answer,
            judged,
            trivial,
            prepared.done.result().operations,
            is_many=plan.repeats == MANY_CALLS,
            disabled_kernels=plan.disables_kernels,
        )
