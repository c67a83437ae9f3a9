"""Findings of the static checks for kernels and their launchers, and the repairs that they suggest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.launches import block_repairs
from mtmc_lsp.kernels.repairs.site import Edit, Repair, Site, sites_of
from mtmc_lsp.kernels.repairs.values import accumulator_repairs
from mtmc_lsp.source.lint import check, context_of
from mtmc_lsp.source.lint.finding import Finding, Severity
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import line_of, parse

SPEED = (
    "host-sync",
    "assumed-contiguous",
    "python-loop",
    "autotune-key",
    "uncoalesced-access",
    "missed-vectorization",
)
"""Checks that concern speed or the caller, not whether the kernel is right."""
WITHOUT_FIX: Mapping[str, Callable[[Site], Iterator[Repair]]] = {
    "low-precision-accumulator": accumulator_repairs,
    "arange-bound": block_repairs,
}
"""The repairs for findings without a fix."""


@dataclass(frozen=True)
class StaticFinding:
    """A finding of a static check, at its place in the file."""

    finding: Finding
    start: int
    """Offset of the checked statement in the file."""
    line: int
    """1-based."""


def static_findings(path: str, text: bytes, names: Sequence[str]) -> list[StaticFinding]:
    """What the static checks report in the named kernels and in the functions that launch them."""
    outline = Outliner(path).outline(text, parse(text))
    context = context_of(outline)
    sites = sites_of(path, text, names)
    ranges = [(line_of(site.kernel.node), site.kernel.node.end_point[0] + 1) for site in sites]
    ranges += [
        (line_of(launch.function), launch.function.end_point[0] + 1) for site in sites for launch in site.launches
    ]
    found = []
    for chunk in outline.chunks:
        for finding in check(chunk.text, context):
            line = text.count(b"\n", 0, chunk.start + finding.start) + 1
            if finding.code not in SPEED and any(first <= line <= last for first, last in ranges):
                found.append(StaticFinding(finding, chunk.start, line))
    return found


def static_repairs(sites: Sequence[Site], findings: Sequence[StaticFinding]) -> list[Repair]:
    """The repairs that the findings suggest, the most severe first."""
    order = (Severity.ERROR, Severity.WARNING, Severity.HINT)
    text, repairs = sites[0].text if sites else b"", list[Repair]()
    for item in sorted(findings, key=lambda item: order.index(item.finding.severity)):
        fix = item.finding.fix
        if fix is not None:
            edit = Edit(item.start + fix.start, item.start + fix.end, fix.new)
            line = text.count(b"\n", 0, edit.start) + 1
            repairs.append(Repair(fix.title, (edit,), line, frozenset(FaultKind)))
        for site in sites if fix is None and item.finding.code in WITHOUT_FIX else ():
            repairs += [r for r in WITHOUT_FIX[item.finding.code](site) if r.line == item.line]
    return repairs
