"""Base class of models: numbers and redacts questions, and records every exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.chat import Exchange, Message, ModelUse, Reply
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.llm.redaction import redacted


@dataclass(frozen=True)
class Question:
    """One question as it is sent."""

    purpose: str
    """``plan``, ``code`` or ``repair``."""
    messages: tuple[Message, ...]
    """Redacted: without secrets and absolute paths."""
    schema: Mapping[str, object] | None
    """JSON schema of the answer; None for free text."""
    samples: int
    """Number of answers requested."""
    number: int
    """1-based, in the order of the questions."""


class RecordingModel(ABC):
    """A model that records its exchanges and reports them to a listener."""

    def __init__(self, project: Path | None = None) -> None:
        """Send paths inside the folder ``project`` relative to it."""
        self._project = project
        self.exchanges: list[Exchange] = []
        self._listener: Callable[[Exchange], None] = lambda exchange: None

    def listen(self, listener: Callable[[Exchange], None]) -> None:
        """Call ``listener`` with every later exchange, including failed ones."""
        self._listener = listener

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Add the exchanges of an interrupted run that is resumed."""
        self.exchanges = [*exchanges, *self.exchanges]

    def ask(
        self,
        purpose: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, object] | None = None,
        samples: int = 1,
    ) -> list[Reply]:
        """The successful answers; see ``ChatModel.ask``."""
        redacted_messages = tuple(Message(item.role, redacted(item.content, self._project)) for item in messages)
        number = max((item.question for item in self.exchanges), default=0) + 1
        results = self._answers(Question(purpose, redacted_messages, schema, samples, number))
        replies = [Reply(item.answer, item.is_truncated) for item, error in results if error is None]
        if not replies:
            raise next(error for _, error in results if error is not None)
        return replies

    @abstractmethod
    def use(self) -> ModelUse:
        """Requests, tokens and cost of all exchanges."""

    @abstractmethod
    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        """Record and return every exchange, with its error if it failed.

        Raises:
            ModelNotUsable: no request can succeed until the user changes the configuration.
            BudgetSpent: the budget of the run does not allow another request.
        """

    def _keep(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges += exchanges
        for exchange in exchanges:
            self._listener(exchange)
