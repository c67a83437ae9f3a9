"""When a tried step is accepted: it is faster than the version before, as fast with less memory, or a base for later steps.

A version that is delivered is timed twice; :func:`clearer_timing` says which timing counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import CompileReport, Speed, Timing
from mtmc_lsp.core.run import Step, StepStatus

BASE_RATIO, WHOLE_RATIO, TRAINED_RATIO = 0.9, 0.75, 0.2
"""A first kernel with at least this ratio of eager time to its time is accepted as a base to tune. The second ratio is for a
kernel that computes the whole target, since no other first step can be a better base. The third one is for targets with a
backward pass: what has no kernel yet runs as the single operations of the gradients' formulas, which is slower than torch's
fused backward operators (0.28x for a layer norm and 0.41x for DPO after the first step, on an H200)."""
LESS_MEMORY = 0.9
"""A step that is as fast as the version before is accepted if a call allocates at most this share of that version's memory."""

MORE_MEMORY, LEAST_MEMORY = 1.02, 2 << 20
"""The ratio of peaks from which a step says that it needs more memory than the user's code, and the least difference, which is a
piece of memory of torch's allocator."""


def _more_memory(timing: Timing) -> str:
    """How much more memory a version needs than the user's code, to add to a reason; empty if it does not."""
    more, peak = timing.more_bytes("eager") or 0, timing.peak_bytes or 0
    if more < LEAST_MEMORY or peak <= MORE_MEMORY * (peak - more):
        return ""
    return f"; it needs {more / 1e6:.1f} MB more memory than your code"


def base_ratio(graph: Graph, region: Collection[str]) -> float:
    """The ratio of eager time to its time from which a first kernel on a region is a base to tune."""
    if graph.backward is not None:
        return TRAINED_RATIO
    return WHOLE_RATIO if {node.name for node in graph.nodes} <= set(region) else BASE_RATIO


def clearer_timing(trial: Timing | None, final: Timing) -> Timing:
    """The timing that counts for a version that was timed twice.

    The final timing counts, unless it is too noisy to compare the version with eager mode and the trial was not: on a busy
    host, short calls vary by more than they gain. Then the trial counts, with the further baselines of the final timing.
    Times of these baselines follow from their paired ratio, because the two timings ran at different speeds.
    """
    if trial is None or trial.speed_over("eager") in (None, Speed.AMBIGUOUS):
        return final
    if final.speed_over("eager") is not Speed.AMBIGUOUS or trial.spread >= final.spread:
        return final
    further = tuple(
        replace(baseline, median_us=trial.median_us * baseline.speedup.ratio) if baseline.speedup else baseline
        for baseline in final.baselines
        if trial.baseline(baseline.name) is None
    )
    timed = [b for b in (*trial.baselines, *further) if b.speedup is not None and b.name != "previous"]
    best = min(timed, key=lambda baseline: baseline.median_us).name
    return replace(trial, baselines=(*trial.baselines, *further), best=best)


class Judge:
    """Accepts steps by their times, or without a GPU by predictions."""

    def unmeasured(self, step: Step, report: CompileReport) -> Step:
        """The verdict on a verified step that cannot be timed."""
        archs = ", ".join(dict.fromkeys(kernel.arch for kernel in report.kernels))
        if step.action.expected.saved_us <= 0 and step.action.expected.saved_memory <= 0:
            return replace(step, status=StepStatus.REJECTED, reason="verified, but the cost model predicts no gain")
        reason = f"verified by Triton's interpreter, compiled for {archs}; not timed: no GPU"
        return replace(step, status=StepStatus.ACCEPTED, reason=reason)

    def timed(self, step: Step, timing: Timing, *, base: float) -> Step:
        """The verdict on a timed step.

        Args:
            base: the ratio from which a first kernel is a base to tune, as of :func:`base_ratio`.
        """
        against = "previous" if timing.against("previous") is not None else "eager"
        ratio = timing.against(against)
        if ratio is None:
            return replace(
                step,
                reason="your code could not be timed, so there is no time to compare with; `mtmc profile` shows why",
            )
        name = "the step before" if against == "previous" else "your code"
        interval = (
            f"{ratio.ratio:.2f}x the speed of {name} ({ratio.low:.2f} to {ratio.high:.2f}), {timing.median_us:.1f} us"
            f"{_more_memory(timing)}"
        )
        if ratio.low > max(1.0, timing.noise.high):
            return replace(step, status=StepStatus.ACCEPTED, reason=interval)
        less = -(timing.more_bytes(against) or 0)
        peak = timing.peak_bytes or 0
        if ratio.high >= 1.0 and less > 0 and peak <= LESS_MEMORY * (peak + less):
            reason = f"{interval}; accepted for its memory: {less / 1e6:.1f} MB less"
            return replace(step, status=StepStatus.ACCEPTED, reason=reason)
        kernels_us = timing.graph_us
        if against == "eager" and kernels_us is not None and kernels_us < timing.median_us * ratio.ratio:
            reason = f"{interval}; its kernels alone take {kernels_us:.1f} us: kept as a base for a CUDA graph"
            return replace(step, status=StepStatus.ACCEPTED, reason=reason)
        if ratio.ratio >= base and against == "eager":
            # At its end the run must still be faster.
            return replace(step, status=StepStatus.ACCEPTED, reason=f"{interval}; kept as a base to tune")
        return replace(step, status=StepStatus.REJECTED, reason=f"not faster: {interval}")
