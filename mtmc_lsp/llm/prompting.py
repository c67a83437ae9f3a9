"""Builds prompts from parts, and omits the least important parts when a prompt is too long.

Parts that all questions of a run share come first, because servers cache the common prefix of prompts (prefix caching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.chat import Message, estimated_tokens

OMITTED = "(omitted: the prompt would be too long)"


@dataclass(frozen=True)
class Part:
    """A section of a prompt with its heading."""

    head: str
    text: str
    spare: int = 0
    """Parts with the highest number are omitted first. 0: never omitted."""


def fit_prompt(system: str, parts: Sequence[Part], max_tokens: int) -> list[Message]:
    """The system and the user message. Omits parts until both fit into ``max_tokens``.

    The result may exceed ``max_tokens`` if the mandatory parts alone do.
    """
    included = list(parts)
    for index in sorted(range(len(parts)), key=lambda i: -parts[i].spare):
        messages = _messages(system, included)
        if estimated_tokens(messages) <= max_tokens or not parts[index].spare:
            return messages
        included[index] = replace(parts[index], text=OMITTED)
    return _messages(system, included)


def _messages(system: str, parts: Sequence[Part]) -> list[Message]:
    text = "\n\n".join(f"# {part.head}\n{part.text}" for part in parts)
    return [Message("system", system), Message("user", text)]


def trim_conversation(conversation: Sequence[Message], max_tokens: int) -> list[Message]:
    """The conversation without its oldest attempts, as far as needed. Keeps the question and the last attempt with its error."""
    messages = list(conversation)
    while len(messages) > 4 and estimated_tokens(messages) > max_tokens:
        del messages[2:4]
    return messages
