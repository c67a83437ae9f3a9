"""A model behind an OpenAI-compatible endpoint: several answers at once, within a budget, and a ledger of what was asked."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtmc_lsp.core.chat import (
    BudgetSpent,
    Exchange,
    Message,
    ModelFailed,
    ModelNotUsable,
    ModelUse,
    estimated_tokens,
)
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.settings import LlmSettings
from mtmc_lsp.llm.endpoint.budget import Budget, Share
from mtmc_lsp.llm.endpoint.endpoint import CUT_SHORT, Answer, Endpoint
from mtmc_lsp.llm.endpoint.ledger import Ledger, Question

if TYPE_CHECKING:
    import openai


class OpenAIModel(Ledger):
    """Asks the endpoint in ``OPENAI_BASE_URL``, and keeps a ledger."""

    def __init__(
        self, settings: LlmSettings, project: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        """Nothing is sent yet.

        Args:
            settings: the model, its limits and its prices.
            project: paths in it are sent relative to it.
            environ: names the endpoint, its key and the model; by default the process's own.
        """
        super().__init__(project)
        environ = os.environ if environ is None else environ
        self.settings = settings
        self.model = model_name(settings, environ)
        self._endpoint = Endpoint(self.model, settings, environ)
        self._budget = Budget(settings)

    # What is used ------------------------------------------------------------------------------------------------

    def use(self) -> ModelUse:
        """What all exchanges came to."""
        return use_of(self.exchanges, self.model, self._budget.cost)

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Count what an earlier part of the run asked already."""
        super().resume(exchanges)
        self._budget.take(exchanges)

    # Asking ------------------------------------------------------------------------------------------------------

    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        sent = question.messages
        try:
            share = self._share(sent, question.samples)
        except BudgetSpent as spent:
            text, code = spent.message, spent.code
            self._keep([Exchange(question.purpose, sent, "", self.model, 0, 0, 0.0, text, True, question.number, code)])
            raise
        if not self.model:
            raise ModelNotUsable(
                "no model is named", remedy="Set MTMC_LLM_MODEL, or model in [tool.mtmc.llm] of pyproject.toml."
            )
        answers = [Answer() for _ in range(share.samples)]
        began = time.monotonic()
        errors: list[MtmcError | None] = [None] * share.samples
        made: list[Exchange] = []
        try:
            errors = asyncio.run(self._together(sent, question.schema, share, answers))
        finally:
            # Also where the user ended it: what was sent was sent, and may cost.
            seconds = time.monotonic() - began
            pairs = zip(answers, errors, strict=True)
            made += [self._exchange(question, *pair, seconds, share.answer_tokens) for pair in pairs]
            self._keep(made)
        return list(zip(made, errors, strict=True))

    def _share(self, sent: Sequence[Message], samples: int) -> Share:
        expected = estimated_tokens(sent)
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
        self, question: Question, answer: Answer, error: MtmcError | None, seconds: float, most_tokens: int
    ) -> Exchange:
        counted = bool(answer.prompt_tokens)
        received = estimated_tokens([Message("assistant", answer.text + answer.arguments)])
        if error is None:
            # An answer that was no failure kept to its limit, however its characters are counted.
            received = min(received, most_tokens)
        return Exchange(
            question.purpose,
            question.messages,
            answer.whole,
            self.model,
            answer.prompt_tokens if counted else estimated_tokens(question.messages),
            answer.answer_tokens if counted else received,
            seconds,
            error.message if error is not None else "",
            counted,
            question.number,
            error.code if error is not None else "",
            answer.finish in CUT_SHORT,
        )

    def _keep(self, exchanges: Sequence[Exchange]) -> None:
        self._budget.take(exchanges)
        super()._keep(exchanges)


def model_name(settings: LlmSettings, environ: Mapping[str, str]) -> str:
    """The model's name at the endpoint; empty where none is set."""
    return environ.get("MTMC_LLM_MODEL") or settings.model


def use_of(exchanges: Sequence[Exchange], model: str, cost: float | None) -> ModelUse:
    """What exchanges came to; what a budget refused was never asked."""
    asked = [item for item in exchanges if item.failure != BudgetSpent.code]
    prompt, answer = sum(item.prompt_tokens for item in asked), sum(item.answer_tokens for item in asked)
    return ModelUse(model, len(asked), prompt, answer, cost, all(item.counted for item in asked))
