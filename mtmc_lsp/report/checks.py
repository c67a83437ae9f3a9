"""A verdict's checks by their name: hundreds of cases become a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.results import Check, CheckStatus


@dataclass(frozen=True)
class CheckGroup:
    """All cases of one check."""

    name: str
    worst: CheckStatus
    """``failed`` where one failed, ``skipped`` where none was looked at."""
    counts: str
    """``12 passed, 1 failed``."""
    detail: str
    """Of the first case with the worst outcome."""


def by_name(checks: Sequence[Check]) -> list[CheckGroup]:
    """The checks, those of one name together, in the order they first came."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.name, []).append(check)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: Sequence[Check]) -> CheckGroup:
    counts = {status: sum(check.status is status for check in members) for status in CheckStatus}
    worst = next(s for s in (CheckStatus.FAILED, CheckStatus.PASSED, CheckStatus.SKIPPED) if counts[s])
    told = next(check for check in members if check.status is worst)
    detail = f"{told.detail} (on {told.case})" if told.case and told.detail else told.detail
    number = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return CheckGroup(name, worst, number, detail)
