"""Types for language model requests: messages, token use, cost and errors. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError

SUFFIX_CHARACTERS = 40
"""Length of the suffix whose previous occurrence is searched."""
MAX_PERIOD = 240
"""Longest detected period in characters: a few lines of code."""
MIN_REPETITIONS = 8
MIN_LOOP_CHARACTERS = 400
"""Shortest text that counts as a loop, so that a ruler in a comment does not."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


@dataclass(frozen=True)
class Reply:
    """One answer of the model."""

    text: str
    is_truncated: bool = False
    """Whether the answer is incomplete: it reached the token limit, or it was stopped because it repeated itself."""


@dataclass(frozen=True)
class Exchange:
    """One request and one answer to it, as stored."""

    purpose: str
    """``plan``, ``code`` or ``repair``."""
    messages: tuple[Message, ...]
    """The messages as sent, after redaction."""
    answer: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    error: str = ""
    """Why the answer is missing or incomplete; empty on success."""
    counted: bool = True
    """Whether the endpoint reported the token counts. Otherwise they are estimated from the text length."""
    question: int = 0
    """1-based number of the request. Several sampled answers to one request share it."""
    failure: str = ""
    """Code of the error, if any."""
    is_truncated: bool = False
    """Whether the answer is incomplete."""


@dataclass(frozen=True)
class ModelUse:
    """Total model usage of a run."""

    model: str
    requests: int
    """Number of answers requested."""
    prompt_tokens: int
    answer_tokens: int
    cost: float | None
    """In the currency of the prices in ``[tool.mtmc.llm]``; ``None`` when no price is set."""
    counted: bool = True
    """Whether the endpoint reported all token counts."""
    replay_of: str = ""
    """The run whose stored answers were reused, so nothing was sent; empty when a model was called."""


class ChatModel(Protocol):
    """Interface to a language model."""

    def ask(
        self,
        purpose: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, object] | None = None,
        samples: int = 1,
    ) -> list[Reply]:
        """Request one or more answers; return the ones that succeeded.

        Args:
            purpose: ``plan``, ``code`` or ``repair``.
            schema: request JSON that follows this schema, as far as the endpoint can enforce it.
            samples: number of answers to sample in parallel; a budget may reduce it.

        Raises:
            ModelNotUsable: no request can succeed until the user changes something.
            ModelFailed: this one request came to nothing.
            BudgetSpent: the run may ask nothing more.
        """


CHARACTERS_PER_TOKEN = 2.5
"""For code, deliberately low, so that estimated counts are rather too high (measured: 2.8 over 49152 tokens)."""


def estimated_tokens(messages: Sequence[Message]) -> int:
    """Estimate the number of tokens in messages."""
    return int(sum(len(message.content) for message in messages) / CHARACTERS_PER_TOKEN) + 1


MAX_QUOTED_CHARACTERS = 20_000
"""Maximum length of an answer that is quoted in a repair request."""


def truncate_answer(answer: str) -> str:
    """Shorten an answer before quoting it in a prompt; a runaway answer would fill the next prompt."""
    loop_start = repetition_start(answer)
    if loop_start is not None:
        answer = f"{answer[:loop_start]}\n[repeats]"
    return answer if len(answer) <= MAX_QUOTED_CHARACTERS else f"{answer[:MAX_QUOTED_CHARACTERS]}\n[cut]"


TRUNCATED = "The answer was cut off because it reached the token limit. Be brief."
REPEATING = "The answer was stopped because it repeated itself. Do not repeat yourself."


def truncation_notice(reply: Reply) -> str:
    """Explain to the model why its answer is incomplete; empty if it is complete."""
    if not reply.is_truncated:
        return ""
    return TRUNCATED if repetition_start(reply.text) is None else REPEATING


class ModelNotUsable(EnvironmentNotAble):
    """The endpoint, the key or the model is not available."""

    code = "model-not-usable"


class ModelFailed(MtmcError):
    """One request failed; another one may succeed."""

    exit_code = 3
    code = "model-failed"


class BudgetSpent(MtmcError):
    """The run has used up its budget of tokens, money or time for the model."""

    exit_code = 1
    code = "model-budget"


def repetition_start(text: str) -> int | None:
    """Index in ``text`` after the first period of a repetition that lasts until the end; None if there is no repetition.

    Only exact repetitions count, so unrolled code with changing numbers does not.
    """
    end = len(text)
    if end < MIN_LOOP_CHARACTERS + 1:
        return None
    previous = text.rfind(text[-SUFFIX_CHARACTERS:], max(0, end - SUFFIX_CHARACTERS - MAX_PERIOD), end - 1)
    if previous < 0:
        return None
    period = end - SUFFIX_CHARACTERS - previous
    start = end
    while start - period > 0 and text[start - 1] == text[start - 1 - period]:
        start -= 1
    return start if end - start >= max(MIN_LOOP_CHARACTERS, MIN_REPETITIONS * period) else None
