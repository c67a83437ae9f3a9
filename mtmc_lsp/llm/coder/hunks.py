"""Parses a model's answer as an edit and applies it strictly: an edit that does not match exactly is rejected."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
MARKERS = re.compile(r"^(<{5,9} ?SEARCH|={5,9}|>{5,9} ?REPLACE)[ \t]*$", re.MULTILINE)
DIFF_HUNK = re.compile(r"^@@.*@@.*$", re.MULTILINE)
HUNK_FORMAT = """\
<<<<<<< SEARCH
lines exactly as they are in the current text
=======
the replacement lines
>>>>>>> REPLACE"""
"""The format of a hunk, as shown to the model."""
MAX_ANSWER_LENGTH = 100_000
MAX_QUOTED_LINES = 12


class InvalidAnswer(Exception):
    """The answer is not a valid edit. The message tells the model what to correct."""

    def __init__(self, message: str, hint: str = "") -> None:
        """``hint`` is sent to the model but not shown to the user."""
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Hunk:
    """Lines to find, and their replacement."""

    search: str
    replace: str


def apply_answer(text: str, answer: str, launcher: str) -> str:
    """``text`` after the edit that ``answer`` describes.

    Args:
        answer: search/replace hunks, a unified diff, or the whole new text in one fenced block.
        launcher: name of the function that a complete new text must define.

    Raises:
        InvalidAnswer: the answer has none of these formats, or does not match ``text``.
    """
    answer = answer.replace("\r\n", "\n")
    if not answer.strip():
        raise InvalidAnswer("The answer is empty. Answer with search/replace hunks.")
    if len(answer) > MAX_ANSWER_LENGTH:
        raise InvalidAnswer(
            f"The answer has {len(answer)} characters, far more than one step needs. Change only the region."
        )
    hunks = _search_replace_hunks(answer)
    if not hunks:
        blocks = [block[1] for block in FENCE.finditer(answer)]
        diffs = [block for block in blocks if DIFF_HUNK.search(block)] or [answer] * bool(DIFF_HUNK.search(answer))
        if not diffs:
            return _complete_text(blocks, answer, launcher)
        hunks = [hunk for diff in diffs for hunk in _unified_diff_hunks(diff)]
    for number, hunk in enumerate(hunks, 1):
        text = _apply_hunk(text, hunk, f"Hunk {number} of {len(hunks)}", launcher)
    return text


def _search_replace_hunks(answer: str) -> list[Hunk]:
    markers = list(MARKERS.finditer(answer))
    if not any(mark[1].startswith("<") for mark in markers):
        return []
    kinds = "".join(mark[1][0] for mark in markers)
    if not re.fullmatch(r"(?:<=>)+", kinds):
        raise InvalidAnswer("A hunk is incomplete: each hunk has three markers.", f"Each must be:\n{HUNK_FORMAT}")
    hunks = []
    for i in range(0, len(markers), 3):
        start, middle, end = markers[i : i + 3]
        hunks.append(Hunk(answer[start.end() + 1 : middle.start()], answer[middle.end() + 1 : end.start()]))
    return hunks


def _unified_diff_hunks(diff: str) -> list[Hunk]:
    hunks = []
    for part in DIFF_HUNK.split(diff)[1:]:
        search, replace = [], []
        for line in part.removeprefix("\n").splitlines():
            if line.startswith(("--- ", "+++ ", "```", "diff ")):
                break
            if line.startswith("\\"):
                continue
            if not line.startswith("+"):
                search.append(line[1:])
            if not line.startswith("-"):
                replace.append(line[1:])
        hunks.append(Hunk("".join(f"{line}\n" for line in search), "".join(f"{line}\n" for line in replace)))
    return hunks


def _complete_text(blocks: list[str], answer: str, launcher: str) -> str:
    candidates = [block for block in blocks if re.search(rf"^def {re.escape(launcher)}\(", block, re.MULTILINE)]
    if len(candidates) > 1:
        raise InvalidAnswer("The answer contains two versions. Give one.")
    if candidates:
        return candidates[0]
    if blocks:
        raise InvalidAnswer(
            f"The code does not define {launcher}, so it is not a complete new text. Answer with hunks."
        )
    if re.search(r"^```", answer, re.MULTILINE):
        raise InvalidAnswer(
            "The code block is not closed. Answer only with search/replace hunks.", f"Format:\n{HUNK_FORMAT}"
        )
    quoted = " ".join(answer.split())[:80]
    raise InvalidAnswer(
        f"The answer contains no code ({quoted!r}). Answer only with search/replace hunks.", f"Format:\n{HUNK_FORMAT}"
    )


def _apply_hunk(text: str, hunk: Hunk, name: str, launcher: str) -> str:
    search, replace = _lines_without_trailing_space(hunk.search), _lines_without_trailing_space(hunk.replace)
    lines = _lines_without_trailing_space(text)
    if not any(search):
        # Insert new functions above the launcher, next to the code that launches them.
        insertion_index = next(i for i, line in enumerate(lines) if line.startswith(f"def {launcher}("))
        return _joined([*lines[:insertion_index], *replace, "", "", *lines[insertion_index:]])
    matches = [i for i in range(len(lines) - len(search) + 1) if lines[i : i + len(search)] == search]
    if len(matches) > 1:
        rows = ", ".join(str(i + 1) for i in matches)
        raise InvalidAnswer(
            f"{name}: its SEARCH lines occur {len(matches)} times (lines {rows}). Add lines until they occur once."
        )
    if not matches:
        raise InvalidAnswer(f"{name}: its SEARCH lines are not in the text. {_nearest(lines, search)}")
    return _joined([*lines[: matches[0]], *replace, *lines[matches[0] + len(search) :]])


def _lines_without_trailing_space(text: str) -> list[str]:
    """The lines of ``text`` without trailing whitespace."""
    return [line.rstrip() for line in text.splitlines()]


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _nearest(lines: list[str], search: list[str]) -> str:
    """The lines of the text most similar to ``search``, for the model to copy."""
    size = len(search)
    starts = range(max(1, len(lines) - size + 1))
    searched_text = "\n".join(search)
    best_start = max(
        starts, key=lambda i: difflib.SequenceMatcher(None, searched_text, "\n".join(lines[i : i + size])).ratio()
    )
    nearest_lines = lines[best_start : best_start + min(size, MAX_QUOTED_LINES)]
    unknown_line = next((line for line in search if line.strip() and line not in lines), "")
    detail = f"There is no line {unknown_line.strip()!r}. " if unknown_line else ""
    return f"{detail}The nearest lines are:\n" + "\n".join(nearest_lines)
