"""One-line descriptions of results, shared by the terminal and the editor."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from mtmc_lsp.capture.recorded_calls import RecordedTarget, argument_text
from mtmc_lsp.capture.recorded_launches import RecordedKernel, RecordedLaunch
from mtmc_lsp.core.chat import ModelUse
from mtmc_lsp.core.dtypes import short_dtype
from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import (
    OBSERVED,
    Check,
    CheckStatus,
    CompileReport,
    Conditions,
    Ratio,
    Speed,
    Timing,
    Verdict,
    VerdictStatus,
)
from mtmc_lsp.core.run import RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import TensorSpec, Workload

STATUS_WORDS = {
    VerdictStatus.INCORRECT: "incorrect",
    VerdictStatus.COMPILE_ERROR: "does not compile",
    VerdictStatus.RUNTIME_ERROR: "raises an error",
    VerdictStatus.TIMEOUT: "took too long",
    VerdictStatus.CRASHED: "crashed",
    VerdictStatus.UNCERTIFIABLE: "could not be verified",
}
"""Words for the verdicts on versions that were not verified."""
KILOBYTE = 1000


def joined(parts: Iterable[str]) -> str:
    """The parts that are not empty, with dots between them."""
    return " · ".join(part for part in parts if part)


def stage_with_time(stage: str, elapsed: float, budget: float | None) -> str:
    """The present stage of a run, with the seconds that it has taken and those that are left, if it has a budget."""
    left = f", {max(0.0, budget - elapsed):.0f} s left" if budget is not None else ""
    return f"{stage} ({elapsed:.0f} s{left})"


def verdict_line(verdict: Verdict) -> str:
    """One-line verdict with the candidate's error and the original code's error."""
    method = "on the GPU" if verdict.mode == "gpu" else "by Triton's interpreter"
    if not verdict.is_correct:
        return f"{STATUS_WORDS[verdict.status]} {method}: {verdict.reason}"
    shown = ""
    if verdict.library_share is not None and verdict.computed_by != "kernel":
        shown = f"; {verdict.computed_by}: operations outside of its kernels do {verdict.library_share:.0%} of the arithmetic"
    sizes = " at reduced sizes" if verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES else ""
    details = ", ".join(part for part in (checks_text(verdict.checks), error_text(verdict)) if part)
    return f"correct{sizes} {method}: {details}{shown}"


def checks_text(checks: Sequence[Check]) -> str:
    """How many checks passed, failed and could not run: ``all 191 checks passed, 2 could not run here``."""
    counts = {status: sum(check.status is status for check in checks) for status in CheckStatus}
    passed, failed, skipped = counts[CheckStatus.PASSED], counts[CheckStatus.FAILED], counts[CheckStatus.SKIPPED]
    left_out = f", {skipped} could not run here" if skipped else ""
    if failed:
        return f"{failed} of {passed + failed} checks failed{left_out}"
    return f"{'the only check' if passed == 1 else f'all {passed} checks'} passed{left_out}"


def error_text(verdict: Verdict) -> str:
    """The relative error of a version beside that of the user's code: ``relative error 3.1e-07 (your code 4.0e-07)``.

    Empty if no error was measured.
    """
    if verdict.mode == OBSERVED:
        return ""
    return f"relative error {verdict.error:.1e} (your code {verdict.reference_error:.1e})"


def microseconds(us: float) -> str:
    """A time with as many digits as it is worth: ``1160 us``, ``51.2 us``."""
    return f"{us:.0f} us" if us >= 100 else f"{us:.1f} us"


def size_text(amount: float) -> str:
    """An amount of memory: ``512 bytes``, ``12.6 MB``."""
    unit = "bytes"
    if amount < KILOBYTE:
        return f"{amount:.0f} bytes"
    for larger in ("kB", "MB", "GB"):
        if round(amount) >= KILOBYTE:
            amount, unit = amount / KILOBYTE, larger
    return f"{amount:.3g} {unit}"


def peak_of(amount: int | None) -> str:
    """The peak memory of a call, for tables; empty if it was not measured."""
    return "" if amount is None else size_text(amount)


def memory_text(more_bytes: int) -> str:
    """The peak memory of a call compared with the user's code: ``0 bytes more memory``, ``12.6 MB less memory``."""
    return f"{size_text(abs(more_bytes))} {'more' if more_bytes >= 0 else 'less'} memory"


def peak_text(timing: Timing) -> str:
    """The peak memory of a call and of the user's code: ``48 MB, 160 MB less than your code``; empty if it was not measured."""
    more_bytes = timing.more_bytes("eager")
    if timing.peak_bytes is None:
        return ""
    if more_bytes is None:
        return size_text(timing.peak_bytes)
    compared = f"{size_text(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} than your code"
    return f"{size_text(timing.peak_bytes)}, {compared if more_bytes else 'as much as your code'}"


def inputs_text(workload: Workload) -> str:
    """The tensors of a workload with their sizes: ``x f32[4,1024,1024]``; where they come from if the file makes them."""
    sizes = workload.sizes

    def shape(spec: TensorSpec) -> str:
        return ",".join(str(size.value(sizes) if {*size.symbols()} <= {*sizes} else size) for size in spec.shape)

    tensors = [f"{name} {short_dtype(spec.dtype)}[{shape(spec)}]" for name, spec in workload.tensors.items()]
    return ", ".join(tensors) if tensors else f"inputs from {workload.source.value}"


def step_numbers(step: Step) -> str:
    """What a timed step gained: ``1.25x faster than before (1.24 to 1.26) · 100.0 -> 80.0 us · 4 MB less memory``; its reason
    if it is a base."""
    timing = step.timing
    previous = timing.baseline("previous") if timing is not None else None
    before = previous or (timing.baseline("eager") if timing is not None else None)
    more_bytes = timing.more_bytes("eager") if timing is not None else None
    memory = memory_text(more_bytes) if more_bytes else ""
    if timing is None or before is None or before.speedup is None or before.speedup.ratio < 1.0:
        return joined((step.reason, memory))
    name = "the step before" if previous is not None else "your code"
    ratio = before.speedup
    gain = f"{ratio.ratio:.2f}x faster than {name} ({ratio.low:.2f} to {ratio.high:.2f})"
    return joined((gain, f"{microseconds(before.median_us)} -> {microseconds(timing.median_us)}", memory))


def outcome_text(step: Step) -> str:
    """What came of a step: what it gained and how exact it is, or why it was not kept."""
    verdict = step.verdict
    if step.failure is FailureKind.DEADLINE:
        return "the budget ended before it was verified"
    if step.status is not StepStatus.ACCEPTED:
        is_judged = verdict is not None and not verdict.is_correct and verdict.reason == step.reason
        return verdict_line(verdict) if is_judged and verdict is not None else step.reason
    if verdict is None:
        return step.reason
    rounding = "rounding differs, within the limit" if step.action.changes_rounding else ""
    if step.timing is not None:
        return joined((step_numbers(step), error_text(verdict), rounding))
    small = " on small inputs" if verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES else ""
    passed = sum(check.status is CheckStatus.PASSED for check in verdict.checks)
    correct = f"same results as your code{small} in Triton's interpreter ({passed} checks)"
    return joined((correct, error_text(verdict), rounding))


def times_text(result: RunResult) -> str:
    """The time of a call before and after a run, its part of the roofline and its memory; empty if nothing got faster."""
    timings = [step.timing for step in result.steps if step.status is StepStatus.ACCEPTED and step.timing is not None]
    if not timings or result.status is not RunStatus.IMPROVED:
        return ""
    last = timings[-1]
    eager = last.baseline("eager")
    before = f"{microseconds(eager.median_us)} -> " if eager is not None and eager.speedup is not None else ""
    times = f"{before}{microseconds(last.median_us)} per call"
    more_bytes = last.more_bytes("eager")
    return joined((times, f"{last.roofline:.0%} of the roofline", memory_text(more_bytes) if more_bytes else ""))


def best_line(step: Step) -> str:
    """The speedup of the best version so far, for the line that a run shows while it goes on."""
    eager = step.timing.against("eager") if step.timing is not None else None
    return f"best {eager.ratio:.2f}x" if eager is not None else f"step {step.index} kept"


def step_counts(steps: Sequence[Step]) -> str:
    """How many steps of a run were kept, and what came of the others: ``3 steps kept, 1 not faster, 1 failed``.

    Steps of a search tree that were faster than the version before, but not part of the fastest, are ``on other branches``.
    """
    counts = {status: sum(step.status is status for step in steps) for status in StepStatus}
    kept = counts[StepStatus.ACCEPTED]
    branches = sum(step.is_alternative for step in steps)
    slower = counts[StepStatus.REJECTED] - branches
    parts = [f"{kept} {'step' if kept == 1 else 'steps'} kept"]
    parts += [f"{branches} on other branches"] if branches else []
    parts += [f"{slower} not faster"] if slower else []
    parts += [f"{counts[StepStatus.FAILED]} failed"] if counts[StepStatus.FAILED] else []
    return ", ".join(parts)


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


def launches_summary(kernel: RecordedKernel) -> str:
    """``12 launches, 2 variants``: how the user's program launches a kernel."""
    kinds = f"{len(kernel.launches)} variants" if len(kernel.launches) > 1 else "all the same"
    return f"{kernel.count} launches, {kinds}"


def launch_text(launch: RecordedLaunch) -> str:
    """The grid and the arguments of a launch, or why it cannot be repeated."""
    if launch.unusable:
        return launch.unusable
    grid = ",".join(map(str, launch.grid.grid))
    options = [f"{name}={value}" for name, value in launch.grid.options.items()]
    return " ".join([f"grid={grid}", *map(argument_text, launch.arguments), *options])


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


def is_unfinished(result: RunResult) -> bool:
    """Whether the budget ended before any version was judged, so that nothing is known about the target."""
    return result.status is RunStatus.NO_GAIN and are_unfinished(result.steps)


def are_unfinished(steps: Sequence[Step]) -> bool:
    """Whether a step had no time to be verified, and none was verified or slower."""
    late = [step for step in steps if step.failure is FailureKind.DEADLINE]
    # A step that is fast enough is timed before it is verified.
    was_slower = any(step.timing is not None for step in steps if step not in late)
    is_verified = any(step.verdict is not None and step.verdict.is_correct for step in steps)
    return bool(late) and not was_slower and not is_verified


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
    if is_unfinished(result):
        return "unfinished: the budget ended before a version was verified, so the file is unchanged"
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
