"""A model behind an OpenAI-compatible endpoint: several answers at once, within a budget, and a ledger of what was asked."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mtmc_lsp.core.chat import BudgetSpent, Exchange, Message, ModelFailed, ModelNotUsable, ModelUse, Reply
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.redaction import redacted
from mtmc_lsp.core.settings import LlmSettings
from mtmc_lsp.micro.llm.budget import Budget, Share, estimated_tokens
from mtmc_lsp.micro.llm.endpoint import Answer, Endpoint

if TYPE_CHECKING:
    import openai


@dataclass
class OpenAIModel:
    """Asks the endpoint in ``OPENAI_BASE_URL``, and keeps a ledger."""

    settings: LlmSettings
    project: Path | None = None
    """Paths in it are sent relative to it."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    exchanges: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = model_name(self.settings, self.environ)
        self._endpoint = Endpoint(self.model, self.settings, self.environ)
        self._budget = Budget(self.settings)
        self._listener: Callable[[Exchange], None] = lambda exchange: None

    def listen(self, listener: Callable[[Exchange], None]) -> None:
        """Tell ``listener`` every exchange from now on, also those that fail."""
        self._listener = listener

    # What is used ------------------------------------------------------------------------------------------------

    def use(self) -> ModelUse:
        """What all exchanges came to."""
        return use_of(self.exchanges, self.model, self._budget.cost)

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Count what an earlier part of the run asked already."""
        self.exchanges = [*exchanges, *self.exchanges]
        self._budget.take(exchanges)

    # Asking ------------------------------------------------------------------------------------------------------

    def ask(
        self,
        purpose: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, object] | None = None,
        samples: int = 1,
    ) -> list[Reply]:
        sent = tuple(Message(item.role, redacted(item.content, self.project)) for item in messages)
        question = max((item.question for item in self.exchanges), default=0) + 1
        try:
            share = self._share(sent, samples)
        except BudgetSpent as spent:
            self._keep([Exchange(purpose, sent, "", self.model, 0, 0, 0.0, spent.message, True, question, spent.code)])
            raise
        if not self.model:
            raise ModelNotUsable(
                "no model is named", remedy="Set MTMC_LLM_MODEL, or model in [tool.mtmc.llm] of pyproject.toml."
            )
        answers = [Answer() for _ in range(share.samples)]
        began = time.monotonic()
        errors: list[MtmcError | None] = [None] * share.samples
        try:
            errors = asyncio.run(self._together(sent, schema, share, answers))
        finally:
            # Also where the user ended it: what was sent was sent, and may cost.
            seconds = time.monotonic() - began
            parts = zip(answers, errors, strict=True)
            made = [self._exchange(purpose, sent, answer, error, seconds, question) for answer, error in parts]
            self._keep(made)
        replies = [
            Reply(a.whole, a.finish in ("length", "")) for a, e in zip(answers, errors, strict=True) if e is None
        ]
        if not replies:
            raise next(error for error in errors if error is not None)
        return replies

    def _share(self, sent: Sequence[Message], samples: int) -> Share:
        expected = estimated_tokens("".join(message.content for message in sent))
        if expected > self.settings.context_tokens:
            raise ModelFailed(
                f"the prompt has about {expected} tokens, more than llm.context_tokens = {self.settings.context_tokens}",
                remedy="Raise it if the model takes more, or optimise a smaller target.",
            )
        return self._budget.share(expected, samples)

    async def _together(
        self, sent: Sequence[Message], schema: Mapping[str, object] | None, share: Share, answers: list[Answer]
    ) -> list[MtmcError | None]:
        """What went wrong with each answer."""
        async with self._endpoint.open() as client:
            asked = [self._one(client, sent, schema, share, answer) for answer in answers]
            return await asyncio.gather(*asked)

    async def _one(
        self,
        client: openai.AsyncOpenAI,
        sent: Sequence[Message],
        schema: Mapping[str, object] | None,
        share: Share,
        answer: Answer,
    ) -> MtmcError | None:
        asked = self._endpoint.ask(client, sent, answer, schema=schema, most_tokens=share.answer_tokens)
        try:
            await asyncio.wait_for(asked, share.seconds)
        except (ModelFailed, ModelNotUsable) as error:
            return error
        except (asyncio.TimeoutError, TimeoutError):
            return ModelFailed(f"llm.budget_seconds = {self.settings.budget_seconds:g} ended while the answer came")
        return None

    def _exchange(
        self,
        purpose: str,
        sent: tuple[Message, ...],
        answer: Answer,
        error: MtmcError | None,
        seconds: float,
        number: int,
    ) -> Exchange:
        counted = bool(answer.prompt_tokens)
        received = answer.text + answer.arguments
        return Exchange(
            purpose,
            sent,
            answer.whole,
            self.model,
            answer.prompt_tokens if counted else estimated_tokens("".join(item.content for item in sent)),
            answer.answer_tokens if counted else estimated_tokens(received),
            seconds,
            error.message if error is not None else "",
            counted,
            number,
            error.code if error is not None else "",
            answer.finish in ("length", ""),
        )

    def _keep(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges += exchanges
        self._budget.take(exchanges)
        for exchange in exchanges:
            self._listener(exchange)


def model_name(settings: LlmSettings, environ: Mapping[str, str]) -> str:
    """The model's name at the endpoint; empty where none is set."""
    return environ.get("MTMC_LLM_MODEL") or settings.model


def use_of(exchanges: Sequence[Exchange], model: str, cost: float | None) -> ModelUse:
    """What exchanges came to; what a budget refused was never asked."""
    asked = [item for item in exchanges if item.failure != BudgetSpent.code]
    prompt, answer = sum(item.prompt_tokens for item in asked), sum(item.answer_tokens for item in asked)
    return ModelUse(model, len(asked), prompt, answer, cost, all(item.counted for item in asked))
