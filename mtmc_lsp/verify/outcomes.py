"""The outcome of one case, and of a whole verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.verify.cases import SPECIAL_DISTRIBUTIONS, Case
from mtmc_lsp.verify.error_limits import GRADIENT_OF, ElementCount, Measurement
from mtmc_lsp.verify.messages import CandidateAnswer, JudgeAnswer, WholeTargetAnswer

LARGER = "larger sizes"
"""The name of the check for sizes that the candidate refuses."""
REAL_SIZES = "workload's sizes"
"""The name of the check of a call at the workload's sizes under the interpreter."""
ALL_PROGRAMS = "all programs"
KERNEL_LAUNCHED = "kernel launched"
WHOLE_TARGET = "whole target"
OTHER_THREAD = "another thread launches its kernels, on a stream that does not wait for the caller's"
NOT_LAUNCHED = "no Triton kernel was launched on the workload's inputs"
LAUNCHED_BEFORE = (
    "no Triton kernel was launched, although an earlier call on the same tensors launched one: "
    "the candidate keeps results between calls"
)


MOST_NAMES = 3
"""Names of counts that a message contains."""


@dataclass(frozen=True)
class CaseOutcome:
    """The outcome of one case."""

    case: Case
    status: VerdictStatus
    checks: tuple[Check, ...] = ()
    reason: str = ""
    error: float = 0.0
    reference_error: float = 0.0
    launches: int = 0
    """Kernel launches of the judged call."""
    ran: bool = True
    """Whether the candidate ran on the case."""
    failure: FailureKind | None = None
    """The kind of failure if the candidate did not run to its end."""
    lacks_kernel: bool = False
    """Whether it failed because no kernel was launched."""
    compared: frozenset[str] = frozenset()
    undecided: frozenset[str] = frozenset()
    """Of the compared results, those for which zeros pass as well."""
    measurements: tuple[Measurement, ...] = ()
    """Of its floating-point results."""
    counts: tuple[ElementCount, ...] = ()
    """Of elements of its results that differ by more than rounding explains."""
    library_share: float | None = None
    """The part of the reference's arithmetic that torch's own operations do in the candidate; ``None`` if it was not counted."""
    host_reads: int = 0
    """How often a call read contents of tensors in Python, if that was counted."""
    is_elsewhere: bool = False
    """Whether the candidate ran in other surroundings than those of the verification."""
    needs_order: bool = False
    """Whether it failed in another order of programs than the usual one, in which it passes."""
    is_access_fault: bool = False
    """Whether a kernel accesses memory wrongly, which its results need not show."""
    programs: tuple[tuple[str, int, int], ...] = ()
    """For each launch the kernel's name, how many programs ran, and how many there are; empty if all ran."""
    program_seconds: float = 0.0
    """Processor time of the programs, if a sample of them was planned."""
    needs_all_programs: bool = False
    """Whether the results of a sample of programs cannot be compared, so that all ran."""
    uncompared: str = ""
    """Why the results of a sample of programs were not compared."""
    unread: str = ""
    """Which elements of an argument no program loads, if so; only where nothing was compared."""
    unused_kernels: tuple[str, ...] = ()
    """Names of kernels without which the results are the same."""
    waiting: tuple[str, ...] = ()
    """Names of kernels whose programs may wait for each other."""
    trivial: frozenset[str] | None = None
    """Answers without any computation that pass as well; ``None`` if the case cannot tell or earlier ones refuted all."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the candidate ran out of memory."""
        return self.failure is not None and self.failure.is_out_of_memory

    @property
    def is_correct(self) -> bool:
        """Whether no check failed."""
        return self.status is VerdictStatus.CORRECT

    @property
    def is_sample(self) -> bool:
        """Whether only some of the programs of a launch ran."""
        return any(ran < total for _, ran, total in self.programs)

    @property
    def is_at_real_sizes(self) -> bool:
        """Whether the case was a call at the workload's sizes after reduced ones."""
        return any(check.name == REAL_SIZES for check in self.checks)

    @property
    def may_be_smaller(self) -> bool:
        """Whether other sizes may show the same failure. This excludes failures that end the process."""
        has_results = self.status in (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR)
        return has_results and not self.lacks_kernel and not self.is_elsewhere


@dataclass(frozen=True)
class Verification:
    """The outcome of a verification."""

    verdict: Verdict
    reproduction: str = ""
    """Path of the file that reproduces a failure."""


def skipped(case: Case, name: str, why: str, *, ran: bool) -> CaseOutcome:
    """The outcome of a case that was not compared, although no check failed."""
    return CaseOutcome(case, VerdictStatus.CORRECT, (Check(name, CheckStatus.SKIPPED, case.label, why),), ran=ran)


def not_accepted(case: Case) -> CaseOutcome:
    """The outcome of a case on which the reference fails, for example because its sizes depend on each other."""
    return skipped(case, "reference", "the reference does not accept these inputs", ran=False)


def checked(case: Case, checks: Sequence[Check]) -> CaseOutcome:
    """The outcome of checks that need no comparison."""
    wrong = first_failed(checks)
    if wrong is None:
        return CaseOutcome(case, VerdictStatus.CORRECT, tuple(checks), ran=False)
    return CaseOutcome(case, VerdictStatus.INCORRECT, tuple(checks), f"{wrong.name}: {wrong.detail}", ran=False)


def failed_run(case: Case, status: VerdictStatus, reason: str, kind: FailureKind) -> CaseOutcome:
    """The outcome of a candidate that did not run to its end."""
    return CaseOutcome(case, status, reason=reason, ran=False, failure=kind)


def reveals_trivial(case: Case) -> bool:
    """Whether a case tells an answer without any computation from a right one.

    NaN and infinity tell a constant answer from the right one although nothing is computed. A factor of 0 hides the answer.
    """
    return case.expects_kernel and case.distribution not in SPECIAL_DISTRIBUTIONS and not case.numbers


def judged_outcome(
    case: Case,
    answer: CandidateAnswer,
    judged: JudgeAnswer,
    trivial: frozenset[str] | None,
    operations: float,
    *,
    is_many: bool,
    disabled_kernels: bool,
) -> CaseOutcome:
    """The outcome of a case whose results were compared; ``operations`` are those of the reference, or 0."""
    checks = [Check(check.name, check.status, case.label, check.detail) for check in judged.checks]
    checks += _observed(case, answer, judged, is_many=is_many, disabled_kernels=disabled_kernels)
    failed = first_failed(checks)
    status = VerdictStatus.CORRECT if failed is None else VerdictStatus.INCORRECT
    reason = f"{failed.name}: {failed.detail}" if failed is not None else ""
    inside = case.expects_kernel
    return CaseOutcome(
        case,
        status,
        tuple(checks),
        reason,
        judged.error,
        judged.reference_error,
        answer.launches,
        compared=frozenset(judged.compared) if inside else frozenset(),
        undecided=frozenset(judged.undecided) if inside else frozenset(),
        measurements=judged.measurements,
        counts=judged.counts,
        library_share=_share(answer.library_operations, operations),
        trivial=trivial,
        host_reads=answer.host_reads,
        programs=answer.programs,
        program_seconds=answer.program_seconds,
        needs_all_programs=answer.needs_all_programs,
        waiting=answer.waiting,
        unused_kernels=answer.unused_kernels,
    )


def _share(library: float | None, operations: float) -> float | None:
    return min(1.0, library / operations) if library is not None and operations else None


def with_refusal(text: str, refusal: str) -> str:
    """A sentence about a call without kernels, with the reason of the guard if it is known."""
    return f"{text}: {refusal}" if refusal else text


def first_failed(checks: Sequence[Check]) -> Check | None:
    """The first check that failed."""
    return next((check for check in checks if check.status is CheckStatus.FAILED), None)


def uncertain_because(outcomes: Sequence[CaseOutcome]) -> str:
    """Why passing proves nothing: an answer without any computation would pass as well. Empty if it proves something."""
    telling = [outcome.trivial for outcome in outcomes if outcome.trivial is not None]
    trivial = sorted(frozenset.intersection(*telling)) if telling else ["any answer"]
    if trivial:
        return f"{' and '.join(trivial)} would pass on this workload too, so passing proves nothing"
    undecided, decided = _undecided(outcomes), _decided(outcomes)
    if undecided and not (any(map(_is_gradient, decided)) and all(map(_is_gradient, undecided))):
        names = ", ".join(sorted(undecided))
        return f"{names}: on all inputs the reference's rounding errors are as large as the result, so zeros would pass as well"
    return ""


def zero_gradient_notes(outcomes: Sequence[CaseOutcome]) -> list[str]:
    """Gradients that are 0 but for rounding on all inputs, as that of a bias that a softmax cancels.

    Their errors are limited by the noise of the reference, and other gradients prove that the backward pass computes something.
    """
    if not all(outcome.is_correct for outcome in outcomes):
        return []
    return [
        f"{name} is 0 but for rounding on all inputs: no larger error than your code's is permitted, and zeros would pass"
        for name in sorted(_undecided(outcomes))
        if _is_gradient(name)
    ]


def _decided(outcomes: Sequence[CaseOutcome]) -> frozenset[str]:
    return frozenset[str]().union(*(outcome.compared - outcome.undecided for outcome in outcomes))


def _undecided(outcomes: Sequence[CaseOutcome]) -> frozenset[str]:
    return frozenset[str]().union(*(outcome.undecided for outcome in outcomes)) - _decided(outcomes)


def _is_gradient(name: str) -> bool:
    return name.startswith(GRADIENT_OF)


def library_share(outcomes: Sequence[CaseOutcome]) -> float | None:
    """The part of the reference's arithmetic that torch's own operations do in the candidate."""
    shares = (outcome.library_share for outcome in outcomes)
    return next((share for share in shares if share is not None), None)


def real_size_notes(outcomes: Sequence[CaseOutcome], graph: Graph) -> list[str]:
    """What did not run at the workload's sizes, and why."""
    notes = []
    for outcome in outcomes:
        at = f"at {outcome.case.sizes_text(graph)}"
        for check in outcome.checks:
            if check.name == REAL_SIZES and check.status is CheckStatus.SKIPPED:
                notes.append(f"{at} nothing was compared: {check.detail}")
            elif check.name == REAL_SIZES and check.detail != ALL_PROGRAMS:
                notes.append(f"{at} a sample ran: {check.detail}")
    return notes


def run_notes(outcomes: Sequence[CaseOutcome], first: Case, graph: Graph, *, without_oracle: int) -> list[str]:
    """What a run reduced or replaced.

    Args:
        first: the workload's case.
        without_oracle: the number of cases whose float64 oracle did not fit into memory.
    """
    notes = []
    if dict(first.sizes) != dict(graph.sizes):
        sizes = ", ".join(f"{name}={value}" for name, value in first.sizes.items())
        notes.append(f"sizes reduced to {sizes} for Triton's interpreter")
    if without_oracle:
        notes.append(
            f"float64 did not fit into memory in {without_oracle} of the cases: compared with the reference's results"
        )
    return [*notes, *zero_gradient_notes(outcomes), *_sample_notes(outcomes, graph)]


def _sample_notes(outcomes: Sequence[CaseOutcome], graph: Graph) -> list[str]:
    """In how many cases programs were left out. The check of the workload's sizes states its sample itself."""
    samples = [outcome for outcome in outcomes if outcome.is_sample and not outcome.is_at_real_sizes]
    if not samples:
        return []
    largest = max(samples, key=lambda outcome: sum(total for _, _, total in outcome.programs))
    name, ran, total = max(largest.programs, key=lambda launch: launch[2])
    sizes = ", ".join(f"{size}={value}" for size, value in largest.case.sizes.items())
    return [
        f"Triton's interpreter ran a sample of the programs in {len(samples)} of the cases, "
        f"the largest with {ran} of {total} programs of {name} ({sizes})"
    ]


def _observed(
    case: Case, answer: CandidateAnswer, judged: JudgeAnswer, *, is_many: bool, disabled_kernels: bool
) -> list[Check]:
    """The checks of the candidate process's observations besides the results."""

    def check(name: str, wrong: str) -> Check:
        return Check(name, CheckStatus.FAILED if wrong else CheckStatus.PASSED, case.label, wrong)

    checks = []
    if answer.differing is not None:
        checks.append(_repeated("many calls" if is_many else "determinism", case, answer, judged))
    if answer.counts:
        names = ", ".join(answer.counts[:MOST_NAMES])
        checks.append(check("many calls", f"the results change when {names} is as after many calls"))
    if answer.interference is not None:
        checks.append(check("separate results", answer.interference))
    if answer.reads:
        what = f"it reads {', '.join(answer.reads[:MOST_NAMES])}, which shows how it is verified and decides no result"
        checks.append(check("process information", what))
    running = f"{answer.threads} threads of the candidate still run after the call" if answer.threads else ""
    checks.append(check("no threads left", running))
    if answer.other_threads:
        checks.append(check("launched by the caller's thread", OTHER_THREAD))
    if answer.streams is not None:
        checks.append(check("order of streams", answer.streams))
    if disabled_kernels:
        unused = "the results are the same when its kernel launches do nothing, so no kernel computes them"
        checks.append(check("kernel's result used", "" if answer.uses_kernels else unused))
    if case.expects_kernel:
        status = CheckStatus.PASSED if answer.launches else CheckStatus.SKIPPED
        detail = "" if answer.launches else with_refusal("no kernel ran, only torch code", answer.refusal)
        checks.append(Check(KERNEL_LAUNCHED, status, case.label, detail))
    return checks


def _repeated(name: str, case: Case, answer: CandidateAnswer, judged: JudgeAnswer) -> Check:
    """Whether calls on the same inputs give the same results."""
    if judged.unexplained:
        return Check(name, CheckStatus.FAILED, case.label, "calls on the same inputs give different results")
    if answer.differing:
        detail = "the reference's results differ from call to call as well"
        return Check(name, CheckStatus.SKIPPED, case.label, detail)
    return Check(name, CheckStatus.PASSED, case.label)


def with_whole_target(verdict: Verdict, answer: WholeTargetAnswer) -> Verdict:
    """The verdict on a region with the result of calls of the whole target."""
    status = CheckStatus.SKIPPED if answer.skipped else CheckStatus.FAILED if answer.difference else CheckStatus.PASSED
    detail = answer.skipped or answer.difference or f"{answer.calls} calls of the whole target give the same results"
    checks = (*verdict.checks, Check(WHOLE_TARGET, status, "the workload", detail))
    if answer.difference:
        reason = f"{WHOLE_TARGET}: {answer.difference}, although the region alone is correct"
        return replace(verdict, status=VerdictStatus.INCORRECT, checks=checks, reason=reason)
    notes = (
        (*verdict.notes, f"the whole target was not compared: {answer.skipped}") if answer.skipped else verdict.notes
    )
    return replace(verdict, checks=checks, notes=notes)
