"""The start of an evolution: the best stored version of the target, as the first versions of the lineage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.app.stored_runs import fingerprint, in_current_text
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.run import KEPT, Candidate, RunResult, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.evolution import key_of
from mtmc_lsp.evolve.fitness import ratio_text, scores_of
from mtmc_lsp.evolve.lineage import Operator, Score, Setup, Version, VersionStatus
from mtmc_lsp.evolve.trials import TrialRequest, TrialRunner
from mtmc_lsp.explore.judgement import GOOD
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.compose import unified_diff


def best_stored(store: Store, target: OpenTarget, capture: Capture) -> RunResult | None:
    """The finished run of the target with the fastest version, for the same graph and machine; ``None`` if there is none.

    Without a GPU, runs are not compared: the newest counts.
    """
    best: tuple[float, RunResult] | None = None
    for record in store.runs():
        if (record.path, record.qualname) != (str(target.path), target.qualname) or record.status not in KEPT:
            continue
        config, result = store.config(record.id, RunConfig), store.result(record.id)
        is_same = config is not None and config.fingerprint == fingerprint(target, [capture])
        if result is None or not is_same or record.environment != capture.environment:
            continue
        eager = result.final.speedup.vs_eager if result.final.speedup is not None else None
        gain = eager.ratio if eager is not None else 0.0
        if best is None or gain > best[0]:
            best = gain, result
    return best[1] if best is not None else None


def accepted_steps(result: RunResult, target: OpenTarget, capture: Capture) -> list[Step]:
    """The accepted steps of a run, in the present text of the file."""
    steps = in_current_text(result.steps, target, capture)
    return [step for step in steps if step.status is StepStatus.ACCEPTED and step.candidate is not None]


def start_versions(root: Candidate, steps: Sequence[Step], runner: TrialRunner, setup: Setup) -> list[Version]:
    """The user's code and the versions of ``steps``, scored on every workload. A step that fails on one ends the path."""
    root_us = runner.baseline(root)
    memory, launches = runner.resources(root)
    scores = tuple(Score(us, 1.0) for us in root_us)
    versions = [
        Version(
            0,
            0,
            0,
            None,
            Operator.START,
            VersionStatus.KEPT,
            "where all versions come from",
            Outcome.CORRECT,
            candidate=root,
            key=key_of(root),
            scores=scores,
            memory=memory,
            launches=launches,
        )
    ]
    for step in steps:
        version = _version(versions[-1], step, runner, setup)
        versions.append(version)
        if not version.is_alive:
            break
    return versions


def _version(parent: Version, step: Step, runner: TrialRunner, setup: Setup) -> Version:
    candidate = step.candidate
    assert candidate is not None and parent.candidate is not None
    # The candidate's action holds the configuration that was chosen for it.
    action = replace(candidate.action or step.action, text=step.action.text)
    (result,) = runner.run([TrialRequest(parent.candidate, candidate)])
    version = Version(
        parent.number + 1,
        0,
        0,
        parent.number,
        Operator.START,
        VersionStatus.FAILED,
        result.detail,
        result.outcome,
        (action,),
        unified_diff(parent.candidate.source, candidate.source, "version"),
        candidate,
        key_of(candidate),
        memory=result.memory,
        launches=result.launches,
        remark=f"a step of run {setup.started_from}",
    )
    if result.outcome not in GOOD or len(result.workloads) != len(parent.scores):
        return version
    scores = scores_of(result, parent)
    estimated = "" if setup.has_gpu else ", estimated"
    reason = f"{ratio_text(scores)} the speed of version {parent.number}{estimated}"
    return replace(version, status=VersionStatus.KEPT, scores=scores, reason=reason)
