"""What every model has in common, whoever answers: questions are numbered and redacted, and a ledger is kept of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.chat import Exchange, Message, Reply
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.llm.redaction import redacted


@dataclass(frozen=True)
class Question:
    """One question, as it is sent."""

    purpose: str
    """``plan``, ``code`` or ``repair``."""
    messages: tuple[Message, ...]
    """Without secrets and absolute paths."""
    schema: Mapping[str, object] | None
    """Of the answer, where it is to be JSON."""
    samples: int
    """How many answers are wanted."""
    number: int
    """1-based, in the order asked."""


class Ledger(ABC):
    """A model whose exchanges are kept and told."""

    def __init__(self, project: Path | None = None) -> None:
        """Paths in the folder ``project`` are sent relative to it."""
        self._project = project
        self.exchanges: list[Exchange] = []
        self._listener: Callable[[Exchange], None] = lambda exchange: None

    def listen(self, listener: Callable[[Exchange], None]) -> None:
        """Tell ``listener`` every exchange from now on, also those that fail."""
        self._listener = listener

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
        """One answer or more, those that came to something; see ``ChatModel.ask``."""
        sent = tuple(Message(item.role, redacted(item.content, self._project)) for item in messages)
        number = max((item.question for item in self.exchanges), default=0) + 1
        answers = self._answers(Question(purpose, sent, schema, samples, number))
        replies = [Reply(item.answer, item.is_truncated) for item, error in answers if error is None]
        if not replies:
            raise next(error for _, error in answers if error is not None)
        return replies

    @abstractmethod
    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        """Every answer, or what went wrong with it; all of them are kept.

        Raises:
            ModelNotUsable: no request can succeed until the user changes something.
            BudgetSpent: the run may ask nothing more.
        """

    def _keep(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges += exchanges
        for exchange in exchanges:
            self._listener(exchange)
