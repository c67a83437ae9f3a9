"""The lineage of an evolution as a page: the story of the best version, the tree of all versions, and the decisions."""

from __future__ import annotations

from mtmc_lsp.evolve.lineage import Lineage, Version, VersionStatus
from mtmc_lsp.evolve.stored import StoredEvolution
from mtmc_lsp.report.lineage.text import speed_text, spent_text, story
from mtmc_lsp.report.page import Page, diff_block, escape, folded, table
from mtmc_lsp.report.search_tree import list_item

STATE = {
    VersionStatus.KEPT: "alternative",
    VersionStatus.NICHE: "alternative",
    VersionStatus.REJECTED: "rejected",
    VersionStatus.FAILED: "failed",
}
"""Classes of the style sheet; versions on the path to the best one are ``accepted``."""
MEASURED = (
    "Each version stands below its parent. The number is its speed over the user's code on all workloads, and the marked path "
    "leads to the best version."
)
ESTIMATED = (
    "Each version stands below its parent. Nothing was timed: the number is the cost model's estimate of its speed over the "
    "user's code on all workloads. The marked path leads to the best version."
)


def lineage_page(stored: StoredEvolution) -> Page:
    """The page of an evolution."""
    record, setup, lineage = stored.record, stored.setup, stored.lineage
    best = lineage.best()
    path = {0, *(version.number for version in lineage.path(best.number))}
    head = [
        f"<header><h1>{escape(record.qualname)}</h1>",
        f'<p class="headline">Version {best.number}: {escape(speed_text(best, setup))}</p>',
        f"<p>{escape(f'{len(lineage.versions)} versions, {spent_text(lineage.spent)}')}</p>",
        *(f'<p class="quiet">{escape(note)}</p>' for note in setup.notes),
        f'<p class="quiet">{escape(f"The evolution ended: {lineage.end_reason}.")}</p>' if lineage.end_reason else "",
        f'<p class="quiet">{escape(f"{record.path} · evolution {record.id} · {setup.device}")}</p></header>',
    ]
    sections = [
        "\n".join(head),
        "<h2>How it got faster</h2>",
        f"<ol>{''.join(f'<li>{escape(story(item, setup))}</li>' for item in lineage.path(best.number))}</ol>",
        "<h2>Lineage</h2>",
        f'<div class="wide"><ul class="tree">{_node(lineage, lineage.version(0), path)}</ul></div>',
        f'<p class="quiet">{escape(MEASURED if setup.has_gpu else ESTIMATED)}</p>',
        _scores(stored),
        _decisions(lineage),
        _diffs(lineage),
    ]
    return Page(f"{record.qualname}: evolution {record.id}", "\n".join(part for part in sections if part), {})


def _node(lineage: Lineage, version: Version, path: set[int]) -> str:
    below = "".join(_node(lineage, item, path) for item in lineage.versions if item.parent == version.number)
    if version.parent is None:
        return list_item("accepted", version.title, below=below)
    state = "accepted" if version.number in path else STATE[version.status]
    return list_item(
        state,
        f"{version.number}. {version.title}",
        edge=f"{version.gain:.2f}x" if version.scores else "",
        word=f"{version.operator.value}, {version.status.value}",
        why=version.reason,
        below=below,
    )


def _scores(stored: StoredEvolution) -> str:
    """The vector of the versions that may become parents."""
    names = [name for name, _ in stored.setup.workloads]
    rows = [
        (version.number, *(f"{score.us:.1f} us, {score.gain:.2f}x" for score in version.scores), version.launches)
        for version in stored.lineage.versions
        if version.is_alive
    ]
    note = "" if stored.setup.has_gpu else '<p class="quiet">Times are estimates of the cost model.</p>'
    return f"<h2>Workloads</h2>\n{table(('Version', *names, 'Launches'), rows)}{note}"


def _decisions(lineage: Lineage) -> str:
    rows = [(number, event.island + 1, event.kind.value, event.text) for number, event in lineage.events]
    if not rows:
        return ""
    classes = ("", "", "word", "word")
    return f"<h2>Decisions</h2>\n{table(('Generation', 'Island', 'Kind', 'Decision'), rows, classes=classes)}"


def _diffs(lineage: Lineage) -> str:
    parts = [
        folded(f"{version.number}. {version.title}", diff_block(version.diff))
        for version in lineage.versions
        if version.diff and version.is_alive
    ]
    return "\n".join(["<h2>Diffs</h2>", *parts]) if parts else ""
