"""Lessons of earlier runs on this machine: which kinds of actions on which operations were kept or rejected, and why.

The file is outside of all projects. A lesson has no source code. Its titles and reasons name variables of a project, so only that
project sees them; other projects see kinds, operations and gains.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.app.folder_decisions import state_folder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.evolve.lineage import ALIVE, Lineage, VersionStatus
from mtmc_lsp.llm.open_regions import FREE_EDIT

FILE = "lessons.jsonl"
MOST_LESSONS = 4000
"""Older lessons are dropped."""
MOST_OPERATIONS = 8
MAX_BYTES = 16 << 20
"""A larger file is not read: something else wrote it."""


@dataclass(frozen=True)
class Lesson:
    """What one run taught about a kind of action on some operations."""

    run: str
    project: str
    """Path of the project's folder."""
    gpu: str
    """Name of the GPU; empty if nothing was timed."""
    kind: str
    """Kind of the action."""
    operations: tuple[str, ...]
    """ATen operations of its region, sorted."""
    tried: int = 0
    kept: int = 0
    failed: int = 0
    best: float = 0.0
    """Largest speedup over the version before; an estimate without a GPU."""
    title: str = ""
    """Of the last version that it was part of."""
    reason: str = ""
    """Why that version was kept, rejected or failed."""

    def text(self, project: str) -> str:
        """The lesson as one sentence for somebody who works on a project."""
        where = f"on {self.gpu}" if self.gpu else "without a GPU (estimated)"
        counts = f"tried {self.tried} times, kept {self.kept}, failed {self.failed}"
        best = f", at best {self.best:.2f}x" if self.best > 0 else ""
        detail = f" Last: {self.title}: {self.reason}" if self.title and project == self.project else ""
        return f"{self.kind} of {', '.join(self.operations) or 'unknown operations'} {where}: {counts}{best}.{detail}"


def lessons_of_lineage(
    lineage: Lineage, graph: Graph, *, run: str, project: str, gpu: str, at_least: int = 1
) -> list[Lesson]:
    """What an evolution taught. Of a sequence of actions, each gets the outcome of the whole.

    Args:
        at_least: the first generation that counts; the start is older.
    """
    lessons: dict[tuple[str, tuple[str, ...]], Lesson] = {}
    for version in lineage.versions:
        if version.generation < at_least:
            continue
        ratio = 1.0
        for score in version.scores:
            ratio *= max(score.ratio, 1e-9) ** (1.0 / len(version.scores))
        for action in version.actions:
            key = (kind_of(action), operations_of(graph, action.region))
            old = lessons.get(key) or Lesson(run, project, gpu, *key)
            lessons[key] = replace(
                old,
                tried=old.tried + 1,
                kept=old.kept + (version.status in ALIVE),
                failed=old.failed + (version.status is VersionStatus.FAILED),
                best=max(old.best, ratio if version.scores and version.status in ALIVE else 0.0),
                title=action.text,
                reason=version.reason,
            )
    return list(lessons.values())


def lessons_of_steps(steps: Sequence[Step], graph: Graph, *, run: str, project: str, gpu: str) -> list[Lesson]:
    """What the steps of a stored run taught."""
    lessons: dict[tuple[str, tuple[str, ...]], Lesson] = {}
    for step in steps:
        key = (kind_of(step.action), operations_of(graph, step.action.region))
        old = lessons.get(key) or Lesson(run, project, gpu, *key)
        ratio = (step.timing.against("previous") or step.timing.against("eager")) if step.timing is not None else None
        is_kept = step.status is StepStatus.ACCEPTED
        lessons[key] = replace(
            old,
            tried=old.tried + 1,
            kept=old.kept + is_kept,
            failed=old.failed + (step.status is StepStatus.FAILED),
            best=max(old.best, ratio.ratio if ratio is not None and is_kept else 0.0),
            title=step.action.text,
            reason=step.reason,
        )
    return list(lessons.values())


def merged(lessons: Iterable[Lesson], project: str) -> list[Lesson]:
    """One lesson for each kind, operations and GPU, with the last title and reason of a project."""
    by_topic: dict[tuple[object, ...], Lesson] = {}
    for lesson in lessons:
        key = (lesson.kind, lesson.operations, lesson.gpu)
        old = by_topic.get(key)
        if old is None:
            by_topic[key] = lesson
            continue
        detail = lesson if lesson.project == project or old.project != project else old
        by_topic[key] = replace(
            detail,
            tried=old.tried + lesson.tried,
            kept=old.kept + lesson.kept,
            failed=old.failed + lesson.failed,
            best=max(old.best, lesson.best),
        )
    return list(by_topic.values())


def kind_of(action: MacroAction) -> str:
    """The kind of an action; ``edit`` for an edit by a language model."""
    return "edit" if FREE_EDIT in action.params else action.kind.value


def operations_of(graph: Graph, region: Sequence[str]) -> tuple[str, ...]:
    """The ATen operations of a region, each once, sorted."""
    named = graph.named
    names = {named[name].op.split(".")[1] for name in region if name in named}
    return tuple(sorted(names)[:MOST_OPERATIONS])


def preferred_kinds(lessons: Sequence[Lesson], gpu: str) -> tuple[str, ...]:
    """The kinds of actions that were kept on a GPU, the largest part of kept trials first."""
    tried: dict[str, int] = {}
    kept: dict[str, int] = {}
    for lesson in lessons:
        if lesson.gpu == gpu:
            tried[lesson.kind] = tried.get(lesson.kind, 0) + lesson.tried
            kept[lesson.kind] = kept.get(lesson.kind, 0) + lesson.kept
    # One more trial that failed: a kind that was tried once does not come first.
    return tuple(
        sorted((kind for kind in kept if kept[kind]), key=lambda kind: (-kept[kind] / (tried[kind] + 1), kind))
    )


class LessonFile:
    """The lessons of this machine's user."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use the file in ``folder``, by default the user's state folder."""
        self.path = (folder or state_folder()) / FILE

    def load(self) -> list[Lesson]:
        """All lessons, oldest first. Lines that are damaged, or of another version, are left out."""
        lessons = []
        try:
            if self.path.stat().st_size > MAX_BYTES:
                return []
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        for line in text.splitlines():
            try:
                lessons.append(from_json(Lesson, json.loads(line)))
            except (ValueError, TypeError, RecursionError):
                continue
        return lessons

    def write_back(self, run: str, lessons: Sequence[Lesson]) -> bool:
        """Add the lessons of a run, instead of those that it added before; False if the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                kept = [lesson for lesson in self.load() if lesson.run != run]
                lines = [json.dumps(to_json(lesson)) + "\n" for lesson in [*kept, *lessons][-MOST_LESSONS:]]
                part = self.path.with_name(f"{FILE}.{os.getpid()}")
                part.write_text("".join(lines), encoding="utf-8")
                part.replace(self.path)
        except OSError:
            return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time changes the file."""
        with self.path.with_name(f"{FILE}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
