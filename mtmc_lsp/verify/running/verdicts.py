"""The verdict on a candidate, from the outcomes of its cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import Check, Verdict, VerdictStatus
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.outcomes import CaseOutcome, library_share, run_notes
from mtmc_lsp.verify.trials import Trial


def verdict_of(
    candidate: Adapter,
    outcomes: Sequence[CaseOutcome],
    text_checks: tuple[Check, ...],
    trial: Trial,
    isolation: Isolation,
    *,
    first: Case | None,
    without_oracle: int,
    has_gpu: bool,
    status: VerdictStatus,
    reason: str,
    failure: FailureKind | None,
) -> Verdict:
    """The verdict with all checks, the largest error and the notes.

    Args:
        first: the case that is the workload itself.
        without_oracle: the number of cases without the float64 oracle.
    """
    checks = (*text_checks, *(check for outcome in outcomes for check in outcome.checks))
    worst = max(outcomes, key=lambda outcome: outcome.error)
    notes = run_notes(outcomes, first or outcomes[0].case, trial.capture.graph, without_oracle=without_oracle)
    notes += candidate.notes(trial, outcomes, isolation, interpreted=not has_gpu)
    return Verdict(
        status,
        checks,
        "gpu" if has_gpu else "interpreter",
        worst.error,
        worst.reference_error,
        reason,
        tuple(notes),
        failure=failure,
        library_share=library_share(outcomes),
    )


def ran_whole_workload(outcomes: Sequence[CaseOutcome], trial: Trial, sizes: Mapping[str, int]) -> bool:
    """Whether a case had the workload's sizes."""
    return any(
        outcome.ran
        and not outcome.is_sample
        and (trial.is_full or outcome.is_at_real_sizes)
        and dict(outcome.case.sizes) == dict(sizes)
        for outcome in outcomes
    )
