"""Tables for the summary of ``mtmc bench``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtmc_lsp.app.bench.summary import Means, Score, Summary
from mtmc_lsp.app.bench.verified import VerifiedScore

MAX_REASONS, MAX_NAMES, MAX_OPERATIONS = 20, 4, 20


def show_summary(out: Console, summary: Summary) -> None:
    """Show correctness and speedups by level, then the unsolved problems with reasons."""
    out.print()
    for build in summary.builds:
        out.print(Text(build, style="dim"))
    if len(summary.builds) > 1:
        out.print(Text("these results come from more than one build: their means mix them", style="yellow"))
    for environment in summary.environments:
        out.print(Text(environment, style="dim"))
    if len(summary.environments) > 1:
        out.print(Text("these results come from more than one machine; their means are mixed", style="yellow"))
    out.print(_correctness(summary.scores))
    if any(means.count for score in summary.scores for means in score.means):
        out.print(Text("\nas delivered: what the files get; a file that stays as it was counts as eager", style="bold"))
        out.print(_delivered(summary.scores))
        out.print(Text("\nverified on the way: the last verified version, delivered or not", style="bold"))
        out.print(_speedups(summary.scores))
        out.print(Text("  fast_1 and fast_2 are fractions of all problems", style="dim"))
    else:
        out.print(Text("  nothing was timed, so there are no speedups", style="dim"))
    for note, count in summary.untimed.items():
        out.print(Text(f"  {count} of {summary.scores[0].problems} problems: {note}", style="dim"))
    _show_unsolved(out, summary)


def show_verified(out: Console, scores: Sequence[VerifiedScore]) -> None:
    """Show what KernelBench-Verified's evaluator measured, by level."""
    names = ("level", "problems", "delivered", "correct", "over eager", "over the best", "slower", "less memory")
    table = Table(*names, box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for score in scores:
        counts = [str(count) for count in (score.problems, score.delivered, score.correct)]
        ratios = [
            "-" if ratio is None else f"{ratio:.2f}x" for ratio in (score.over_eager, score.over_best, score.memory)
        ]
        table.add_row(score.level, *counts, *ratios[:2], str(score.slower), ratios[2])
    out.print(Text("\nKernelBench-Verified's evaluation, with TF32", style="bold"))
    out.print(table)
    out.print(Text("  over eager and less memory: a file that stays as it was counts as 1", style="dim"))


def _correctness(scores: tuple[Score, ...]) -> Table:
    statuses = list(dict.fromkeys(status for score in scores for status in score.statuses))
    table = Table("level", "problems", "answered", "correct", *statuses, "median time", box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for score in scores:
        shares = [_share(count, score.problems) for count in (score.answered, score.correct)]
        counts = [str(score.statuses.get(status, 0)) for status in statuses]
        seconds = f"{score.median_seconds:.1f} s"
        table.add_row(score.level or "all", str(score.problems), *shares, *counts, seconds)
    return table


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})" if total else str(count)


def _delivered(scores: tuple[Score, ...]) -> Table:
    names = [means.baseline for means in scores[0].delivered]
    heads = [f"{statistic} vs {name}" for name in names for statistic in ("geomean", "known")]
    memory = ("peak memory of eager", "more memory")
    table = Table("level", "files that got faster", *heads, *memory, box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for score in scores:
        cells = [
            cell
            for means in score.delivered
            for cell in ("-" if means.geometric is None else f"{means.geometric:.2f}x", str(means.count))
        ]
        cells += ["-" if score.memory is None else f"{score.memory:.0%}", str(score.more_memory)]
        table.add_row(score.level or "all", _share(score.faster, score.problems), *cells)
    return table


def _speedups(scores: tuple[Score, ...]) -> Table:
    speeds = ("FASTER", "SAME", "SLOWER", "AMBIGUOUS")
    names = [means.baseline for means in scores[0].means]
    heads = [
        f"{statistic} vs {name}" for name in names for statistic in ("fast_1", "fast_2", "geomean", "mean", "timed")
    ]
    table = Table("level", *heads, *speeds, box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for score in scores:
        total = sum(score.speeds.values()) or 1
        shares = [f"{score.speeds.get(speed, 0) / total:.0%}" for speed in speeds]
        table.add_row(score.level or "all", *(cell for means in score.means for cell in _cells(means)), *shares)
    return table


def _cells(means: Means) -> list[str]:
    ratios = ["-" if value is None else f"{value:.2f}x" for value in (means.geometric, means.arithmetic)]
    return [f"{means.fast_1:.0%}", f"{means.fast_2:.0%}", *ratios, str(means.count)]


def _show_unsolved(out: Console, summary: Summary) -> None:
    if summary.unsolved:
        out.print(Text("\nwithout an accepted version", style="bold"))
    for group in summary.unsolved[:MAX_REASONS]:
        out.print(Text(f"  {len(group.problems):4}  {group.status}: {group.reason}"))
        out.print(Text(f"        {_names(group.problems)}", style="dim"))
    if len(summary.unsolved) > MAX_REASONS:
        out.print(Text(f"  and {len(summary.unsolved) - MAX_REASONS} other reasons, see --json", style="dim"))
    if summary.torch_calls:
        calls = [
            f"{op.removeprefix('aten.')} {count}" for op, count in list(summary.torch_calls.items())[:MAX_OPERATIONS]
        ]
        out.print(Text("\noperations left to torch, with the number of problems", style="bold"))
        out.print(Text(f"  {', '.join(calls)}"))
    if summary.not_run:
        out.print(Text(f"\nnot run: {len(summary.not_run)}", style="bold"))
        out.print(Text(f"  {_names(summary.not_run)}", style="dim"))


def _names(names: tuple[str, ...]) -> str:
    remainder = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + remainder
