"""A failed job in the editor's words: one sentence, the line that causes it, and one command that helps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError, NoWorkload
from mtmc_lsp.server.jobs import Job, JobState
from mtmc_lsp.server.text import ERRORS, Document
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.target_text import target_source
from mtmc_lsp.source.targets import find_target

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

COMMAND_LINE = re.compile(r"(?:^|\s)--|\bmtmc [a-z]|\bRun: ")
"""Words of a remedy that only help in a terminal."""
INTERPRETER = "Choose an interpreter that has torch and triton, in the setting mtmc.python."
COMMANDS = {
    **{kind: kind for kind in ("optimize", "resume", "plan", "measure", "verify", "record")},
    "certify": "resume",
}
"""The command that repeats a kind of job; the others are repeated from their step."""


@dataclass(frozen=True)
class Failure:
    """Why a job failed."""

    uri: str
    target: str
    text: str
    """One or two sentences, without the path and without command-line options."""
    offset: int
    """The line that causes it, relative to the line of the target's ``def``."""
    line_text: bytes
    """That line at the time of the job; empty if the target as a whole is the cause."""
    source: bytes | None
    """The target's text at the time of the job."""
    button: str
    command: str
    """What helps most: the title and the name of a command."""

    def to_json(self) -> dict[str, Any]:
        """What clients with their own messages show."""
        return {"text": named(self.target, self.text), "button": self.button, "command": self.command}


def failure_of(job: Job) -> Failure | None:
    """The failure of a job; None if it did not fail, or was not about its target's run."""
    if job.state is not JobState.FAILED or job.answer.get("event") != "error":
        return None
    error = job.answer["error"]
    text = str(job.request["text"]).encode("utf-8", ERRORS)
    plain = strip_generated(text, job.target)
    source = target_source(plain, job.target)
    try:
        start = find_target(plain, job.path, job.target).start_line
    except MtmcError:
        start = 1
    has_line = error.get("path") == job.path and bool(error.get("line"))
    line = int(error["line"]) if has_line else start
    lines = plain.split(b"\n")
    line_text = lines[line - 1] if has_line and 0 < line <= len(lines) and line != start else b""
    button, command = _help(job, str(error.get("code")))
    return Failure(job.uri, job.target, failure_text(error, job.path), line - start, line_text, source, button, command)


def failure_text(error: dict[str, Any], path: str) -> str:
    """The message and the remedy of an error, as far as it helps in an editor.

    Args:
        path: of the job's file; another file is named, relative to its folder.
    """
    message = str(error["message"]).strip().rstrip(".")
    if error.get("path") and error["path"] != path:
        other, folder = Path(str(error["path"])), Path(path).parent
        message = f"{other.relative_to(folder) if folder in other.parents else other}: {message}"
    remedy = str(error.get("remedy") or "").strip()
    if COMMAND_LINE.search(remedy):
        is_interpreter = error.get("code") == EnvironmentNotAble.code and "interpreter" in message
        remedy = INTERPRETER if is_interpreter else ""
    return f"{message}. {remedy}".strip()


def named(target: str, text: str) -> str:
    """A sentence about a target, which it names once."""
    return text if text.startswith(f"{target} ") else f"{target}: {text}"


def _help(job: Job, code: str) -> tuple[str, str]:
    if code == NoWorkload.code:
        return "Describe the inputs", "addWorkload"
    if code == EnvironmentNotAble.code and "interpreter" in str(job.answer["error"]["message"]):
        return "Choose an interpreter", "choosePython"
    return "Try again", COMMANDS.get(job.kind, "optimize")


def line_of(ls: Server, failure: Failure) -> int | None:
    """The line in the present text that causes a failure, 0-based; None once that was edited."""
    document = ls.document(failure.uri)
    outlined = document.outline.find(failure.target) if document is not None else None
    if document is None or outlined is None or _target_text(document, failure.target) != failure.source:
        return None
    start = outlined.target.start_line - 1
    if not failure.line_text:
        return start
    for line in _near(start + failure.offset, document.text.line_count):
        if document.text.line(line).rstrip(b"\r\n") == failure.line_text.rstrip(b"\r\n"):
            return line
    return None


def _near(line: int, count: int) -> list[int]:
    """The line where it was, and below: the dispatch statement of a kept step moves the body."""
    return [number for number in range(line, line + 8) if 0 <= number < count]


def _target_text(document: Document, qualname: str) -> bytes | None:
    return target_source(strip_generated(document.text.data, qualname), qualname)
