"""Answers that go in circles: small models fall into saying the same again until something ends them."""

from __future__ import annotations

KEY = 40
"""Characters by which the last repetition is found again."""
LONGEST_PERIOD = 240
"""Characters; some lines of code."""
REPETITIONS = 8
LEAST = 400
"""Characters that a loop must have gone on for: a ruler in a comment is none."""


def loop_in(text: str) -> int | None:
    """Where ``text`` begins to repeat itself, counted in characters after the first time; None where its end does not.

    Only exact repetitions count, so code that is unrolled with changing numbers is no loop.
    """
    end = len(text)
    if end < LEAST + 1:
        return None
    known = text.rfind(text[-KEY:], max(0, end - KEY - LONGEST_PERIOD), end - 1)
    if known < 0:
        return None
    period = end - KEY - known
    start = end
    while start - period > 0 and text[start - 1] == text[start - 1 - period]:
        start -= 1
    return start if end - start >= max(LEAST, REPETITIONS * period) else None
