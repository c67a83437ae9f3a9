"""What past runs taught: the lessons of this machine, and the steps of the runs in a project's store."""

from __future__ import annotations

from pathlib import Path

from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.evolve.knowledge.base import Entry, lesson_entries
from mtmc_lsp.evolve.knowledge.lessons import Lesson, LessonFile, lessons_of_steps
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import STORE, Store

MOST_RUNS = 50
"""Most runs of a project that are read, the newest ones."""


def all_lessons(project: Path) -> list[Entry]:
    """All lessons, as somebody who works on a project may see them."""
    lessons = [*LessonFile().load(), *project_lessons(project)]
    return lesson_entries(lessons, str(project))


def project_lessons(project: Path) -> list[Lesson]:
    """What the runs in a project's store taught; evolutions have written their lessons back themselves."""
    folder = project / FOLDER
    if not (folder / STORE).is_file():
        return []
    lessons: list[Lesson] = []
    with Store(folder) as store:
        evolutions = store.evolutions()
        for record in [record for record in store.runs() if record.id not in evolutions][:MOST_RUNS]:
            config = store.config(record.id, RunConfig)
            if config is None or len(config.captures) != 1:
                continue
            lessons += lessons_of_steps(
                store.steps(record.id),
                config.captures[0].graph,
                run=record.id,
                project=str(project),
                gpu=record.environment.gpu,
            )
    return lessons
