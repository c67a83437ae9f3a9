"""Results in words, the same on a terminal and in an editor."""

from __future__ import annotations

import datetime

from mtmc_lsp.core.chat import ModelUse
from mtmc_lsp.core.results import CompileReport, Conditions, Ratio, Timing, Verdict
from mtmc_lsp.core.run import RunResult, RunStatus


def verdict_line(verdict: Verdict) -> str:
    """The verdict in one line, with both errors."""
    how = "on the GPU" if verdict.mode == "gpu" else "by Triton's interpreter"
    if not verdict.is_correct:
        return f"{verdict.status.value} {how}: {verdict.reason}"
    errors = f"relative error {verdict.error:.1e}, the original's own is {verdict.reference_error:.1e}"
    return f"correct {how}: {len(verdict.checks)} checks, {errors}"


def report_lines(report: CompileReport) -> list[str]:
    """What the compiler made of each kernel; only what is known for its architecture."""
    return [f"{kernel.kernel} on {kernel.arch}: {kernel.summary}" for kernel in report.kernels if not kernel.error]


def ratio_text(ratio: Ratio | None) -> str:
    """``1.83x (1.79 to 1.86)``."""
    return f"{ratio.ratio:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-"


def timing_line(timing: Timing) -> str:
    """The version's own time, and how far it can be trusted."""
    noise = f"the same code against itself {timing.noise.low:.3f} to {timing.noise.high:.3f}"
    return (
        f"this version {timing.median_us:.1f} us, {timing.roofline:.0%} of the memory roofline, "
        f"{timing.samples} samples, {noise}"
    )


def pair_headline(timing: Timing) -> str:
    """A candidate's speed against the best baseline, which is named."""
    names = {"eager": "the reference", "compile": "the reference under torch.compile"}
    best = names.get(timing.best, f"the reference under torch.compile ({timing.best})")
    return f"{ratio_text(timing.against(timing.best))} the speed of {best}, the best baseline"


def timing_notes(timing: Timing) -> list[str]:
    """What one must know to judge a timing: where it is from, how the GPU was, and what short calls cost beside."""
    notes = []
    if timing.cached:
        when = datetime.datetime.fromtimestamp(timing.measured_at).strftime("%Y-%m-%d %H:%M")
        notes.append(
            f"cached: measured at {when} on the same code, inputs, GPU, driver and versions; --fresh measures again"
        )
    if timing.graph_us is not None:
        notes.append(
            f"a short call: {timing.graph_us:.1f} us from a CUDA graph, {timing.host_us:.1f} us of the host's time to launch"
        )
    compiled = [f"{b.name} {b.compile_seconds:.1f} s" for b in timing.baselines if b.compile_seconds is not None]
    if compiled:
        notes.append(f"compiling, which is in no time: {', '.join(compiled)}")
    notes += _conditions(timing.conditions) if timing.conditions is not None else []
    return notes


def _conditions(seen: Conditions) -> list[str]:
    notes = list(seen.notes)
    if seen.throttled:
        notes.append(
            f"the GPU was slowed down meanwhile ({', '.join(seen.throttled)}): trust the ratios, not the times"
        )
    if seen.others:
        notes.append(f"other programs held the GPU without computing: {', '.join(seen.others)}")
    if seen.sm_mhz:
        clocks = f"{seen.sm_mhz} MHz (at least {seen.least_sm_mhz}), memory {seen.memory_mhz} MHz"
        notes.append(f"clocks {clocks}, up to {seen.temperature_c} C, {seen.power_w:.0f} W")
    return notes


def headline(result: RunResult) -> str:
    """The outcome in one sentence."""
    if result.status is RunStatus.UNMEASURED:
        archs = list(dict.fromkeys(k.arch for s in result.steps if s.report for k in s.report.kernels))
        why = "the workload's device is the CPU" if result.environment.gpu else "no CUDA GPU"
        return f"unmeasured: {why}; verified by Triton's interpreter and compiled for {', '.join(archs)}"
    if result.status is RunStatus.IMPROVED and result.final.speedup is not None:
        best = min(result.baselines, key=lambda b: b.median_us if b.speedup else float("inf"))
        gain = ratio_text(result.final.speedup.vs_best)
        return f"improved: {gain} over {best.name}, the best baseline, on {result.environment.gpu}"
    if result.status is RunStatus.INCORRECT:
        return "incorrect: no step could be verified, so the file stays as it is"
    return "no gain: nothing was faster than what you have, so the file stays as it is"


def model_line(use: ModelUse) -> str:
    """What a language model was asked, and what it cost."""
    if use.replay_of:
        return f"{use.model}: answers of run {use.replay_of}, nothing was sent"
    cost = "" if use.cost is None else f", cost {use.cost:.4g}"
    counted = "" if use.counted else ", in part estimated"
    return (
        f"{use.model}: {use.requests} requests, {use.prompt_tokens} tokens sent, "
        f"{use.answer_tokens} received{counted}{cost}"
    )
