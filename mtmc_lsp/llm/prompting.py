"""Putting a prompt together from parts: what stays the same comes first, and what matters least is left out where it is too long.

Servers keep what they worked out for a prompt, and begin where the next one differs. So the parts that all questions of a run
share stand before those that change from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.chat import Message, estimated_tokens

LEFT_OUT = "(left out: the prompt would be too long)"


@dataclass(frozen=True)
class Part:
    """A part of a prompt under its heading."""

    head: str
    text: str
    spare: int = 0
    """Parts with the highest number are left out first, and those with 0 never."""


def fitted(system: str, parts: Sequence[Part], most_tokens: int) -> list[Message]:
    """The system's message and the user's, in which parts are left out until it is no longer than ``most_tokens``.

    It may still be longer where the parts that are needed are.
    """
    kept = list(parts)
    for number in sorted(range(len(parts)), key=lambda i: -parts[i].spare):
        made = _messages(system, kept)
        if estimated_tokens(made) <= most_tokens or not parts[number].spare:
            return made
        kept[number] = replace(parts[number], text=LEFT_OUT)
    return _messages(system, kept)


def _messages(system: str, parts: Sequence[Part]) -> list[Message]:
    text = "\n\n".join(f"# {part.head}\n{part.text}" for part in parts)
    return [Message("system", system), Message("user", text)]


def recent(talk: Sequence[Message], most_tokens: int) -> list[Message]:
    """A conversation without its oldest tries, as far as needed; the question, and the last try with its fault, always stay."""
    kept = list(talk)
    while len(kept) > 4 and estimated_tokens(kept) > most_tokens:
        del kept[2:4]
    return kept
