"""One-line descriptions of results, shared by the terminal and the editor."""

from __future__ import annotations

import datetime

from mtmc_lsp.capture.recorded_calls import RecordedTarget
from mtmc_lsp.core.chat import ModelUse
from mtmc_lsp.core.results import CompileReport, Conditions, Ratio, Speed, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import RunResult, RunStatus


def stage_with_time(stage: str, elapsed: float, budget: float) -> str:
    """The present stage of a run, with the seconds that it has taken and those that are left."""
    return f"{stage} ({elapsed:.0f} s, {max(0.0, budget - elapsed):.0f} s left)"


def verdict_line(verdict: Verdict) -> str:
    """One-line verdict with the candidate's error and the original code's error."""
    method = "on the GPU" if verdict.mode == "gpu" else "by Triton's interpreter"
    if not verdict.is_correct:
        return f"{verdict.status.value} {method}: {verdict.reason}"
    errors = f"relative error {verdict.error:.1e} (original code: {verdict.reference_error:.1e})"
    shown = ""
    if verdict.library_share is not None and verdict.computed_by != "kernel":
        shown = f"; {verdict.computed_by}: torch's own operations do {verdict.library_share:.0%} of the arithmetic"
    sizes = " at reduced sizes" if verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES else ""
    return f"correct{sizes} {method}: {len(verdict.checks)} checks, {errors}{shown}"


def report_lines(report: CompileReport) -> list[str]:
    """Compiler statistics of each kernel, as far as they are known for its architecture."""
    return [f"{kernel.kernel} on {kernel.arch}: {kernel.summary}" for kernel in report.kernels if not kernel.error]


def ratio_text(ratio: Ratio | None) -> str:
    """``1.83x (1.79 to 1.86)``."""
    return f"{ratio.ratio:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-"


def speedup_text(timing: Timing) -> str:
    """``1.83x (1.79 to 1.86) over eager, 1.10x over torch.compile``; empty if eager mode could not run."""
    eager, compiled = timing.against("eager"), timing.against("compile")
    parts = [f"{ratio_text(eager)} over eager"] if eager is not None else []
    parts += [f"{compiled.ratio:.2f}x over torch.compile"] if compiled is not None else []
    return ", ".join(parts)


def recording_summary(target: RecordedTarget) -> str:
    """``12 calls, 2 variants, compiled``: how the user's program calls a target."""
    if not target.calls:
        return "only inside code of torch.compile, where its inputs are not known"
    kinds = f"{len(target.calls)} variants" if len(target.calls) > 1 else "all the same"
    return f"{target.count} calls, {kinds}{', compiled' if target.is_compiled else ''}"


def timing_line(timing: Timing) -> str:
    """Time of the version, and how reliable the measurement is."""
    noise = f"A/A control {timing.noise.low:.3f} to {timing.noise.high:.3f}"
    return (
        f"this version {timing.median_us:.1f} us, {timing.roofline:.0%} of the memory roofline, "
        f"{timing.samples} samples, {noise}"
    )


def pair_headline(timing: Timing) -> str:
    """Speed of a candidate compared with the best baseline."""
    names = {"eager": "the reference", "compile": "the reference under torch.compile"}
    best = names.get(timing.best, f"the reference under torch.compile ({timing.best})")
    return f"{ratio_text(timing.against(timing.best))} the speed of {best}, the best baseline"


def timing_notes(timing: Timing) -> list[str]:
    """Facts needed to judge a timing: cached or not, CUDA graph time, compile time, and the state of the GPU."""
    notes = []
    if timing.cached:
        when = datetime.datetime.fromtimestamp(timing.measured_at).strftime("%Y-%m-%d %H:%M")
        notes.append(
            f"cached: measured at {when} on the same code, inputs, GPU, driver and versions; use --fresh to measure again"
        )
    if timing.graph_us is not None:
        notes.append(
            f"a short call: {timing.graph_us:.1f} us in a CUDA graph, {timing.host_us:.1f} us of host time per launch"
        )
    compiled = [f"{b.name} {b.compile_seconds:.1f} s" for b in timing.baselines if b.compile_seconds is not None]
    if compiled:
        notes.append(f"compile time, not included above: {', '.join(compiled)}")
    notes += _conditions(timing.conditions) if timing.conditions is not None else []
    return notes


def _conditions(conditions: Conditions) -> list[str]:
    notes = list(conditions.notes)
    if conditions.throttled:
        notes.append(
            f"the GPU was throttled ({', '.join(conditions.throttled)}): the ratios are reliable, the times are not"
        )
    if conditions.others:
        notes.append(f"other idle programs on the GPU: {', '.join(conditions.others)}")
    if conditions.sm_mhz:
        clocks = f"{conditions.sm_mhz} MHz (at least {conditions.least_sm_mhz}), memory {conditions.memory_mhz} MHz"
        notes.append(f"clocks {clocks}, up to {conditions.temperature_c} C, {conditions.power_w:.0f} W")
    return notes


def headline(result: RunResult) -> str:
    """The outcome of a run, compared with what decides and with ``torch.compile``; first what is faster."""
    parts = [_outcome(result), compiler_line(result)]
    if _compiler_is_faster(result):
        parts.reverse()
    return "; ".join(part for part in parts if part)


def compiler_line(result: RunResult) -> str:
    """How ``torch.compile`` compares with the last version, or why it was not timed; empty if the outcome names it."""
    compiled = next((b for b in result.baselines if b.name == "compile"), None)
    if compiled is None:
        return ""
    if compiled.speedup is None:
        return compiled.note
    if result.baseline != "eager" and result.status is RunStatus.IMPROVED:
        return ""
    seconds = f", which compiles in {compiled.compile_seconds:.1f} s" if compiled.compile_seconds is not None else ""
    offer = result.offer
    if offer is not None and offer.recompilations:
        times = "once" if offer.recompilations == 1 else f"{offer.recompilations} times"
        seconds += f" and {times} again for other sizes ({offer.recompile_seconds:.1f} s)"
    ratio = compiled.speedup.ratio
    if compiled.speed is Speed.SLOWER:
        return f"torch.compile alone is {1 / ratio:.2f}x as fast as this version{seconds}"
    if compiled.speed is Speed.FASTER:
        return f"{ratio_text(compiled.speedup)} over torch.compile{seconds}"
    return f"as fast as torch.compile: {ratio_text(compiled.speedup)}{seconds}"


def _compiler_is_faster(result: RunResult) -> bool:
    return any(b.name == "compile" and b.speed is Speed.SLOWER for b in result.baselines)


def _outcome(result: RunResult) -> str:
    if result.status is RunStatus.UNMEASURED:
        archs = list(dict.fromkeys(k.arch for s in result.steps if s.report for k in s.report.kernels))
        reason = "the workload's device is the CPU" if result.environment.gpu else "no CUDA GPU"
        return f"unmeasured: {reason}; verified by Triton's interpreter and compiled for {', '.join(archs)}"
    if result.status is RunStatus.IMPROVED and result.final.speedup is not None:
        speedup = result.final.speedup
        gains = {
            "eager": (speedup.vs_eager, "your code in eager mode"),
            "compile": (speedup.vs_compile, "your code under torch.compile"),
            "best": (speedup.vs_best, "the best baseline"),
        }
        # If the baseline that decides was not timed, the version is faster than eager mode.
        gain, name = gains[result.baseline if gains[result.baseline][0] is not None else "eager"]
        return f"improved: {ratio_text(gain)} over {name} on {result.environment.gpu}"
    if result.status is RunStatus.INCORRECT:
        return "incorrect: no step passed verification, so the file is unchanged"
    return "no gain: no version was faster than your code, so the file is unchanged"


def model_line(use: ModelUse) -> str:
    """Language model usage and cost."""
    if use.replay_of:
        return f"{use.model}: reused the answers of run {use.replay_of}, nothing was sent"
    cost = "" if use.cost is None else f", cost {use.cost:.4g}"
    counted = "" if use.counted else ", partly estimated"
    return (
        f"{use.model}: {use.requests} requests, {use.prompt_tokens} tokens sent, "
        f"{use.answer_tokens} received{counted}{cost}"
    )
