"""What ``mtmc bench --suite tritonbench-g`` shows at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from mtmc_lsp.app.bench.tritonbench_summary import KEPT, UNTIMED, KernelSummary
from mtmc_lsp.report.console import show, show_table


def show_kernel_bench(out: Console, summary: KernelSummary, records: Sequence[Mapping[str, object]]) -> None:
    """Show the counts, the kinds of edits, and the originals with a fault."""
    table = Table("", "files", box=None, padding=(0, 1))
    table.columns[1].justify = "right"
    for name, count in (
        ("files", summary.files),
        ("read without an error", summary.read),
        ("the original's test runs", summary.run),
        ("all launched kernels compile", summary.compiled),
        ("the original shows a fault", summary.faulty),
        ("an edit was verified", summary.delivered),
        ("delivered file runs (call accuracy)", summary.call),
        ("and prints the same (execution accuracy)", summary.execution),
    ):
        table.add_row(name, str(count))
    show_table(out, table)
    edits = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.edits.items(), key=lambda item: -item[1]))
    if edits:
        show(out, f"files by kind of edit: {edits}", style="dim")
    if summary.timed and summary.geometric_mean is not None:
        parts = [f"{summary.by_rows} in rows of calls, which the host bounds"] if summary.by_rows else []
        parts += [f"{summary.in_test} in their tests, and not with the largest inputs"] if summary.in_test else []
        rows = f" ({', '.join(parts)})" if parts else ""
        text = f"{summary.faster} of {summary.timed} are faster{rows}, geometric mean {summary.geometric_mean:.2f}x"
        show(out, f"{text}, {summary.mean_of_run:.2f}x over all {summary.run} that run")
    else:
        show(out, "nothing was timed: there is no GPU", style="dim")
    causes = {cause: count for cause, count in summary.causes.items() if cause not in (KEPT, UNTIMED)}
    for title, counts in (("not faster: ", causes), *((f"{kind} refused: ", c) for kind, c in summary.refused.items())):
        if counts:
            text = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
            show(out, f"{title}{text}", style="dim")
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in sorted(summary.seconds.items(), key=lambda i: -i[1]))
    if spent:
        show(out, f"seconds: {spent}", style="dim")
    for record in records:
        if record["fault"]:
            show(out, f"{record['problem']}: {record['fault']}", style="yellow", indent=2, lines=1)
