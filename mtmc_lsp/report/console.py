"""Text for a terminal: wrapped at words to its width, and readable without colours, symbols or a terminal."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.report.encoding import is_unicode
from mtmc_lsp.report.phrases import joined, stage_with_time

LEAST_WIDTH = 20
"""Least number of columns for a text beside its margin."""
PIPE_WIDTH = 100
"""Width in columns where the output is a file or a pipe and COLUMNS is not set."""
SNIPPET_MARGIN = 4
"""Spaces before a line of a remedy that is code to paste."""
TABLE_WIDTH = 200
"""The same for tables."""


def console(*, stderr: bool = False) -> Console:
    """The console of the terminal. Colours follow NO_COLOR and the terminal; the width follows COLUMNS and the terminal."""
    out = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if _is_read_by_programs(out):
        out.width = PIPE_WIDTH
    return out


def _is_read_by_programs(out: Console) -> bool:
    return not out.is_terminal and not os.environ.get("COLUMNS", "").isdigit()


def show(
    out: Console,
    text: str | Text,
    *,
    style: str = "",
    indent: int = 0,
    lines: int | None = None,
    first: str | Text = "",
) -> int:
    """Print a text, wrapped at words to the console's width. A word that is longer than a line, such as a path, stays whole.

    Args:
        indent: columns before each line.
        lines: the most lines; a longer text ends with dots at a word.
        first: what stands before the text in the first line; the further lines begin below the text.

    Returns:
        The number of lines.
    """
    rows = wrapped(out, text, style=style, indent=indent, lines=lines, first=first)
    for row in rows:
        out.print(row, soft_wrap=True)
    return len(rows)


def wrapped(
    out: Console,
    text: str | Text,
    *,
    style: str = "",
    indent: int = 0,
    lines: int | None = None,
    first: str | Text = "",
) -> list[Text]:
    """The lines that :func:`show` prints."""
    body = Text(text, style=style) if isinstance(text, str) else text
    start = Text(first) if isinstance(first, str) else first
    left = indent + start.cell_len
    width = max(LEAST_WIDTH, out.width - left)
    rows = [row for row in body.divide(_breaks(body.plain, width)) if row.plain.strip()]
    for row in rows:
        row.rstrip()
    if lines is not None and len(rows) > lines:
        rows = [*rows[: lines - 1], _with_dots(rows[lines - 1], width)]
    first_margin, margin = Text.assemble(" " * indent, start), Text(" " * left)
    return [Text.assemble(margin if number else first_margin, row) for number, row in enumerate(rows)]


def _breaks(text: str, width: int) -> list[int]:
    """Where lines of at most ``width`` columns begin, the first one left out. Lines break at spaces only."""
    breaks, used = [], 0
    for match in re.finditer(r"\S+\s*", text):
        word = match.group()
        if used and used + cell_len(word.rstrip()) > width:
            breaks.append(match.start())
            used = 0
        used += cell_len(word)
    return breaks


def _with_dots(row: Text, width: int) -> Text:
    """The line with dots at its end, without the words that the dots leave no room for."""
    plain = row.plain
    while cell_len(plain) + 4 > width and " " in plain:
        plain = plain.rpartition(" ")[0]
    shortened = row[: len(plain.rstrip(" ,;:"))]
    shortened.append(" ...")
    return shortened


def short_path(path: Path | str) -> str:
    """A path as a user types it: relative to the working folder if it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def show_error(out: Console, error: MtmcError) -> None:
    """Print an error with its file and line, and below it the remedy. Snippets to paste stay as they are.

    In a file or a pipe the error is one line, so that a program can search it.
    """
    where = f"{short_path(error.where.path)}:{error.where.line}" if error.where is not None and error.where.line else ""
    if error.where is not None and not where:
        where = short_path(error.where.path)
    message = f"error: {f'{where}: ' if where else ''}{error.message}"
    if _is_read_by_programs(out):
        out.print(message, soft_wrap=True)
    else:
        show(out, message)
    for line in f"  {error.remedy}".splitlines() if error.remedy else ():
        margin = len(line) - len(line.lstrip())
        if margin >= SNIPPET_MARGIN:
            out.print(line, soft_wrap=True)
        else:
            show(out, line.strip(), indent=margin)


def show_table(out: Console, table: Table) -> None:
    """Print a table; in a file or a pipe in its full width, so that a program can read its rows."""
    out.print(table, width=out.width if out.is_terminal else TABLE_WIDTH, soft_wrap=not out.is_terminal)


def show_commands(out: Console, commands: Sequence[tuple[str, str]]) -> None:
    """Show what the user can do next: each command with what it does."""
    width = max((len(command) for command, _ in commands), default=0)
    for command, effect in commands:
        show(out, Text(effect, style="dim"), indent=2, first=f"{command:<{width}}  ", lines=1)


@dataclass
class LiveLine:
    """The line that is shown while a run goes on: stage, time, trial and the best version so far."""

    budget: float | None = None
    """Seconds; ``None`` if the work has no limit."""
    stage: str = "starting"
    trial: str = ""
    best: str = ""
    began: float = field(default_factory=time.monotonic)
    """Time of the monotonic clock."""

    def enter(self, stage: str) -> None:
        """Another stage begins."""
        self.stage = stage

    def text(self) -> str:
        """The line now."""
        stage = stage_with_time(self.stage, time.monotonic() - self.began, self.budget)
        return joined((stage, self.trial, self.best))

    def __rich__(self) -> Text:
        return Text(self.text(), no_wrap=True, overflow="ellipsis")


def live(out: Console, line: LiveLine) -> Status:
    """Show a line that stays current; nothing where the output is not a terminal."""
    # The default spinner needs Braille characters.
    return out.status(line, spinner="dots" if is_unicode(out.encoding) else "line")
