"""Stores a repair as a run, so that it is applied and undone like any other."""

from __future__ import annotations

import hashlib

from mtmc_lsp.app.kernels.repair import RepairReport
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.app.kernels.tools import KernelTools
from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.app.stored_runs import open_store
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.results import OBSERVED, Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.run import ORIGINAL, SCHEMA, Candidate, Final, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.source.files import unified_diff


def store_repair(session: KernelSession, report: RepairReport, seconds: float) -> RunResult | None:
    """Store the repairs of a report as the steps of a run; None if nothing was repaired."""
    if not report.is_repaired:
        return None
    opened, tools = report.target.opened, KernelTools(session)
    verdict = report.result.verdict or _observed(report)
    steps, text = list[Step](), opened.text
    for index, item in enumerate(report.result.repairs, 1):
        before, text = text, item.applied(text)
        params: dict[str, object] = {"change": "repair"}
        action = MacroAction(ActionKind.EDIT, (), (item.line, item.line), params, report.summary, text=item.title)
        digest, parent = (hashlib.sha256(data).hexdigest()[:12] for data in (text, before))
        candidate = Candidate(digest, parent, action, text.decode(), None, {ORIGINAL: opened.text.decode()})
        diff = unified_diff(before.decode(), text.decode(), opened.path.name)
        steps.append(Step(index, action, StepStatus.ACCEPTED, "it removes a fault", diff, candidate, verdict))
    with open_store(opened.path) as store:
        run_id = store.begin(str(opened.path), opened.qualname, opened.source_hash, tools.environment)
        store.add_config(run_id, RunConfig("source", "edits", opened.settings))
        for step in steps:
            store.add_step(run_id, step)
        result = RunResult(
            schema=SCHEMA,
            id=run_id,
            target=opened.definition,
            workload=report.target.workload,
            environment=tools.environment,
            baselines=(),
            steps=tuple(steps),
            final=Final(text.decode(), report.diff, None, None),
            status=RunStatus.UNMEASURED,
            seconds=seconds,
            source_hash=opened.source_hash,
        )
        store.finish(result)
    return result


def _observed(report: RepairReport) -> Verdict:
    """The verdict of the cases, for a repair without a reference."""
    checks = tuple(
        Check("faults", CheckStatus.PASSED if trace.is_sound else CheckStatus.FAILED, trace.case.text)
        for trace in report.result.traces
        if not trace.refusal
    )
    return Verdict(VerdictStatus.CORRECT_AT_REDUCED_SIZES, checks, OBSERVED)
