"""Detects language model answers that repeat themselves endlessly, as small models sometimes do."""

from __future__ import annotations

SUFFIX_CHARACTERS = 40
"""Length of the suffix whose previous occurrence is searched."""
MAX_PERIOD = 240
"""Longest detected period in characters: a few lines of code."""
MIN_REPETITIONS = 8
MIN_LOOP_CHARACTERS = 400
"""Shortest text that counts as a loop, so that a ruler in a comment does not."""


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
