"""The edits of an earlier run, to be made again without asking anybody."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from mtmc_lsp.core.chat import BudgetSpent, Message, Reply
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.micro.llm.coder import sheet_of
from mtmc_lsp.micro.llm.sheet import taken_apart


def edits_of(capture: Capture, root: Candidate, steps: Sequence[Step]) -> dict[str, str]:
    """What each accepted step changed, by the key of its action, in a form in which a model might have answered."""
    found: dict[str, str] = {}
    before = root
    for step in steps:
        made = step.candidate
        if step.status is not StepStatus.ACCEPTED or made is None or made.code is None:
            continue
        try:
            old = sheet_of(capture, before).text
        except CannotCode:
            return found
        new = taken_apart(made.code).text
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=2)
        found[step.action.key] = "```diff\n" + "\n".join(line.rstrip() for line in list(lines)[2:]) + "\n```"
        before = made
    return found


class NoModel:
    """Stands where no model may be asked."""

    def ask(self, purpose: str, messages: Sequence[Message], **more: object) -> list[Reply]:
        """Nothing."""
        raise BudgetSpent(
            "a language model would have to be asked, and may not be", remedy="Set llm for the planner or the coder."
        )
