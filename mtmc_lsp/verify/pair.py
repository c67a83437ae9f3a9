"""Verifies any candidate against any reference: two callables in files of their own, neither of them ours."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import FailureKind, MtmcError, RequestError, WorkerFailed
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.results import Check, CheckStatus, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.workload import Capture, Target
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.cases import VALUES, Case
from mtmc_lsp.verify.int32_overflow import FAR_CHECK, FAR_SEED, far_sizes
from mtmc_lsp.verify.pair_cases import VALUE_CASES, is_exact, pair_cases
from mtmc_lsp.verify.pair_outcomes import Outcome, seen_checks
from mtmc_lsp.verify.pair_reference import NO_ARGUMENTS, Prepared, Reference, on_gpu
from mtmc_lsp.verify.pair_sizes import Trial, trials
from mtmc_lsp.verify.sanitizer import Sanitizer
from mtmc_lsp.verify.source_scan import scan

SHRINK_TRIES = 8
"""How often a failing case is tried on smaller sizes."""
REPEATED_ELEMENTS = 512
"""Cases with at most this many elements of arguments are run twice under the interpreter, too."""
FULL_FACTOR = 4.0
"""How much longer a case may take where parameters have their full size."""
MOST_CALLS = 30
"""At least how many calls of one case the candidate's process makes to see whether they stay alike."""
TOO_LARGE = "the workload is too large for Triton's interpreter; verify on a GPU, or name sizes that can vary"
OTHER_RANDOM = "the reference draws random numbers, and a candidate may draw others in another order"


@dataclass(frozen=True)
class Pair:
    """What is compared."""

    capture: Capture
    """Of the reference."""
    own: str
    """The reference file's text."""
    target: Target
    """The candidate."""
    source: str
    """The candidate file's text."""


@dataclass(frozen=True)
class PairVerdict:
    """The verdict, and the file that reproduces a failure."""

    verdict: Verdict
    reproduction: str = ""
    timing: Timing | None = None
    untimed: str = ""
    """Why there is no timing."""

    @property
    def speed(self) -> str:
        """``FASTER``, ``SAME``, ``SLOWER``, ``AMBIGUOUS`` or ``unmeasured``."""
        return self.timing.speed.value if self.timing is not None else "unmeasured"


class PairVerifier:
    """Runs one candidate on every case, in a process of its own, and has another process judge."""

    def __init__(
        self,
        pair: Pair,
        reference: Reference,
        *,
        needs_kernel: bool = True,
        needs_sandbox: bool = False,
        takes_empty: bool = True,
        far: bool = False,
        sanitizer: Sanitizer | None = None,
        runner: CandidateProcess | None = None,
    ) -> None:
        """Prepare the candidate's process; it starts when first used.

        Args:
            pair: what is compared.
            reference: the side of ``pair.capture``, which several candidates may be judged against.
            needs_kernel: whether a candidate that launches no Triton kernel is refused.
            needs_sandbox: whether to refuse where the candidate's process cannot be locked in completely.
            takes_empty: whether it must take inputs without elements as the reference does.
            far: whether, on a GPU that has the memory, a case is run whose offsets of elements pass 2^31.
            sanitizer: what a candidate that is correct is run under as well.
            runner: the caller's process for the candidate, where it is to have other limits.
        """
        self._pair, self._reference, self._needs_kernel = pair, reference, needs_kernel
        self._takes_empty, self._far, self._sanitizer = takes_empty, far, sanitizer
        self.has_gpu = reference.has_gpu
        self._own_runner = runner is None
        self._runner = runner or CandidateProcess(
            reference.python,
            str(project_root(Path(pair.target.path))),
            pair.capture.environment,
            has_gpu=self.has_gpu,
            # The expected results are out of reach too, not only unnamed.
            hidden=reference.hidden,
            fork_server=reference.fork_server,
            needs_sandbox=needs_sandbox,
        )
        self._calls = 0
        self._answers: dict[tuple[tuple[str, int], ...], str] = {}
        self._trial = Trial(pair.capture, NO_ARGUMENTS)

    @property
    def constructor_arguments(self) -> str:
        """What the reference is constructed with, as text of Python literals; known once something was verified."""
        return self._trial.init

    def close(self) -> None:
        """End the candidate's process; the reference's is its owner's to close."""
        if self._own_runner:
            self._runner.close()

    def verify(self, reproduction: Path | None = None, on_case: Callable[[Case], None] = lambda _: None) -> PairVerdict:
        """Run every case, until one ends the candidate's process; of those that fail the smallest is kept.

        Args:
            reproduction: where to write the smallest failing case.
            on_case: told of each case before it runs.
        """
        text_checks = scan(self._pair.source, self._pair.target.path)
        wrong = next((check for check in text_checks if check.status is CheckStatus.FAILED), None)
        if wrong is not None:
            return PairVerdict(self._verdict([], VerdictStatus.INCORRECT, f"{wrong.name}: {wrong.detail}", text_checks))
        ways = trials(self._pair.capture, self._started(), interpreted=not self.has_gpu)
        if not ways:
            return PairVerdict(self._verdict([], VerdictStatus.UNCERTIFIABLE, TOO_LARGE, text_checks))
        given_up = ""
        for self._trial in ways:
            outcomes, failed = self._run_all(on_case)
            if failed is None:
                status, reason = self._conclusion(outcomes)
                if status is VerdictStatus.CORRECT:
                    outcomes += self._asked_for(outcomes, on_case)
                    status, reason = outcomes[-1].status, outcomes[-1].reason
                return PairVerdict(self._verdict(outcomes, status, reason, text_checks))
            given_up = given_up or failed.reason
            if self._trial.is_full:
                return self._failed(failed, outcomes, text_checks, reproduction)
            # It may well be right for the parameters that it was made for.
            self._runner.next()
        reason = f"{TOO_LARGE}; with smaller parameters, which it may not be made for, it fails: {given_up}"
        return PairVerdict(self._verdict(outcomes, VerdictStatus.UNCERTIFIABLE, reason, text_checks))

    def _failed(
        self, failed: Outcome, outcomes: list[Outcome], text_checks: tuple[Check, ...], reproduction: Path | None
    ) -> PairVerdict:
        if self._pair.capture.uses_random and failed.status is VerdictStatus.INCORRECT:
            return PairVerdict(self._verdict(outcomes, VerdictStatus.UNCERTIFIABLE, OTHER_RANDOM, text_checks))
        smallest = self._shrunk(failed) if reproduction is not None else failed
        reason = f"{smallest.reason} (on {smallest.case.label})"
        verdict = self._verdict(outcomes, smallest.status, reason, text_checks)
        written = self._reproduce(smallest, reason, reproduction) if reproduction is not None else ""
        return PairVerdict(verdict, written)

    def _started(self) -> str:
        """Both processes start at once; gives the reference's constructor arguments."""
        with ThreadPoolExecutor(1) as background:
            other = background.submit(self._runner.start)
            init = self._reference.constructor()
            other.result()
        self._reference.gpu = self._runner.gpu
        return init

    def _run_all(self, on_case: Callable[[Case], None]) -> tuple[list[Outcome], Outcome | None]:
        """Every outcome, and the smallest failing one."""
        outcomes: list[Outcome] = []
        failed: Outcome | None = None
        self._answers.clear()
        seed = self._reference.seed
        cases = pair_cases(
            self._trial.capture,
            interpreted=not self.has_gpu,
            seed=seed,
            few=self._trial.few,
            empty=self._takes_empty,
        )
        last = min((c for c in cases if all(c.sizes.values())), key=self._elements, default=cases[0])
        drift = replace(last, seed=seed + len(cases) + 100)
        waiting = [*cases, drift]
        ahead: Prepared | None = self._prepared(waiting.pop(0))
        while ahead is not None:
            present, ahead = ahead, self._prepared(waiting.pop(0)) if waiting else None
            on_case(present.case)
            outcome = self._outcome(present, first=not outcomes, drift=present.case == drift)
            if outcome is None:
                skipped = Check(
                    "reference", CheckStatus.SKIPPED, present.case.label, "the reference does not take this"
                )
                outcome = Outcome(present.case, VerdictStatus.CORRECT, (skipped,))
            outcomes.append(outcome)
            if outcome.status is VerdictStatus.CORRECT:
                continue
            failed = outcome
            if not failed.may_be_smaller or failed.reason.startswith("no Triton kernel"):
                break
            # Once one fails, only smaller ones are of interest.
            least = self._elements(failed.case)
            waiting = [case for case in waiting if self._elements(case) < least]
            if ahead is not None and self._elements(ahead.case) >= least:
                ahead = self._prepared(waiting.pop(0)) if waiting else None
        return outcomes, failed

    def _elements(self, case: Case) -> int:
        inputs = self._trial.capture.graph.inputs
        return sum(i.type.numel.value(case.sizes) for i in inputs if i.kind is InputKind.ARGUMENT)

    def _conclusion(self, outcomes: list[Outcome]) -> tuple[VerdictStatus, str]:
        """Correct, unless an answer without any work would have been found correct as well."""
        telling = [outcome.trivial for outcome in outcomes if outcome.trivial is not None]
        trivial = sorted(frozenset.intersection(*telling)) if telling else ["anything"]
        if trivial:
            reason = f"{' and '.join(trivial)} would pass on this workload too, so that passing says nothing"
            return VerdictStatus.UNCERTIFIABLE, reason
        return VerdictStatus.CORRECT, ""

    def _asked_for(self, outcomes: list[Outcome], on_case: Callable[[Case], None]) -> list[Outcome]:
        """What only runs where it is asked for, up to the first that fails."""
        found = [self._far_away(on_case)] if self._far else []
        if self._sanitizer is not None and all(outcome.status is VerdictStatus.CORRECT for outcome in found):
            found.append(self._sanitized(self._sanitizer, outcomes))
        return found

    def _far_away(self, on_case: Callable[[Case], None]) -> Outcome:
        """A case whose offsets pass 2^31; skipped, with the reason, where it cannot be run."""
        capture = self._trial.capture
        sizes, why = far_sizes(capture, self._runner.free_bytes) if self.has_gpu else ({}, "there is no GPU")
        case = Case(sizes or dict(capture.graph.sizes), "normal", self._reference.seed + FAR_SEED)
        if not why:
            on_case(case)
            try:
                outcome = self._outcome(self._prepared(case), once=True)
                if outcome is not None:
                    return outcome
                why = "the reference does not take it"
            except MtmcError as error:
                why = error.message
        return Outcome(case, VerdictStatus.CORRECT, (Check(FAR_CHECK, CheckStatus.SKIPPED, case.label, why),))

    def _sanitized(self, sanitizer: Sanitizer, outcomes: list[Outcome]) -> Outcome:
        """The smallest case, and one of values, without poisoned memory: what is filled is no uninitialised memory."""
        full = [o.case for o in outcomes if all(o.case.sizes.values()) and o.case.kind == VALUES and not o.case.layout]
        chosen = [min(full, key=self._elements), next((c for c in full if c.distribution == "uniform"), full[0])]
        cases = list(dict.fromkeys(repr(case) for case in chosen))
        requests = [self._asked(self._prepared(case)) for case in chosen[: len(cases)]]
        with on_gpu(self._reference.gpu):
            checks = tuple(sanitizer.checks(requests, chosen[-1].label, self._reference.hidden))
        wrong = next((check for check in checks if check.status is CheckStatus.FAILED), None)
        if wrong is None:
            return Outcome(chosen[-1], VerdictStatus.CORRECT, checks, launches=1)
        return Outcome(chosen[-1], VerdictStatus.INCORRECT, checks, f"{wrong.name}: {wrong.detail}", launches=1)

    def _shrunk(self, failed: Outcome) -> Outcome:
        """The same failure on smaller sizes, the largest halved first, as long as something fails."""
        variable = [n for n in self._trial.capture.variable_sizes if n in failed.case.sizes]
        done: set[str] = set()
        for _ in range(SHRINK_TRIES if failed.may_be_smaller else 0):
            left = [name for name in variable if failed.case.sizes[name] > 1 and name not in done]
            if not left:
                break
            name = max(left, key=lambda n: failed.case.sizes[n])
            case = replace(failed.case, sizes={**failed.case.sizes, name: failed.case.sizes[name] // 2})
            try:
                outcome = self._outcome(self._prepared(case))
            except MtmcError:
                outcome = None
            if outcome is None or outcome.status is not failed.status:
                done.add(name)
            else:
                failed = outcome
        return failed

    def _prepared(self, case: Case) -> Prepared:
        return self._reference.prepared(self._trial, case)

    def _outcome(
        self, prepared: Prepared, *, first: bool = False, drift: bool = False, once: bool = False
    ) -> Outcome | None:
        """What comes of a case; None where the reference does not take it (the workload itself it must)."""
        case = prepared.case
        try:
            prepared.done.result()
        except MtmcError as error:
            if first or (isinstance(error, WorkerFailed) and error.kind is FailureKind.CANCELLED):
                raise
            return None
        # The interpreter runs one program after the other: a repeat shows only what is kept between calls.
        repeats = int(not once and (first or self.has_gpu or self._elements(case) <= REPEATED_ELEMENTS))
        request = self._asked(prepared, decoy=first, drift=drift, repeats=repeats)
        results = self._reference.place_for_results()
        self._calls += 1 + max(repeats, MOST_CALLS * drift)
        try:
            with on_gpu(self._reference.gpu):
                seen = self._runner.call_untyped("measure.pair", request, self._limit)
            if seen["status"] == "ran":
                self._runner.take_results(results)
        except WorkerFailed as error:
            status = VerdictStatus.TIMEOUT if error.kind is FailureKind.TIMEOUT else VerdictStatus.CRASHED
            return Outcome(case, status, reason=error.message)
        except RequestError as error:
            if self._trial.is_full:
                raise
            return Outcome(case, VerdictStatus.RUNTIME_ERROR, reason=error.message)
        if seen["status"] != "ran":
            if FailureKind(seen["failure"]).is_gpu_failure:
                # A failed kernel leaves the process's GPU context unusable.
                self._runner.next()
            return Outcome(case, VerdictStatus(seen["status"]), reason=seen["reason"])
        if first and self._needs_kernel and not seen["launches"]:
            return Outcome(case, VerdictStatus.RUNTIME_ERROR, reason="no Triton kernel was launched")
        if self._pair.capture.uses_random and case.is_kernels_ground and not seen["launches"]:
            skipped = Check("values", CheckStatus.SKIPPED, case.label, "torch's own random numbers were drawn")
            return Outcome(case, VerdictStatus.CORRECT, (skipped,))
        return self._judged(prepared, seen, results, first=first, drift=drift)

    def _asked(
        self, prepared: Prepared, *, decoy: bool = False, drift: bool = False, repeats: int = 0
    ) -> dict[str, object]:
        """What the candidate's process is asked."""
        pair = {"target": to_json(self._pair.target), "source": self._pair.source}
        return {**prepared.request, **pair, "decoy": decoy, "drift": drift, "repeats": repeats}

    @property
    def _limit(self) -> float:
        return self._reference.run_seconds * (FULL_FACTOR if self._trial.few else 1)

    def _judged(self, prepared: Prepared, seen: dict[str, Any], results: Path, *, first: bool, drift: bool) -> Outcome:
        case = prepared.case
        # A NaN or an infinity alone tells a constant answer apart, though nothing was computed.
        tells = case.kind == VALUES and all(case.sizes.values()) and case.distribution not in VALUE_CASES
        shape = tuple(case.sizes.items())
        other = self._answers.get(shape, "")
        if tells and not other:
            self._answers[shape] = prepared.expected
        exact = is_exact(self._trial.capture)
        differing = seen["differing"] or []
        judged = self._reference.judged(prepared, results, exact=exact, other=other, differing=differing)
        checks = [Check(c["name"], CheckStatus(c["status"]), case.label, c["detail"]) for c in judged["checks"]]
        checks += seen_checks(seen, judged, case, decoy=first, drift=drift)
        wrong = next((check for check in checks if check.status is CheckStatus.FAILED), None)
        status = VerdictStatus.CORRECT if wrong is None else VerdictStatus.INCORRECT
        reason = f"{wrong.name}: {wrong.detail}" if wrong is not None else ""
        trivial = frozenset(judged["trivial"]) if tells else None
        errors = (judged["error"], judged["reference_error"])
        return Outcome(case, status, tuple(checks), reason, *errors, seen["launches"], trivial)

    def _reproduce(self, outcome: Outcome, reason: str, path: Path) -> str:
        # What the first call does not show may need as many as were made.
        request = {"target": to_json(self._pair.target), "path": str(path), "reason": reason, "calls": self._calls}
        return self._reference.reproduced(self._prepared(outcome.case), request)

    def _verdict(
        self, outcomes: list[Outcome], status: VerdictStatus, reason: str, text_checks: tuple[Check, ...] = ()
    ) -> Verdict:
        checks = (*text_checks, *(check for outcome in outcomes for check in outcome.checks))
        worst = max(outcomes, key=lambda outcome: outcome.error, default=None)
        errors = (worst.error, worst.reference_error) if worst is not None else (0.0, 0.0)
        return Verdict(status, checks, "gpu" if self.has_gpu else "interpreter", *errors, reason, self._notes(outcomes))

    def _notes(self, outcomes: list[Outcome]) -> tuple[str, ...]:
        capture = self._trial.capture
        notes = [self._trial.note] if self._trial.note else []
        if outcomes and dict(outcomes[0].case.sizes) != dict(capture.graph.sizes):
            shown = ", ".join(f"{name}={value}" for name, value in outcomes[0].case.sizes.items())
            notes.append(f"sizes reduced to {shown} for Triton's interpreter")
        if not capture.variable_sizes:
            notes.append("the workload names no sizes that vary, so only its own shapes were tried")
        if not any(a.tensor is not None and a.tensor.requires_grad for a in capture.workload.arguments):
            notes.append("the workload asks for no gradients, so none were compared")
        if not self._takes_empty:
            notes.append("inputs without elements were left out, as asked for")
        ran = [o for o in outcomes if any(check.status is not CheckStatus.SKIPPED for check in o.checks)]
        without = sum(o.case.is_kernels_ground and not o.launches for o in ran)
        if without and self._needs_kernel:
            notes.append(f"no kernel was launched in {without} of the cases")
        if outcomes:
            notes.append(f"isolation of the candidate: {self._runner.isolation.text}")
        if not self.has_gpu:
            notes.append("an interpreter run is no proof for a GPU: bfloat16 ran as float32, and races cannot show")
        return tuple(notes)
