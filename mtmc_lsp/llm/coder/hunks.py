"""Reading a model's answer as an edit, strictly: what does not fit exactly is refused with a message that quotes why."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
MARKS = re.compile(r"^(<{5,9} ?SEARCH|={5,9}|>{5,9} ?REPLACE)[ \t]*$", re.MULTILINE)
DIFF_HUNK = re.compile(r"^@@.*@@.*$", re.MULTILINE)
FORM = """\
<<<<<<< SEARCH
lines exactly as they stand in the text now
=======
the lines that take their place
>>>>>>> REPLACE"""
"""A hunk, as a model is told to write it."""
LONGEST_ANSWER = 100_000
QUOTED_LINES = 12


class BadAnswer(Exception):
    """The answer is no edit that can be made; the message tells the model what to mend."""

    def __init__(self, message: str, hint: str = "") -> None:
        """``hint`` is for the model alone."""
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Hunk:
    """Lines to find, and lines to put in their place."""

    search: str
    replace: str


def edited(text: str, answer: str, launcher: str) -> str:
    """``text`` after the edit that ``answer`` describes.

    Args:
        text: what the model was given to edit.
        answer: search/replace hunks, a unified diff, or the whole new text in one fenced block.
        launcher: the function that a whole text must define.

    Raises:
        BadAnswer: it is none of these, or does not fit ``text``.
    """
    answer = answer.replace("\r\n", "\n")
    if not answer.strip():
        raise BadAnswer("The answer is empty. Answer with search/replace hunks.")
    if len(answer) > LONGEST_ANSWER:
        raise BadAnswer(
            f"The answer has {len(answer)} characters, far more than one step needs. Change only the region."
        )
    hunks = _search_replace(answer)
    if not hunks:
        blocks = [block[1] for block in FENCE.finditer(answer)]
        diffs = [block for block in blocks if DIFF_HUNK.search(block)] or [answer] * bool(DIFF_HUNK.search(answer))
        if not diffs:
            return _whole(blocks, answer, launcher)
        hunks = [hunk for diff in diffs for hunk in _unified(diff)]
    for number, hunk in enumerate(hunks, 1):
        text = _applied(text, hunk, f"Hunk {number} of {len(hunks)}", launcher)
    return text


def _search_replace(answer: str) -> list[Hunk]:
    marks = list(MARKS.finditer(answer))
    if not any(mark[1].startswith("<") for mark in marks):
        return []
    kinds = "".join(mark[1][0] for mark in marks)
    if not re.fullmatch(r"(?:<=>)+", kinds):
        raise BadAnswer("A hunk is not finished: each has three marks.", f"Each must be:\n{FORM}")
    found = []
    for i in range(0, len(marks), 3):
        start, middle, end = marks[i : i + 3]
        found.append(Hunk(answer[start.end() + 1 : middle.start()], answer[middle.end() + 1 : end.start()]))
    return found


def _unified(diff: str) -> list[Hunk]:
    found = []
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
        found.append(Hunk("".join(f"{line}\n" for line in search), "".join(f"{line}\n" for line in replace)))
    return found


def _whole(blocks: list[str], answer: str, launcher: str) -> str:
    whole = [block for block in blocks if re.search(rf"^def {re.escape(launcher)}\(", block, re.MULTILINE)]
    if len(whole) > 1:
        raise BadAnswer("The answer holds two versions. Give one.")
    if whole:
        return whole[0]
    if blocks:
        raise BadAnswer(f"The code does not define {launcher}, so it is no new version of the text. Answer with hunks.")
    if re.search(r"^```", answer, re.MULTILINE):
        raise BadAnswer("The block of code has no end. Answer with search/replace hunks alone.", f"As in:\n{FORM}")
    quoted = " ".join(answer.split())[:80]
    raise BadAnswer(
        f"The answer holds no code ({quoted!r}). Answer with search/replace hunks alone.", f"As in:\n{FORM}"
    )


def _applied(text: str, hunk: Hunk, name: str, launcher: str) -> str:
    search, replace = _stripped(hunk.search), _stripped(hunk.replace)
    lines = _stripped(text)
    if not any(search):
        # New functions go above the launcher, which is where a reader looks for what it launches.
        at = next(i for i, line in enumerate(lines) if line.startswith(f"def {launcher}("))
        return _joined([*lines[:at], *replace, "", "", *lines[at:]])
    places = [i for i in range(len(lines) - len(search) + 1) if lines[i : i + len(search)] == search]
    if len(places) > 1:
        rows = ", ".join(str(i + 1) for i in places)
        raise BadAnswer(
            f"{name}: its SEARCH lines occur {len(places)} times (lines {rows}). Add lines until they occur once."
        )
    if not places:
        raise BadAnswer(f"{name}: its SEARCH lines are not in the text. {_nearest(lines, search)}")
    return _joined([*lines[: places[0]], *replace, *lines[places[0] + len(search) :]])


def _stripped(text: str) -> list[str]:
    """The lines without what no one sees at their ends."""
    return [line.rstrip() for line in text.splitlines()]


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _nearest(lines: list[str], search: list[str]) -> str:
    """The part of the text that is most like what was searched, for the model to copy."""
    size = len(search)
    starts = range(max(1, len(lines) - size + 1))
    wanted = "\n".join(search)
    best = max(starts, key=lambda i: difflib.SequenceMatcher(None, wanted, "\n".join(lines[i : i + size])).ratio())
    part = lines[best : best + min(size, QUOTED_LINES)]
    wrong = next((line for line in search if line.strip() and line not in lines), "")
    missing = f"There is no line {wrong.strip()!r}. " if wrong else ""
    return f"{missing}The nearest lines are:\n" + "\n".join(part)
