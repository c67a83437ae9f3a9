"""Notes and lessons are searched offline; a run writes back what it learned; projects see no names of others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from evolving import CAPTURE, evolve

from mtmc_lsp.evolve.knowledge.base import KnowledgeBase, lesson_entries, notes
from mtmc_lsp.evolve.knowledge.lessons import (
    FILE,
    MOST_LESSONS,
    Lesson,
    LessonFile,
    lessons_of_lineage,
    lessons_of_steps,
    preferred_kinds,
)
from mtmc_lsp.evolve.knowledge.past_runs import project_lessons
from mtmc_lsp.llm.open_regions import FREE_EDIT
from tests.search.fakes import action, search

H200, A10 = "NVIDIA H200", "NVIDIA A10"


def lesson(kind: str = "fuse", *, gpu: str = H200, tried: int = 4, kept: int = 2, **changes: object) -> Lesson:
    fields = {"title": "Fuse secret_name", "reason": "1.5x the speed", **changes}
    return Lesson("run", "first-project", gpu, kind, ("add", "mul"), tried, kept, 1, 1.5, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "note"),
    [
        ("tensor memory accelerator of hopper", "note: arch-hopper"),
        ("convolution", "note: op-convolution"),
        ("tune block sizes and warps", "note: autotune"),
        ("sorts", "note: op-sort"),
    ],
)
def test_words_lead_to_the_note(query: str, note: str) -> None:
    assert note in [hit.entry.title for hit in KnowledgeBase(notes(), arch="sm_90").search(query, 3)]


def test_a_word_that_no_entry_has_leads_to_nothing() -> None:
    base = KnowledgeBase(notes())
    assert base.search("zebra") == []
    assert base.search("") == []
    assert KnowledgeBase([]).search("softmax") == []


def test_notes_on_the_users_architecture_and_lessons_of_the_users_gpu_come_first() -> None:
    def first(arch: str) -> str:
        base = KnowledgeBase(notes(), arch=arch)
        return next(h.entry.title for h in base.search("architecture shared memory", 20) if "arch-" in h.entry.title)

    assert first("sm_90") == "note: arch-hopper"
    assert first("sm_80") == "note: arch-ampere"
    entries = lesson_entries([lesson(gpu=A10), lesson(gpu=H200)], "/elsewhere")
    assert KnowledgeBase(entries, gpu=H200).search("fuse add")[0].entry.gpu == H200
    assert KnowledgeBase(entries, gpu=A10).search("fuse add")[0].entry.gpu == A10


def test_other_projects_see_no_names_of_a_project() -> None:
    (mine,) = lesson_entries([lesson()], "first-project")
    (other,) = lesson_entries([lesson()], "second-project")
    assert "Fuse secret_name: 1.5x the speed" in mine.text
    assert "secret_name" not in other.text
    assert other.text == "fuse of add, mul on NVIDIA H200: tried 4 times, kept 2, failed 1, at best 1.50x."


def test_lessons_of_several_runs_about_the_same_are_one_entry() -> None:
    other = lesson(tried=1, kept=1, title="Fuse other", reason="kept")
    (entry,) = lesson_entries([lesson(), other], "first-project")
    assert "tried 5 times, kept 3, failed 2" in entry.text
    assert "Fuse other: kept" in entry.text


def test_an_evolution_teaches_what_was_kept_and_what_was_not(tmp_path: Path) -> None:
    lineage = evolve(tmp_path, generations=20)
    lessons = lessons_of_lineage(lineage, CAPTURE.graph, run="r", project="p", gpu=H200)
    actions = [item for version in lineage.versions for item in version.actions]
    assert sum(item.tried for item in lessons) == len(actions)
    assert {item.kind for item in lessons} == {"fuse"}
    assert {item.operations for item in lessons} == {("relu",)}
    assert 0 < sum(item.kept for item in lessons) < len(actions)
    assert all(item.kept + item.failed <= item.tried for item in lessons)


def test_steps_of_stored_runs_teach_too_and_edits_are_a_kind_of_their_own() -> None:
    edit = action(3, "better", **{FREE_EDIT: "abc"})
    result = search([action(1, "better"), action(2, "wrong"), edit])
    lessons = {item.kind: item for item in lessons_of_steps(result.steps, CAPTURE.graph, run="r", project="p", gpu="")}
    assert (lessons["fuse"].tried, lessons["fuse"].kept, lessons["fuse"].failed) == (2, 1, 1)
    assert (lessons["edit"].tried, lessons["edit"].kept) == (1, 1)
    assert lessons["fuse"].best == pytest.approx(1.25, rel=0.01)


def test_kinds_are_preferred_by_the_part_that_was_kept_on_the_same_gpu() -> None:
    lessons = [lesson("fuse", tried=10, kept=2), lesson("split", tried=4, kept=3), lesson("autotune", kept=0), lesson("algebra", gpu=A10)]  # fmt: skip
    assert preferred_kinds(lessons, H200) == ("split", "fuse")


def test_a_run_writes_back_once_and_the_file_stays_small(tmp_path: Path) -> None:
    file = LessonFile(tmp_path)
    assert file.load() == []
    assert file.write_back("run", [lesson(), lesson("split")])
    assert file.write_back("run", [lesson()])
    assert file.load() == [lesson()]
    many = [Lesson(f"r{number}", "p", "", "fuse", ()) for number in range(MOST_LESSONS + 10)]
    assert file.write_back("many", many)
    assert len(file.load()) == MOST_LESSONS
    assert file.load()[-1] == many[-1]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    file = LessonFile(tmp_path)
    file.write_back("run", [lesson()])
    with (tmp_path / FILE).open("ab") as stream:
        stream.write(b'{"run": 1}\nno json\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
    assert file.load() == [lesson()]


def test_a_folder_that_cannot_be_written_costs_the_lessons_alone(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not LessonFile(blocked / "folder").write_back("run", [lesson()])


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        LessonFile(tmp_path).write_back(f"r{number}", [Lesson(f"r{number}", "p", "", "fuse", ())])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(12)))
    assert {item.run for item in LessonFile(tmp_path).load()} == {f"r{number}" for number in range(12)}


def test_a_project_without_a_store_has_no_lessons_and_gets_no_store(tmp_path: Path) -> None:
    assert project_lessons(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
