"""What a run may spend on a model: nothing is asked for whose answer could pass a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from mtmc_lsp.core.chat import BudgetSpent, Exchange
from mtmc_lsp.core.settings import LlmSettings

LEAST_ANSWER = 256
"""Tokens; where a budget leaves less for an answer, it is not asked for: it would be cut before it says anything."""


@dataclass(frozen=True)
class Share:
    """What one question may take."""

    samples: int
    answer_tokens: int
    """Of each."""
    seconds: float


class Budget:
    """Counts tokens, money and seconds against a run's limits."""

    def __init__(self, limits: LlmSettings) -> None:
        self._limits = limits
        self.prompt_tokens = 0
        self.answer_tokens = 0
        self.seconds = 0.0
        """Spent waiting; answers that are waited for together count once."""

    def take(self, exchanges: Iterable[Exchange]) -> None:
        """Count what was asked."""
        for _, group in groupby(exchanges, key=lambda exchange: exchange.question):
            together = list(group)
            self.prompt_tokens += sum(item.prompt_tokens for item in together)
            self.answer_tokens += sum(item.answer_tokens for item in together)
            self.seconds += max(item.seconds for item in together)

    @property
    def cost(self) -> float | None:
        """Money; None where no price is set."""
        return self._price(self.prompt_tokens, self.answer_tokens)

    def _price(self, prompt: float, answer: float) -> float | None:
        prices = (self._limits.price_prompt, self._limits.price_answer)
        return (prompt * prices[0] + answer * prices[1]) / 1e6 if any(prices) else None

    def share(self, prompt_tokens: int, samples: int) -> Share:
        """What may be asked now: fewer and shorter answers than wanted, where little is left.

        Raises:
            BudgetSpent: not even one short answer fits.
        """
        seconds = self._limits.budget_seconds - self.seconds
        if seconds <= 0:
            raise _spent(f"{self.seconds:.0f} of {self._limits.budget_seconds:g} s were spent waiting for it")
        least = min(self._limits.answer_tokens, LEAST_ANSWER)
        for count in range(samples, 0, -1):
            each = min(self._limits.answer_tokens, self._by_tokens(prompt_tokens, count))
            each = min(each, self._by_money(prompt_tokens, count))
            if each >= least:
                return Share(count, int(each), seconds)
        if self._by_tokens(prompt_tokens, 1) < least:
            tokens = self.prompt_tokens + self.answer_tokens
            raise _spent(f"{tokens} of {self._limits.budget_tokens} tokens are used, and another answer may pass that")
        raise _spent(
            f"{self.cost or 0.0:.4g} of {self._limits.budget_money:g} are spent, and another answer may pass that"
        )

    def _by_tokens(self, prompt: int, count: int) -> float:
        """Tokens that the budget leaves for each of ``count`` answers."""
        return (self._limits.budget_tokens - self.prompt_tokens - self.answer_tokens) / count - prompt

    def _by_money(self, prompt: int, count: int) -> float:
        if not self._limits.budget_money:
            return math.inf
        left = (self._limits.budget_money - (self.cost or 0.0)) / count - (self._price(prompt, 0) or 0.0)
        if left < 0 or not self._limits.price_answer:
            return math.inf if left >= 0 else -1.0
        return left * 1e6 / self._limits.price_answer


def _spent(what: str) -> BudgetSpent:
    remedy = "Raise llm.budget_tokens, llm.budget_money or llm.budget_seconds in [tool.mtmc.llm]."
    return BudgetSpent(f"the model's budget is spent: {what}", remedy=remedy)
