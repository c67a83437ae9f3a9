"""What comes of one case of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.observations import repeats


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    case: Case
    status: VerdictStatus
    checks: tuple[Check, ...] = ()
    reason: str = ""
    error: float = 0.0
    reference_error: float = 0.0
    launches: int = 0
    trivial: frozenset[str] | None = None
    """Answers without any work that pass here too; ``None`` where the case says nothing about them."""

    @property
    def may_be_smaller(self) -> bool:
        """Whether it failed in a way that other sizes may show as well: not by ending its process."""
        return self.status in (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR)


def seen_checks(seen: dict[str, Any], judged: dict[str, Any], case: Case, *, decoy: bool, drift: bool) -> list[Check]:
    """What the candidate's process saw beside results; ``judged`` is what the reference's process made of it."""

    def check(name: str, passed: object, wrong: str) -> Check:
        status = CheckStatus.PASSED if passed else CheckStatus.FAILED
        return Check(name, status, case.label, "" if passed else wrong)

    checks = []
    if seen["differing"] is not None:
        name = "many calls" if drift else "determinism"
        checks.append(repeats(name, case, seen["differing"], judged["differing"]))
    checks.append(check("no threads left", not seen["threads"], f"{seen['threads']} still run"))
    if decoy:
        wrong = "the results are the same when its kernels do nothing: they come from elsewhere"
        checks.append(check("kernel's result used", seen["used"], wrong))
    return checks
