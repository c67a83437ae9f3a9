"""Groups a verdict's checks by name, so that hundreds of cases become a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.results import Check, CheckStatus


@dataclass(frozen=True)
class CheckGroup:
    """All cases of one check."""

    name: str
    worst: CheckStatus
    """``failed`` if a case failed, ``skipped`` if all cases were skipped."""
    counts: str
    """``12 passed, 1 failed``."""
    detail: str
    """Detail of the first case with the worst outcome."""


def by_name(checks: Sequence[Check]) -> list[CheckGroup]:
    """Group checks by name, in order of first occurrence."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.name, []).append(check)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: Sequence[Check]) -> CheckGroup:
    counts = {status: sum(check.status is status for check in members) for status in CheckStatus}
    worst = next(s for s in (CheckStatus.FAILED, CheckStatus.PASSED, CheckStatus.SKIPPED) if counts[s])
    example = next(check for check in members if check.status is worst)
    detail = f"{example.detail} (on {example.case})" if example.case and example.detail else example.detail
    number = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return CheckGroup(name, worst, number, detail)
