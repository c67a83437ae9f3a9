"""The verification engine: runs a candidate on every case in its process and lets the reference process judge the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.case_runner import CaseRunner
from mtmc_lsp.verify.cases import ON_CPU, Case, argument_elements, smallest_case
from mtmc_lsp.verify.delivery import REFUSED, delivery_check
from mtmc_lsp.verify.foreign.further_calls import FurtherCalls
from mtmc_lsp.verify.foreign.mutation import MutationSearch
from mtmc_lsp.verify.foreign.real_sizes import RealSizes
from mtmc_lsp.verify.foreign.samples import Samples
from mtmc_lsp.verify.int32_overflow import FAR_CHECK, FAR_SEED, far_check, far_sizes, too_slow
from mtmc_lsp.verify.messages import CallPlan, CandidateRequest, GridOrder
from mtmc_lsp.verify.near_misses import confirmed, is_near_miss, settle
from mtmc_lsp.verify.outcomes import (
    CaseOutcome,
    Verification,
    checked,
    first_failed,
    not_accepted,
    uncertain_because,
)
from mtmc_lsp.verify.reference import PreparedCase, Reference
from mtmc_lsp.verify.running.lanes import lanes, run_side_by_side
from mtmc_lsp.verify.running.plans import call_plan
from mtmc_lsp.verify.running.second_process import SecondProcess
from mtmc_lsp.verify.running.shrinking import shrunk
from mtmc_lsp.verify.running.verdicts import ran_whole_workload, verdict_of
from mtmc_lsp.verify.sanitizer import Sanitizer
from mtmc_lsp.verify.sizes.case_sizes import why_not_interpretable
from mtmc_lsp.verify.trials import Trial
from mtmc_lsp.verify.use.check import use_case, used_outcome

TIGHT_SHARE = 0.05
"""Share of the GPU's free memory from which the inputs leave no room to compute references ahead: the reference process holds
them in float64 and keeps several cases, and a candidate holds copies (on an H200, 8.7 GB of weights took 77 GB and 53 GB)."""
MANY_CALLS_SEED = 100
USE_SEED = 200
SEARCH_SEED = 400
TOO_LARGE = "the workload is too large for Triton's interpreter"
INSTEAD = "verify on a GPU, or name sizes that can vary"
ORDER = (
    "the results depend on the order in which the programs of a launch run, or in which one store writes its elements, "
    "which is not fixed on a GPU"
)
OTHER_RANDOM = "the reference draws random numbers, and a candidate may draw others in another order"


class VerificationEngine:
    """Verifies candidates against one reference. The adapters say in what the kinds of candidates differ."""

    def __init__(
        self, reference: Reference, process: CandidateProcess, second_process: CandidateProcess | None = None
    ) -> None:
        """Prepare without starting a process.

        Args:
            reference: computes expected results and judges; its pool runs all calls.
            process: runs the candidates, each in a new process. The caller closes it.
            second_process: runs some of the cases of a version beside it, in the same way.
        """
        self._reference, self._process, self._pool = reference, process, reference.pool
        self._second = SecondProcess(reference, second_process) if second_process is not None else None
        self.has_gpu = reference.has_gpu
        self._trial = Trial(reference.capture)
        self._samples = Samples()
        self._first: Case | None = None
        self._init = ""

    @property
    def trial(self) -> Trial:
        """The sizes of the last candidate's run."""
        return self._trial

    def kernel_sizes(self, candidate: Adapter) -> list[dict[str, int]]:
        """The sizes at which kernels should run, other than the workload's."""
        trials = candidate.trials("", interpreted=not self.has_gpu)
        cases = self._cases(candidate, trials[0]) if trials else []
        sizes: list[dict[str, int]] = []
        for case in cases:
            if case.expects_kernel and case.sizes not in sizes and case.sizes != candidate.capture.graph.sizes:
                sizes.append(dict(case.sizes))
        return sizes

    def compute_ahead(self, candidate: Adapter) -> list[PreparedCase]:
        """Start to compute the references of all cases, for a candidate without constructor arguments; returns the cases.

        If memory is tight, only that of the first case.
        """
        trials = candidate.trials("", interpreted=not self.has_gpu)
        if not trials:
            return []
        cases = self._cases(candidate, trials[0])
        ahead = cases[:1] if self.is_tight(candidate.capture) else cases
        return self._reference.prepare(trials[0], ahead, first=cases[0])

    def verify(
        self,
        candidate: Adapter,
        *,
        reproduction: Path | None = None,
        on_case: Callable[[Case], None] = lambda _: None,
        far: bool = False,
        sanitizer: Sanitizer | None = None,
    ) -> Verification:
        """Run every case up to the first failure.

        Args:
            reproduction: where to write the smallest failing case as a file; without it, the first failure is reported.
            on_case: called with each case before it runs.
            far: whether a correct candidate also runs where element offsets exceed 2^31.
            sanitizer: runs a correct candidate under ``compute-sanitizer``.

        Raises:
            MtmcError: the reference fails on the workload.
            WorkerFailed: of a kind in :data:`~mtmc_lsp.verify.case_runner.STOPS`.
        """
        try:
            return self._verify(candidate, reproduction, on_case, far, sanitizer)
        finally:
            # No candidate runs in the process of another, and a kernel may have broken the GPU context.
            self._next_processes()

    def _next_processes(self) -> None:
        self._process.next()
        if self._second is not None:
            self._second.next()

    def _verify(
        self,
        candidate: Adapter,
        reproduction: Path | None,
        on_case: Callable[[Case], None],
        far: bool,
        sanitizer: Sanitizer | None,
    ) -> Verification:
        text_checks = candidate.text_checks()
        wrong = first_failed(text_checks)
        if wrong is not None:
            reason = f"{wrong.name}: {wrong.detail}"
            return Verification(Verdict(VerdictStatus.INCORRECT, text_checks, self._mode, reason=reason))
        self._reference.counts_operations = candidate.is_foreign
        self._init = self._start(candidate)
        trials = candidate.trials(self._init, interpreted=not self.has_gpu)
        if not trials:
            reason = f"{TOO_LARGE}: {why_not_interpretable(self._reference.capture)}; {INSTEAD}"
            failure = FailureKind.TOO_LARGE
            return Verification(
                Verdict(VerdictStatus.UNCERTIFIABLE, text_checks, self._mode, 0.0, 0.0, reason, (), failure)
            )
        if self._second is not None and self._may_run_beside(candidate):
            self._second.prepare(candidate)
        delivery = delivery_check(
            candidate, self._reference.capture, self._process, self._pool, self._reference.run_seconds
        )
        text_checks = (*text_checks, *delivery)
        refused = first_failed(delivery)
        if refused is not None:
            return Verification(
                Verdict(
                    VerdictStatus.RUNTIME_ERROR, text_checks, self._mode, reason=REFUSED.format(reason=refused.detail)
                )
            )
        outcomes: list[CaseOutcome] = []

        def verdict(status: VerdictStatus, reason: str, failure: FailureKind | None = None) -> Verdict:
            return verdict_of(
                candidate,
                outcomes,
                text_checks,
                self._trial,
                self._process.isolation,
                first=self._first,
                without_oracle=self._reference.without_oracle,
                has_gpu=self.has_gpu,
                status=status,
                reason=reason,
                failure=failure,
            )

        reduced_failure = ""
        for trial in trials:
            self._trial = trial
            runner = CaseRunner(self._reference, self._process, candidate, trial)
            outcomes, failed = self._run_all(candidate, runner, on_case, finds_smallest=reproduction is not None)
            if failed is None:
                uncertain = uncertain_because(outcomes)
                if uncertain:
                    return Verification(verdict(VerdictStatus.UNCERTIFIABLE, uncertain))
                outcomes += self._further(candidate, outcomes, on_case, far, sanitizer)
                last = outcomes[-1]
                status = last.status
                if status is VerdictStatus.CORRECT and not ran_whole_workload(
                    outcomes, trial, self._reference.capture.graph.sizes
                ):
                    status = VerdictStatus.CORRECT_AT_REDUCED_SIZES
                return Verification(verdict(status, last.reason, last.failure))
            if trial.is_full:

                def run(case: Case, runner: CaseRunner = runner) -> CaseOutcome | None:
                    return self._outcome(candidate, runner, self._prepared(case), self._plan(candidate, case))

                draws_otherwise = trial.capture.uses_random and not candidate.draws_same_numbers
                if failed.status is VerdictStatus.INCORRECT and draws_otherwise:
                    return Verification(verdict(VerdictStatus.UNCERTIFIABLE, OTHER_RANDOM))
                smallest = failed if reproduction is None else shrunk(failed, trial.capture, run)
                # The checks name the same case as the reason.
                outcomes = [outcome for outcome in outcomes if outcome.is_correct] + [smallest]
                reason = f"{smallest.reason} (on {smallest.case.text(trial.capture.graph)})"
                # The file runs the programs in their usual order, and does not check how they access memory.
                if reproduction is None or smallest.needs_order or smallest.is_access_fault:
                    return Verification(verdict(smallest.status, reason, smallest.failure))
                # The failure may only occur after several calls, so the reproduction makes as many.
                written = self._reference.reproduce(
                    self._prepared(smallest.case),
                    candidate.source(trial),
                    reproduction,
                    reason=reason,
                    calls=runner.calls,
                )
                return Verification(verdict(smallest.status, reason, smallest.failure), written)
            # It may be right for the full-size parameters that it was written for.
            reduced_failure = reduced_failure or failed.reason
            self._next_processes()
        reason = f"{TOO_LARGE}; {INSTEAD}; with smaller parameters, for which it may not be written, it fails: {reduced_failure}"
        return Verification(verdict(VerdictStatus.UNCERTIFIABLE, reason))

    def verify_int32_offsets(self, candidate: Adapter, bandwidth: float = 0.0) -> Check:
        """Call a correct candidate once at sizes where element offsets exceed 2^31, if the GPU has the memory.

        The check is skipped, with the reason, if that is not possible.

        Args:
            bandwidth: bytes per second that the GPU copies, by which the time of the user's code is estimated; 0 if unknown.

        Raises:
            WorkerFailed: the run was cancelled.
        """
        capture = self._trial.capture
        sizes, why = far_sizes(capture, self._process.free_bytes) if self.has_gpu else ({}, "there is no GPU")
        why = why or too_slow(capture, sizes, bandwidth, self._pool.seconds_left)
        if why:
            return Check(FAR_CHECK, CheckStatus.SKIPPED, "", why)
        case = Case(sizes, "normal", self._reference.seed + FAR_SEED)
        # The other cases show which trivial answers would pass; on tensors of this size that takes seconds.
        runner = CaseRunner(self._reference, self._process, candidate, self._trial, finds_trivial=False)
        return far_check(lambda: runner.outcome(self._prepared(case), CallPlan()), case, candidate.needs_kernel)

    def _start(self, candidate: Adapter) -> str:
        """Start both processes; returns the constructor arguments if the candidate takes any."""
        if not candidate.takes_constructor_arguments:
            return ""
        with ThreadPoolExecutor(1) as background:
            starting = background.submit(self._start_process)
            init = self._reference.constructor()
            starting.result()
        return init

    def _start_process(self) -> None:
        try:
            self._process.start()
        finally:
            self._pool.set_gpu(self._process.gpu)

    def _cases(self, candidate: Adapter, trial: Trial) -> list[Case]:
        """All cases in order; the last is for many calls."""
        seed = self._reference.seed
        cases = candidate.cases(trial, interpreted=not self.has_gpu, seed=seed)
        smallest = smallest_case(cases, trial.capture)
        return [*cases, replace(smallest, seed=seed + len(cases) + MANY_CALLS_SEED)]

    def _run_all(
        self,
        candidate: Adapter,
        runner: CaseRunner,
        on_case: Callable[[Case], None],
        *,
        finds_smallest: bool,
    ) -> tuple[list[CaseOutcome], CaseOutcome | None]:
        """The outcomes of all cases, and the failing one; the smallest of several if that is requested."""
        outcomes: list[CaseOutcome] = []
        failed: CaseOutcome | None = None
        self._samples, began = Samples(), monotonic()
        pending = self._cases(candidate, self._trial)
        self._first, many = pending[0], pending[-1]
        is_tight = self.is_tight(self._trial.capture)
        divided = lanes(pending) if self._may_run_beside(candidate) and not finds_smallest else None
        if divided is not None and self._second is not None:
            runners = (runner, self._second.runner(candidate, self._trial))
            outcomes = self._run_beside(candidate, runners, pending, divided, on_case)
            return outcomes, None if outcomes[-1].is_correct else outcomes[-1]
        while pending:
            case = pending.pop(0)
            prepared = self._prepared(case)
            if pending and not is_tight:
                self._prepared(pending[0])
            on_case(case)
            outcome = self._outcome(candidate, runner, prepared, self._plan(candidate, case, is_many=case == many))
            outcome = outcome or not_accepted(case)
            outcomes.append(outcome)
            self._samples.record(outcome)
            if outcome.is_correct:
                continue
            failed = outcome
            if not failed.may_be_smaller or not finds_smallest:
                break
            limit = self._elements(failed.case)
            pending = [case for case in pending if self._elements(case) < limit]
        if failed is None and candidate.is_foreign:
            for outcome in self._searched(runner, outcomes, monotonic() - began):
                outcomes.append(outcome)
                if not outcome.is_correct:
                    return outcomes, outcome
            further = FurtherCalls(
                runner, self._prepared, self._process.next, not self.has_gpu, candidate.repeat_seconds
            )
            for outcome in further.outcomes(outcomes, self._first, many):
                outcomes.append(outcome)
                if not outcome.is_correct:
                    self._process.next()
                    return outcomes, outcome
        return outcomes, failed

    def _may_run_beside(self, candidate: Adapter) -> bool:
        return not candidate.is_foreign and not self.is_tight(self._trial.capture)

    def _run_beside(
        self,
        candidate: Adapter,
        runners: Sequence[CaseRunner],
        cases: Sequence[Case],
        divided: Sequence[Sequence[int]],
        on_case: Callable[[Case], None],
    ) -> list[CaseOutcome]:
        """The outcomes of cases that are divided between two processes, up to the first failure."""
        self._reference.prepare(self._trial, cases, first=self._first)

        def run(case: Case, runner: CaseRunner) -> CaseOutcome:
            on_case(case)
            plan = self._plan(candidate, case, is_many=case == cases[-1])
            return self._outcome(candidate, runner, self._prepared(case), plan) or not_accepted(case)

        return run_side_by_side(cases, divided, [partial(run, runner=runner) for runner in runners])

    def _searched(self, runner: CaseRunner, passed: Sequence[CaseOutcome], seconds: float) -> Iterator[CaseOutcome]:
        """The outcomes of a search for a case on which a candidate is wrong that passed all others."""

        def run(case: Case) -> CaseOutcome | None:
            outcome = once(case)
            return outcome if outcome is None or outcome.is_correct else confirmed(outcome, once, precision)

        def once(case: Case) -> CaseOutcome | None:
            return runner.outcome(self._prepared(case), CallPlan())

        precision, seed = self._reference.precision, self._reference.seed + SEARCH_SEED
        search = MutationSearch(self._prepared, run, self._trial.capture, not self.has_gpu, precision, seed)
        return search.outcomes(passed, seconds)

    def _outcome(
        self, candidate: Adapter, runner: CaseRunner, prepared: PreparedCase, plan: CallPlan
    ) -> CaseOutcome | None:
        """The outcome of a case. An error slightly above its limit is measured on further seeds."""
        outcome = runner.outcome(prepared, plan)
        if outcome is not None and not outcome.is_correct and plan.order is not GridOrder.USUAL:
            usual = replace(plan, order=GridOrder.USUAL, sample_seconds=0.0)
            outcome = self._with_order(outcome, runner.outcome(prepared, usual))
        if outcome is None or not is_near_miss(outcome, self._reference.precision):
            return outcome
        return settle(outcome, lambda case: runner.outcome(self._prepared(case), CallPlan()), self._reference.precision)

    @staticmethod
    def _with_order(outcome: CaseOutcome, usual: CaseOutcome | None) -> CaseOutcome:
        """A failure in another order of programs than the usual one, in which the same case may pass."""
        if usual is None or not usual.is_correct:
            return usual or outcome
        return replace(outcome, reason=f"{ORDER}; {outcome.reason}", needs_order=True)

    def _plan(self, candidate: Adapter, case: Case, *, is_many: bool = False) -> CallPlan:
        is_first, elements = case == self._first, self._elements(case)
        plan = call_plan(candidate, case, elements, is_first=is_first, is_many=is_many, has_gpu=self.has_gpu)
        may_be_sample = candidate.is_foreign and not self.has_gpu and not (is_first or is_many or case.kind == ON_CPU)
        return self._samples.plan(plan, elements) if may_be_sample else plan

    def _elements(self, case: Case) -> int:
        return argument_elements(self._trial.capture, case.sizes)

    def _further(
        self,
        candidate: Adapter,
        outcomes: Sequence[CaseOutcome],
        on_case: Callable[[Case], None],
        far: bool,
        sanitizer: Sanitizer | None,
    ) -> list[CaseOutcome]:
        """The outcomes of the use script, and of the checks that run only on request, up to the first failure."""
        more: list[CaseOutcome] = []
        if candidate.is_used:
            cases = [outcome.case for outcome in outcomes if outcome.ran]
            case = use_case(cases, self._trial.capture, self._reference.seed + USE_SEED)
            on_case(case)
            more.append(used_outcome(candidate, self._reference, self._process, self._trial, case))
        if candidate.is_foreign and not self.has_gpu and all(outcome.is_correct for outcome in more):
            more += RealSizes(self._reference, self._process, candidate, self._init).outcomes(outcomes, on_case)
        if far and all(outcome.is_correct for outcome in more):
            case = Case(self._trial.capture.graph.sizes, "normal", self._reference.seed + FAR_SEED)
            on_case(case)
            more.append(checked(case, [self.verify_int32_offsets(candidate)]))
        if sanitizer is not None and all(outcome.is_correct for outcome in more):
            more.append(self._sanitized(candidate, sanitizer, outcomes))
        return more

    def _sanitized(self, candidate: Adapter, sanitizer: Sanitizer, outcomes: Sequence[CaseOutcome]) -> CaseOutcome:
        """Run the smallest case, and one with other values, under ``compute-sanitizer``."""
        usable = [o.case for o in outcomes if o.case.expects_kernel and not (o.case.layout or o.case.numbers)]
        smallest = min(usable, key=self._elements)
        uniform = next((case for case in usable if case.distribution == "uniform"), usable[0])
        requests = []
        for case in [smallest] if smallest == uniform else [smallest, uniform]:
            prepared = self._prepared(case)
            prepared.done.result()
            source = candidate.source(self._trial)
            requests.append(CandidateRequest(prepared.data, source, CallPlan(is_sanitized=True)))
        with self._pool.sharing_gpu():
            checks = list(sanitizer.checks(requests, uniform.label, self._reference.hidden))
        return checked(uniform, checks)

    def _prepared(self, case: Case) -> PreparedCase:
        return self._reference.prepare(self._trial, [case], first=self._first)[0]

    def is_tight(self, capture: Capture) -> bool:
        """Whether the inputs take so much GPU memory that two processes with copies of them do not run side by side."""
        types = [item.type for item in capture.graph.inputs]
        size = sum(kind.numel.value(capture.graph.sizes) * itemsize(kind.dtype) for kind in types)
        return self.has_gpu and size > TIGHT_SHARE * self._process.free_bytes > 0

    @property
    def _mode(self) -> str:
        return "gpu" if self.has_gpu else "interpreter"
