"""What the terminal, the page and git show of a lineage. The text is compared with ``tests/evolve/transcripts``.

``MTMC_WRITE_TRANSCRIPTS=1 pytest tests/evolve/test_lineage_text.py`` writes the files again; review and commit the diff.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from evolving import World
from rich.console import Console

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.evolve.lineage import Lineage, Operator, Version
from mtmc_lsp.evolve.stored import StoredEvolution, read_evolution
from mtmc_lsp.report.lineage.git import write_repository
from mtmc_lsp.report.lineage.page import lineage_page
from mtmc_lsp.report.lineage.text import EvolutionText, show_lineage
from mtmc_lsp.report.page import render
from mtmc_lsp.search.store import Store

TRANSCRIPTS = Path(__file__).parent / "transcripts"
WIDTH = 100


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., StoredEvolution]:
    def go(**changes: object) -> StoredEvolution:
        with Store(tmp_path / ".mtmc") as store:
            world = World(store, generations=9, **changes)  # type: ignore[arg-type]
            run = world.begin()
            world.go(run)
            record = next(item for item in store.runs() if item.id == run)
            evolution = read_evolution(store, record)
            return replace(evolution, record=replace(record, id="0123456789", path="/project/model.py"))

    return go


def shown(show: Callable[[Console], None], tmp_path: Path) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=WIDTH, highlight=False, markup=False, emoji=False))
    text = stream.getvalue().replace(str(tmp_path), "/project")
    assert max(map(len, text.splitlines())) <= WIDTH
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def check(name: str, text: str) -> None:
    file = TRANSCRIPTS / f"{name}.txt"
    if os.environ.get("MTMC_WRITE_TRANSCRIPTS"):
        file.write_text(text)
    assert file.read_text() == text


def test_a_measured_lineage(stored, tmp_path: Path) -> None:
    check("measured", shown(lambda out: show_lineage(out, stored()), tmp_path))


def test_an_estimated_lineage_with_reasons(stored, tmp_path: Path) -> None:
    text = shown(lambda out: show_lineage(out, stored(has_gpu=False), verbose=True), tmp_path)
    assert "estimated" in text
    check("estimated_verbose", text)


def test_an_evolution_while_it_goes_on(stored, tmp_path: Path) -> None:
    evolution = stored()
    text = EvolutionText(Console())

    def show(out: Console) -> None:
        text.out = out
        begin = Lineage(evolution.lineage.versions[:1], evolution.lineage.generations[:1])
        text.begin("0123456789", evolution.setup, begin)
        for generation in evolution.lineage.generations[1:]:
            made = [item for item in evolution.lineage.versions if item.generation == generation.number]
            text.generation(generation, made)

    check("progress", shown(show, tmp_path))


def hostile(evolution: StoredEvolution) -> StoredEvolution:
    """The evolution with a version whose texts try to leave their place."""
    text = '<script>alert(1)</script> "quoted" \\ and a ' + "very " * 40 + "long reason"
    versions = [*evolution.lineage.versions]
    last = next(item for item in reversed(versions) if item.candidate is not None)
    action = replace(last.actions[0], text=text)
    versions[last.number] = replace(last, actions=(action,), reason=text, remark=text, operator=Operator.AGENT)
    return replace(evolution, lineage=Lineage(tuple(versions), evolution.lineage.generations))


def test_the_page_escapes_what_a_model_wrote(stored) -> None:
    page = render(lineage_page(hostile(stored())))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<li") == page.count("</li>")


def test_a_repository_takes_any_text_and_file_name(stored, tmp_path: Path) -> None:
    evolution = hostile(stored())
    name = 'mo"del\\ü.py'
    evolution = replace(evolution, record=replace(evolution.record, path=str(tmp_path / name)))
    count = write_repository(evolution, tmp_path / "repository")
    written = [item for item in evolution.lineage.versions if item.candidate is not None]
    assert count == len(written)
    assert (tmp_path / "repository" / name).read_text() == evolution.lineage.best().candidate.source  # type: ignore[union-attr]

    def subject(version: Version) -> str:
        command = ["git", "-C", str(tmp_path / "repository"), "log", "-1", "--format=%s", f"v{version.number}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert all(len(subject(version)) <= 72 for version in written)
    assert all(re.match(rf"{version.number}: ", subject(version)) for version in written)
    with pytest.raises(RequestError, match="is not empty"):
        write_repository(evolution, tmp_path / "repository")
