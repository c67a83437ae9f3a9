"""A model that gives the answers of a stored run again: no network, no key, nothing spent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mtmc_lsp.core.chat import BudgetSpent, Exchange, Message, ModelFailed, ModelNotUsable, ModelUse, Reply
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.redaction import redacted


class ReplayedModel:
    """Answers each question as it was answered in the run: the same question, or where words in it changed, the next one."""

    def __init__(self, run: str, exchanges: Sequence[Exchange], project: Path | None = None) -> None:
        """Take the stored exchanges of ``run``."""
        self._run = run
        self._project = project
        # What an unusable endpoint left unanswered was asked again when the run went on.
        usable = [item for item in exchanges if item.failure != ModelNotUsable.code]
        self._left = [list(group) for _, group in groupby(usable, key=lambda item: item.question)]
        self.exchanges: list[Exchange] = []
        self._listener: Callable[[Exchange], None] = lambda exchange: None
        self._model = exchanges[0].model if exchanges else ""

    def listen(self, listener: Callable[[Exchange], None]) -> None:
        """Tell ``listener`` every exchange from now on."""
        self._listener = listener

    def use(self) -> ModelUse:
        """Nothing was sent, and nothing spent."""
        return ModelUse(self._model, 0, 0, 0, None, replay_of=self._run)

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Count what an earlier part of the run asked already."""
        self.exchanges = [*exchanges, *self.exchanges]

    def ask(
        self,
        purpose: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, object] | None = None,
        samples: int = 1,
    ) -> list[Reply]:
        sent = tuple(Message(item.role, redacted(item.content, self._project)) for item in messages)
        group = self._next(purpose, sent)
        number = max((item.question for item in self.exchanges), default=0) + 1
        for item in group:
            again = replace(item, messages=sent, question=number, seconds=0.0)
            self.exchanges.append(again)
            self._listener(again)
        replies = [Reply(item.answer, item.is_cut) for item in group if not item.error]
        if not replies:
            kind = BudgetSpent if group[0].failure == BudgetSpent.code else ModelFailed
            raise kind(group[0].error)
        return replies

    def _next(self, purpose: str, sent: tuple[Message, ...]) -> list[Exchange]:
        if not self._left:
            raise BudgetSpent(f"run {self._run}, which is replayed, asked nothing more")
        same = [i for i, group in enumerate(self._left) if (group[0].purpose, group[0].messages) == (purpose, sent)]
        if not same and self._left[0][0].purpose != purpose:
            raise RequestError(
                f"run {self._run} cannot be replayed here: it went on with a question to {self._left[0][0].purpose}, "
                f"and now comes one to {purpose}",
                remedy="Replay it with the versions and on the kind of machine that it ran on.",
            )
        return self._left.pop(same[0] if same else 0)
