"""Limits what a run may spend on a model: a request whose answer could exceed a limit is not sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from mtmc_lsp.core.chat import BudgetSpent, Exchange
from mtmc_lsp.core.settings import LlmSettings

MIN_ANSWER_TOKENS = 256
"""If the budget leaves fewer tokens for an answer, no request is sent: the answer would be cut off too early to be useful."""


@dataclass(frozen=True)
class Allowance:
    """The limits of one question."""

    samples: int
    answer_tokens: int
    """Maximum tokens of each answer."""
    seconds: float


class Budget:
    """Counts tokens, money and seconds against a run's limits."""

    def __init__(self, limits: LlmSettings) -> None:
        self._limits = limits
        self.prompt_tokens = 0
        self.answer_tokens = 0
        self.seconds = 0.0
        """Time spent waiting for answers. Concurrent answers count once."""

    def take(self, exchanges: Iterable[Exchange]) -> None:
        """Add the tokens and seconds of ``exchanges``."""
        for _, group in groupby(exchanges, key=lambda exchange: exchange.question):
            concurrent = list(group)
            self.prompt_tokens += sum(item.prompt_tokens for item in concurrent)
            self.answer_tokens += sum(item.answer_tokens for item in concurrent)
            self.seconds += max(item.seconds for item in concurrent)

    @property
    def cost(self) -> float | None:
        """Cost in the currency of the prices; None if no price is set."""
        return self._price(self.prompt_tokens, self.answer_tokens)

    def _price(self, prompt: float, answer: float) -> float | None:
        prices = (self._limits.price_prompt, self._limits.price_answer)
        return (prompt * prices[0] + answer * prices[1]) / 1e6 if any(prices) else None

    def allowance(self, prompt_tokens: int, samples: int) -> Allowance:
        """The limits of the next question: fewer and shorter answers than requested if the remaining budget is small.

        Raises:
            BudgetSpent: the remaining budget is too small for one short answer.
        """
        seconds = self._limits.budget_seconds - self.seconds
        if seconds <= 0:
            raise _spent(f"{self.seconds:.0f} of {self._limits.budget_seconds:g} s were spent waiting for answers")
        min_tokens = min(self._limits.answer_tokens, MIN_ANSWER_TOKENS)
        for count in range(samples, 0, -1):
            answer_tokens = min(self._limits.answer_tokens, self._by_tokens(prompt_tokens, count))
            answer_tokens = min(answer_tokens, self._by_money(prompt_tokens, count))
            if answer_tokens >= min_tokens:
                return Allowance(count, int(answer_tokens), seconds)
        if self._by_tokens(prompt_tokens, 1) < min_tokens:
            tokens = self.prompt_tokens + self.answer_tokens
            raise _spent(
                f"{tokens} of {self._limits.budget_tokens} tokens are used, and another answer could exceed the limit"
            )
        raise _spent(
            f"{self.cost or 0.0:.4g} of {self._limits.budget_money:g} are spent, and another answer could exceed the limit"
        )

    def _by_tokens(self, prompt: int, count: int) -> float:
        """Tokens per answer that the token budget allows for ``count`` answers."""
        return (self._limits.budget_tokens - self.prompt_tokens - self.answer_tokens) / count - prompt

    def _by_money(self, prompt: int, count: int) -> float:
        if not self._limits.budget_money:
            return math.inf
        remaining = (self._limits.budget_money - (self.cost or 0.0)) / count - (self._price(prompt, 0) or 0.0)
        if remaining < 0 or not self._limits.price_answer:
            return math.inf if remaining >= 0 else -1.0
        return remaining * 1e6 / self._limits.price_answer


def _spent(detail: str) -> BudgetSpent:
    remedy = "Raise llm.budget_tokens, llm.budget_money or llm.budget_seconds in [tool.mtmc.llm]."
    return BudgetSpent(f"the model's budget is spent: {detail}", remedy=remedy)
