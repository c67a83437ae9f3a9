"""The tables of ``mtmc explore --show``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtmc_lsp.explore.summary import Group, StoreSummary
from mtmc_lsp.report.console import show, show_table

MAX_FAMILIES = 12


def show_store(out: Console, summary: StoreSummary) -> None:
    """Show the programs, versions and transitions of a folder, by kind of action and by outcome."""
    show(
        out,
        f"{summary.programs} programs, {summary.versions} versions, {summary.total.count} transitions "
        f"({summary.timed} timed) in {summary.total.seconds:.1f} s of trials",
    )
    families = sorted(summary.families.items(), key=lambda item: -item[1])
    names = [f"{name} {count}" for name, count in families[:MAX_FAMILIES]]
    more = [f"and {len(families) - MAX_FAMILIES} more"] if len(families) > MAX_FAMILIES else []
    show(out, f"families: {', '.join([*names, *more])}")
    for device, count in summary.devices.items():
        show(out, f"{device or 'no GPU'}: {count} transitions")
    for environment in summary.environments:
        out.print(Text(environment, style="dim"))
    if summary.total.count:
        out.print()
        show_table(out, _table("action", [*summary.kinds, summary.total], summary.total))
        out.print()
        show_table(out, _table("chosen by", summary.chosen_by, summary.total))


def _table(head: str, groups: list[Group] | tuple[Group, ...], total: Group) -> Table:
    """A row for each group, and a column for each outcome that occurs."""
    outcomes = [name for name, count in total.outcomes.items() if count]
    table = Table(head, "transitions", *outcomes, "seconds", box=None, padding=(0, 1))
    for column in table.columns[1:]:
        column.justify = "right"
    for group in groups:
        counts = [str(group.outcomes[name]) for name in outcomes]
        table.add_row(group.name, str(group.count), *counts, f"{group.seconds:.1f}")
    return table
