"""A model that gives the answers of a stored run again: no network, no key, nothing spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mtmc_lsp.core.chat import BudgetSpent, Exchange, ModelFailed, ModelNotUsable, ModelUse
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.llm.endpoint.ledger import Ledger, Question


class ReplayedModel(Ledger):
    """Answers each question as it was answered in the run: the same question, or where words in it changed, the next one."""

    def __init__(self, run: str, exchanges: Sequence[Exchange], project: Path | None = None) -> None:
        """Take the stored exchanges of ``run``."""
        super().__init__(project)
        self._run = run
        # What an unusable endpoint left unanswered was asked again when the run went on.
        usable = [item for item in exchanges if item.failure != ModelNotUsable.code]
        self._left = [list(group) for _, group in groupby(usable, key=lambda item: item.question)]
        self._model = exchanges[0].model if exchanges else ""

    def use(self) -> ModelUse:
        """Nothing was sent, and nothing spent."""
        return ModelUse(self._model, 0, 0, 0, None, replay_of=self._run)

    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        group = self._next(question)
        again = [replace(item, messages=question.messages, question=question.number, seconds=0.0) for item in group]
        self._keep(again)
        if again[0].failure == BudgetSpent.code:
            raise BudgetSpent(again[0].error)
        return [(item, ModelFailed(item.error) if item.error else None) for item in again]

    def _next(self, question: Question) -> list[Exchange]:
        if not self._left:
            raise BudgetSpent(f"run {self._run}, which is replayed, asked nothing more")
        asked = (question.purpose, question.messages)
        same = [i for i, group in enumerate(self._left) if (group[0].purpose, group[0].messages) == asked]
        if not same and self._left[0][0].purpose != question.purpose:
            raise RequestError(
                f"run {self._run} cannot be replayed here: it went on with a question to {self._left[0][0].purpose}, "
                f"and now comes one to {question.purpose}",
                remedy="Replay it with the versions and on the kind of machine that it ran on.",
            )
        return self._left.pop(same[0] if same else 0)
