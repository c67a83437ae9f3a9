"""A model that repeats the answers of a stored run: no network, no key, no cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from mtmc_lsp.core.chat import BudgetSpent, Exchange, ModelFailed, ModelNotUsable, ModelUse
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.llm.endpoint.recording_model import Question, RecordingModel


class ReplayedModel(RecordingModel):
    """Returns the stored answer to the same question, or the next stored answer if the text of the question changed."""

    def __init__(self, run: str, exchanges: Sequence[Exchange], project: Path | None = None) -> None:
        """Replay the stored ``exchanges`` of ``run``."""
        super().__init__(project)
        self._run = run
        # Questions that an unusable endpoint did not answer were asked again when the run was resumed.
        usable = [item for item in exchanges if item.failure != ModelNotUsable.code]
        self._remaining = [list(group) for _, group in groupby(usable, key=lambda item: item.question)]
        self._model = exchanges[0].model if exchanges else ""

    def use(self) -> ModelUse:
        """The usage of a replay: no requests, no tokens."""
        return ModelUse(self._model, 0, 0, 0, None, replay_of=self._run)

    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        group = self._next(question)
        exchanges = [replace(item, messages=question.messages, question=question.number, seconds=0.0) for item in group]
        self._keep(exchanges)
        if exchanges[0].failure == BudgetSpent.code:
            raise BudgetSpent(exchanges[0].error)
        return [(item, ModelFailed(item.error) if item.error else None) for item in exchanges]

    def _next(self, question: Question) -> list[Exchange]:
        if not self._remaining:
            raise BudgetSpent(f"run {self._run}, which is replayed, contains no further questions")
        key = (question.purpose, question.messages)
        matches = [i for i, group in enumerate(self._remaining) if (group[0].purpose, group[0].messages) == key]
        if not matches and self._remaining[0][0].purpose != question.purpose:
            raise RequestError(
                f"run {self._run} cannot be replayed here: its next question has purpose {self._remaining[0][0].purpose!r}, "
                f"but the replay asks for {question.purpose!r}",
                remedy="Replay it with the same package versions and on the same kind of machine as the original run.",
            )
        return self._remaining.pop(matches[0] if matches else 0)
