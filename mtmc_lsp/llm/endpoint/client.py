"""A model behind an OpenAI-compatible endpoint: concurrent answers within a budget, and a record of all exchanges."""

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
from mtmc_lsp.llm.endpoint.budget import Allowance, Budget
from mtmc_lsp.llm.endpoint.endpoint import CUT_SHORT, Answer, Endpoint
from mtmc_lsp.llm.endpoint.recording_model import Question, RecordingModel

if TYPE_CHECKING:
    import openai


class OpenAIModel(RecordingModel):
    """Asks the endpoint in ``OPENAI_BASE_URL`` and records the exchanges."""

    def __init__(
        self,
        settings: LlmSettings,
        project: Path | None = None,
        environ: Mapping[str, str] | None = None,
        deadline: float = float("inf"),
    ) -> None:
        """Create the model without sending anything.

        Args:
            project: paths inside this folder are sent relative to it.
            environ: environment variables with the endpoint, its key and the model; default: ``os.environ``.
            deadline: time of the monotonic clock at which the run ends, and with it each answer.
        """
        super().__init__(project)
        environ = os.environ if environ is None else environ
        self.settings = settings
        self.model = model_name(settings, environ)
        self._endpoint = Endpoint(self.model, settings, environ)
        self._budget = Budget(settings)
        self._deadline = deadline

    # Usage -------------------------------------------------------------------------------------------------------

    def use(self) -> ModelUse:
        """Total usage of all exchanges."""
        return use_of(self.exchanges, self.model, self._budget.cost)

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Add the exchanges of an interrupted run that is resumed, and charge them to the budget."""
        super().resume(exchanges)
        self._budget.take(exchanges)

    # Requests ----------------------------------------------------------------------------------------------------

    def _answers(self, question: Question) -> list[tuple[Exchange, MtmcError | None]]:
        messages = question.messages
        try:
            allowance = self._allowance(messages, question.samples)
        except BudgetSpent as spent:
            text, code = spent.message, spent.code
            self._keep(
                [Exchange(question.purpose, messages, "", self.model, 0, 0, 0.0, text, True, question.number, code)]
            )
            raise
        if not self.model:
            raise ModelNotUsable(
                "no model is configured", remedy="Set MTMC_LLM_MODEL, or model in [tool.mtmc.llm] of pyproject.toml."
            )
        answers = [Answer() for _ in range(allowance.samples)]
        start = time.monotonic()
        errors: list[MtmcError | None] = [None] * allowance.samples
        exchanges: list[Exchange] = []
        try:
            errors = asyncio.run(self._request_all(messages, question.schema, allowance, answers))
        finally:
            # Also record exchanges after a cancellation: they were sent and may be charged.
            seconds = time.monotonic() - start
            pairs = zip(answers, errors, strict=True)
            exchanges += [self._exchange(question, *pair, seconds, allowance.answer_tokens) for pair in pairs]
            self._keep(exchanges)
        return list(zip(exchanges, errors, strict=True))

    def _allowance(self, messages: Sequence[Message], samples: int) -> Allowance:
        expected = estimated_tokens(messages)
        if expected > self.settings.context_tokens:
            raise ModelFailed(
                f"the prompt has about {expected} tokens, more than llm.context_tokens = {self.settings.context_tokens}",
                remedy="Raise this setting if the context window of the model is larger, or optimise a smaller target.",
            )
        return self._budget.allowance(expected, samples)

    async def _request_all(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, object] | None,
        allowance: Allowance,
        answers: list[Answer],
    ) -> list[MtmcError | None]:
        """The error of each answer, None for successful answers."""
        async with self._endpoint.open() as client:
            requests = [self._request_one(client, messages, schema, allowance, answer) for answer in answers]
            return await asyncio.gather(*requests)

    async def _request_one(
        self,
        client: openai.AsyncOpenAI,
        messages: Sequence[Message],
        schema: Mapping[str, object] | None,
        allowance: Allowance,
        answer: Answer,
    ) -> MtmcError | None:
        request = self._endpoint.ask(client, messages, answer, schema=schema, max_tokens=allowance.answer_tokens)
        remaining = self._deadline - time.monotonic()
        try:
            await asyncio.wait_for(request, min(allowance.seconds, remaining))
        except (ModelFailed, ModelNotUsable) as error:
            return error
        except (asyncio.TimeoutError, TimeoutError):
            if remaining < allowance.seconds:
                return ModelFailed("the time limit of the run ended before the answer was complete")
            return ModelFailed(
                f"llm.budget_seconds = {self.settings.budget_seconds:g} ended before the answer was complete"
            )
        return None

    def _exchange(
        self, question: Question, answer: Answer, error: MtmcError | None, seconds: float, max_tokens: int
    ) -> Exchange:
        is_counted = bool(answer.prompt_tokens)
        answer_tokens = estimated_tokens([Message("assistant", answer.text + answer.arguments)])
        if error is None:
            # A successful answer respected the token limit, even if the estimate is higher.
            answer_tokens = min(answer_tokens, max_tokens)
        return Exchange(
            question.purpose,
            question.messages,
            answer.content,
            self.model,
            answer.prompt_tokens if is_counted else estimated_tokens(question.messages),
            answer.answer_tokens if is_counted else answer_tokens,
            seconds,
            error.message if error is not None else "",
            is_counted,
            question.number,
            error.code if error is not None else "",
            answer.finish in CUT_SHORT,
        )

    def _keep(self, exchanges: Sequence[Exchange]) -> None:
        self._budget.take(exchanges)
        super()._keep(exchanges)


def model_name(settings: LlmSettings, environ: Mapping[str, str]) -> str:
    """The model's name at the endpoint; empty if none is set."""
    return environ.get("MTMC_LLM_MODEL") or settings.model


def use_of(exchanges: Sequence[Exchange], model: str, cost: float | None) -> ModelUse:
    """Total usage of ``exchanges``, without questions that the budget rejected before they were sent."""
    sent = [item for item in exchanges if item.failure != BudgetSpent.code]
    prompt_tokens, answer_tokens = sum(item.prompt_tokens for item in sent), sum(item.answer_tokens for item in sent)
    return ModelUse(model, len(sent), prompt_tokens, answer_tokens, cost, all(item.counted for item in sent))
