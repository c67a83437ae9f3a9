"""The result of a run: the delivered version, and whether it is faster than the baseline that decides."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import BaselineTime, Speed, Timing, VerdictStatus
from mtmc_lsp.core.run import (
    SCHEMA,
    Candidate,
    CompilerOffer,
    Final,
    RunResult,
    RunStatus,
    Speedup,
    Step,
    StepStatus,
)
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.components import SearchComponents
from mtmc_lsp.source.compose import unified_diff
from mtmc_lsp.source.torch_compile.decorator import add_compile_decorator
from mtmc_lsp.tuning.schedule_cost import estimated_work


def is_faster(timing: Timing, baseline: str) -> bool:
    """Whether a version is faster than a baseline beyond noise; than eager mode if the baseline could not run."""
    speed = timing.speed_over(baseline) or timing.speed_over("eager")
    return speed is Speed.FASTER


def speedup_of(timing: Timing) -> Speedup:
    """The speedups of a timing."""
    return Speedup(timing.against("eager"), timing.against("compile"), timing.against("best"))


def compiler_offer(capture: Capture, source: str, timing: Timing) -> CompilerOffer | None:
    """``torch.compile`` as a decorator in the user's file; None if it cannot be added there.

    Args:
        source: the user's file without generated code.
        timing: of the last version, with the compiled code.
    """
    target, compiled = capture.workload.target, timing.baseline("compile")
    changed = add_compile_decorator(source, target.qualname)
    if changed is None or compiled is None or target.region is not None:
        # Compiling the whole target was not measured if only a region of it is optimised.
        return None
    diff = unified_diff(source, changed, target.path.rpartition("/")[2])
    return CompilerOffer(changed, diff, compiled.compile_seconds or 0.0)


def run_result(
    capture: Capture,
    components: SearchComponents,
    *,
    root: Candidate,
    best: Candidate,
    timing: Timing | None,
    steps: Sequence[Step],
    run_id: str,
    source_hash: str,
    seconds: float,
    offer: CompilerOffer | None = None,
    untimed: Sequence[BaselineTime] = (),
    end_reason: str = "",
) -> RunResult:
    """The document of a run.

    Args:
        root: the user's file without generated code.
        best: the last accepted version.
        timing: of ``best``.
        seconds: wall time of the run.
        offer: ``torch.compile`` instead of the kernels.
        untimed: the baselines that could have been timed, with the reason why they were not; those in ``timing`` are left out.
        end_reason: why no further step was tried.
    """
    status = _status(steps, timing, components)
    kept = best if status in (RunStatus.IMPROVED, RunStatus.UNMEASURED) else root
    path = capture.workload.target.path.rpartition("/")[2]
    final = Final(
        kept.source,
        unified_diff(root.source, kept.source, path),
        speedup_of(timing) if timing is not None else None,
        timing.roofline if timing is not None else None,
    )
    device = components.measurer.device()
    return RunResult(
        schema=SCHEMA,
        id=run_id,
        target=capture.workload.target,
        workload=capture.workload,
        environment=capture.environment,
        baselines=_baselines(timing, untimed),
        steps=tuple(steps),
        final=final,
        status=status,
        seconds=seconds,
        source_hash=source_hash,
        baseline=components.baseline,
        offer=offer,
        device=device,
        work=estimated_work(capture.graph, root.schedule, device),
        end_reason=end_reason,
    )


def _baselines(timing: Timing | None, untimed: Sequence[BaselineTime]) -> tuple[BaselineTime, ...]:
    timed = tuple(b for b in (timing.baselines if timing else ()) if b.name != "previous")
    names = {baseline.name for baseline in timed}
    return (*timed, *(baseline for baseline in untimed if baseline.name not in names))


def _status(steps: Sequence[Step], timing: Timing | None, components: SearchComponents) -> RunStatus:
    if any(step.status is StepStatus.ACCEPTED for step in steps):
        if not components.has_gpu:
            return RunStatus.UNMEASURED
        faster = timing is not None and is_faster(timing, components.baseline)
        return RunStatus.IMPROVED if faster else RunStatus.NO_GAIN
    verdicts = [step.verdict for step in steps if step.verdict is not None]
    # A version that is uncertifiable, ran out of memory or ran out of time is not known to be incorrect.
    judged = [
        verdict
        for verdict in verdicts
        if verdict.status is not VerdictStatus.UNCERTIFIABLE
        and not verdict.is_out_of_memory
        and verdict.failure is not FailureKind.DEADLINE
    ]
    # A version that was too slow to be verified gave the right results while it was timed.
    agreed = any(step.status is StepStatus.REJECTED and step.timing is not None for step in steps)
    all_incorrect = bool(judged) and not agreed and not any(verdict.is_correct for verdict in judged)
    return RunStatus.INCORRECT if all_incorrect else RunStatus.NO_GAIN
