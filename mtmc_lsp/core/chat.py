"""Talking to a language model: what is said, what it cost, and how it fails. The parts that ask know nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError
from mtmc_lsp.core.repetition import loop_in


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


@dataclass(frozen=True)
class Reply:
    """One answer."""

    text: str
    is_cut: bool = False
    """Whether it stopped at the most tokens that it might have, or was ended as it went in circles: not by itself."""


@dataclass(frozen=True)
class Exchange:
    """One question and one answer to it, as they are stored."""

    purpose: str
    """``plan``, ``code`` or ``repair``."""
    messages: tuple[Message, ...]
    """As they were sent: redacted."""
    answer: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    seconds: float
    error: str = ""
    """Why there is no whole answer; empty where there is one."""
    counted: bool = True
    """Whether the endpoint counted the tokens; else they are estimated from the text's length."""
    question: int = 0
    """1-based, in the order asked; several answers to one question share it."""
    failure: str = ""
    """The code of the error, where there is one."""
    is_cut: bool = False
    """Whether the answer did not come to its own end."""


@dataclass(frozen=True)
class ModelUse:
    """What the exchanges of a run came to."""

    model: str
    requests: int
    """Answers that were asked for."""
    prompt_tokens: int
    answer_tokens: int
    cost: float | None
    """In the currency of the prices in ``[tool.mtmc.llm]``; ``None`` where no price is set."""
    counted: bool = True
    """Whether every number of tokens was counted by the endpoint."""
    replay_of: str = ""
    """The run whose answers were used again, so that nothing was sent; empty where a model was asked."""


class ChatModel(Protocol):
    """A model that answers."""

    def ask(
        self,
        purpose: str,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, object] | None = None,
        samples: int = 1,
    ) -> list[Reply]:
        """One answer or more, those that came to something.

        Args:
            purpose: ``plan``, ``code`` or ``repair``.
            messages: the conversation so far.
            schema: asks for JSON of that schema, as far as the endpoint can enforce it.
            samples: how many answers are wanted, at once; a budget may allow fewer.

        Raises:
            ModelNotUsable: no request can succeed until the user changes something.
            ModelFailed: this one request came to nothing.
            BudgetSpent: the run may ask nothing more.
        """


CHARACTERS_PER_TOKEN = 2.5
"""Of code, on the low side: where an endpoint does not count, the estimate is rather too high (49152 tokens in all had 2.8)."""


def estimated_tokens(messages: Sequence[Message]) -> int:
    """Tokens of messages that no endpoint has counted."""
    return int(sum(len(message.content) for message in messages) / CHARACTERS_PER_TOKEN) + 1


LONGEST_QUOTE = 20_000
"""Characters of an answer that are sent back when it is to be mended."""


def clipped(answer: str) -> str:
    """An answer as it is quoted to the model: a runaway one would fill the next prompt."""
    loop = loop_in(answer)
    if loop is not None:
        answer = f"{answer[:loop]}\n[and so on]"
    return answer if len(answer) <= LONGEST_QUOTE else f"{answer[:LONGEST_QUOTE]}\n[cut]"


CUT = "The answer was cut off where it reached the most tokens it may have: be brief."
CIRCLES = "The answer was ended where it said the same again and again: do not repeat yourself."


def shortfall(reply: Reply) -> str:
    """What a model is told of an answer that did not come to its own end; empty where it did."""
    if not reply.is_cut:
        return ""
    return CUT if loop_in(reply.text) is None else CIRCLES


class ModelNotUsable(EnvironmentNotAble):
    """The endpoint, the key or the model is not there."""

    code = "model-not-usable"


class ModelFailed(MtmcError):
    """One request came to nothing; another may succeed."""

    exit_code = 3
    code = "model-failed"


class BudgetSpent(MtmcError):
    """The run's tokens, money or time for the model are used up."""

    exit_code = 1
    code = "model-budget"
