"""An evolution in the terminal: one line for each version, and at the end how the best version got faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.lineage import EventKind, Generation, Lineage, Setup, Spent, Version, VersionStatus
from mtmc_lsp.evolve.stored import StoredEvolution
from mtmc_lsp.report.console import LiveLine, short_path, show, show_commands
from mtmc_lsp.report.encoding import is_unicode
from mtmc_lsp.report.phrases import headline, inputs_text, joined
from mtmc_lsp.report.search_tree import branches

if TYPE_CHECKING:
    from mtmc_lsp.evolve.run import Evolved

MARK = {
    VersionStatus.KEPT: ("✓", "green"),
    VersionStatus.NICHE: ("~", "cyan"),
    VersionStatus.REJECTED: ("-", "yellow"),
    VersionStatus.FAILED: ("✗", "red"),
}
VERSION_LINES = 2
"""Most lines of a version, unless details are wanted."""


@dataclass
class EvolutionText:
    """Shows an evolution while it goes on."""

    out: Console
    verbose: bool = False
    line: LiveLine = field(default_factory=LiveLine)
    _setup: Setup | None = None
    _is_captured: bool = False

    def start(self, name: str, path: Path, seconds: float) -> None:
        """Show what begins."""
        self.line.began = time.monotonic()
        show(self.out, f"Evolving {name} in {short_path(path)}, at most {duration(seconds)} of generations")

    def captured(self, capture: Capture) -> None:
        """Show the inputs and the machine, once: the runs at the start and at the end capture the target, too."""
        if self._is_captured:
            return
        self._is_captured = True
        device = capture.environment.gpu or "no GPU: times are estimates of the cost model"
        show(self.out, joined((inputs_text(capture.workload), device)), style="dim", indent=2, lines=2)

    def note(self, note: str) -> None:
        """Show something that the user should know."""
        show(self.out, note, style="yellow", indent=2)

    def action(self, index: int, action: MacroAction) -> None:
        """A run at the start or at the end tries a step."""
        self.line.trial = f"step {index}: {action.text}"

    def begin(self, run: str, setup: Setup, lineage: Lineage) -> None:
        """Show what the evolution begins with."""
        self._setup, self.line.trial = setup, ""
        best = lineage.best()
        where = f"version {best.number}, the result of run {setup.started_from}" if best.number else "your code"
        if len(lineage.generations) > 1:
            where = f"generation {lineage.generations[-1].number}"
        show(self.out, f"Evolution {run} begins at {where}: {speed_text(best, setup)}", indent=2)
        names = "; ".join(name for name, _ in setup.workloads)
        show(self.out, f"Workloads: {names}", style="dim", indent=2, lines=2)
        for note in setup.notes:
            self.note(note)

    def generation(self, generation: Generation, versions: Sequence[Version]) -> None:
        """Show a stored generation."""
        for event in generation.events:
            if event.kind is EventKind.DIRECTION or self.verbose:
                show(self.out, f"island {event.island + 1}: {event.text}", style="magenta", indent=2)
        assert self._setup is not None
        for version in versions:
            show_version(self.out, version, self._setup, verbose=self.verbose)

    def end(self, evolved: Evolved) -> None:
        """Show the result."""
        lineage, setup = evolved.lineage, evolved.setup
        show(self.out, "")
        show_summary(self.out, lineage, setup)
        show(self.out, headline(evolved.result), style="bold", lines=3)
        if evolved.learned:
            show(self.out, f"{evolved.learned} lessons were written back: mtmc knowledge WORDS", style="dim", indent=2)
        show_commands(
            self.out,
            [
                (f"mtmc lineage {evolved.run}", "all versions, and how the best one got faster"),
                (f"mtmc report {evolved.run}", "the steps of the final version, as verified"),
                (f"mtmc apply {evolved.run}", "write the final version into the file"),
            ],
        )


def show_lineage(out: Console, stored: StoredEvolution, *, verbose: bool = False) -> None:
    """Show the tree of a stored evolution, the decisions, and how the best version got faster."""
    record, setup, lineage = stored.record, stored.setup, stored.lineage
    show(out, f"{record.qualname} in {short_path(record.path)}, evolution {record.id}")
    names = "; ".join(name for name, _ in setup.workloads)
    times = f"times of {setup.device}" if setup.has_gpu else f"times are estimates for {setup.device}"
    show(out, f"{setup.operator}, {setup.islands} islands, seed {setup.seed}; workloads {names}; {times}", style="dim")
    children: dict[int, list[Version]] = {}
    for version in lineage.versions:
        if version.parent is not None:
            children.setdefault(version.parent, []).append(version)
    show(out, "your code")
    best = {version.number for version in lineage.path(lineage.best().number)}
    tree = branches(children.get(0, []), lambda item: children.get(item.number, []), unicode=is_unicode(out.encoding))
    for branch, version in tree:
        mark, style = MARK[version.status]
        emphasis = "bold green" if version.number in best else "bold"
        first = Text.assemble(branch, (f"{mark} ", style), (f"{version.number}  ", emphasis))
        speed = f"{version.gain:.2f}x, " if version.scores else ""
        show(out, Text(f"{speed}{version.operator.value}: {version.title}"), first=first, lines=1)
        if verbose:
            show(out, version.reason, style=style, indent=len(branch) + 4, lines=2)
    for number, event in lineage.events:
        if event.kind is not EventKind.ENDED and (verbose or event.kind is not EventKind.EXHAUSTED):
            show(out, f"generation {number}, island {event.island + 1}: {event.text}", style="magenta")
    show_summary(out, lineage, setup)
    if record.status is RunStatus.RUNNING:
        show(out, f"evolution {record.id} is not finished: continue with mtmc evolve --resume {record.id}")


def show_version(out: Console, version: Version, setup: Setup, *, verbose: bool = False) -> None:
    """Show a version on two lines."""
    mark, style = MARK[version.status]
    first = Text.assemble((f"{mark} ", style), (f"{version.number}  ", "bold"))
    parent = f"from {version.parent}, " if version.parent is not None else ""
    text = f"{parent}{version.operator.value}: {version.title}"
    show(out, Text(text), first=first, lines=None if verbose else 1)
    speed = f"{speed_text(version, setup)}; " if version.scores else ""
    show(out, f"{speed}{version.reason}", style=style, indent=4, lines=None if verbose else 1)
    if verbose and version.niches:
        show(out, f"best of: {', '.join(version.niches)}", style="dim", indent=4)
    if verbose and version.scores:
        for (name, _), score in zip(setup.workloads, version.scores, strict=True):
            show(out, f"{name}: {score.us:.1f} us, {score.gain:.2f}x your code", style="dim", indent=4)


def show_summary(out: Console, lineage: Lineage, setup: Setup) -> None:
    """Show the counts, the costs, why the evolution ended, and how the best version got faster."""
    best = lineage.best()
    made = [item for item in lineage.versions if item.generation > 0]
    count = {status: sum(item.status is status for item in made) for status in VersionStatus}
    words = ", ".join(f"{number} {status.value}" for status, number in count.items() if number)
    show(out, joined((f"{len(made)} versions: {words or 'none'}", spent_text(lineage.spent))))
    if lineage.end_reason:
        show(out, f"The evolution ended: {lineage.end_reason}.", style="dim")
    if best.number == 0:
        show(out, "No version is faster than your code.")
        return
    show(out, f"How version {best.number} got faster ({speed_text(best, setup)}):")
    for version in lineage.path(best.number):
        show(out, story(version, setup), indent=2)


def story(version: Version, setup: Setup) -> str:
    """What a version of the path to the best one does and gains, in one sentence."""
    ratio = 1.0
    for score in version.scores:
        ratio *= score.ratio ** (1.0 / len(version.scores))
    estimated = "" if setup.has_gpu else ", estimated"
    why = " ".join(dict.fromkeys(action.rationale for action in version.actions if action.rationale))
    model = f' The model: "{version.remark}"' if version.operator.value == "agent" and version.remark else ""
    return f"{version.number}. {version.title} ({ratio:.2f}x{estimated}). {why}{model}".strip()


def speed_text(version: Version, setup: Setup) -> str:
    """The speed of a version over the user's code: ``1.25x your code, estimated``."""
    return f"{version.gain:.2f}x your code{'' if setup.has_gpu else ', estimated'}"


def spent_text(spent: Spent) -> str:
    """The cost of an evolution."""
    parts = [duration(spent.seconds)]
    if spent.tokens:
        parts.append(f"{spent.tokens} tokens")
    if spent.money:
        parts.append(f"{spent.money:.2f} for the model")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time as people say it: ``90 s``, ``45 min``, ``8 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:g} h"
