"""The documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtmc_lsp.app.interpreter import LEAST
from tests.conftest import SLOW

ROOT = Path(__file__).resolve().parent.parent
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+/?|[\w-]+/)`")
PLACEHOLDERS = re.compile(r"[A-Z]{3,}|^\.mtmc|^e2e/|^src/|^\.ci/")
"""``KIND`` and the like; folders that exist in a user's project, or are relative to the extension."""


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_that_a_document_names_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = [path for path in PATH.findall(text) if not PLACEHOLDERS.search(path)]
    assert len(paths) > 20
    missing = [path for path in paths if not any((folder / path).exists() for folder in (ROOT, ROOT / "mtmc_lsp"))]
    assert missing == []


def test_the_glossary_has_at_most_60_terms_and_each_once() -> None:
    glossary = (ROOT / "docs/architecture.md").read_text().partition("## Glossary")[2]
    terms = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]
    assert 30 <= len(terms) <= 60
    assert len(set(terms)) == len(terms)
    assert all(len(line) < 160 for line in glossary.splitlines())


def test_the_readme_fits_what_a_newcomer_reads() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_oldest_versions_that_are_tested_are_those_that_are_supported() -> None:
    script, project = ((ROOT / name).read_text() for name in (".ci/run", "pyproject.toml"))
    for package, least in LEAST.items():
        version = ".".join(map(str, least))
        assert f"OLDEST_{package.upper()}={version}.0\n" in script
        assert f'"{package}>={version}"' in project


def test_every_test_that_is_marked_slow_exists() -> None:
    missing = []
    for name in sorted(SLOW):
        module, _, function = name.partition("[")[0].partition("::")
        path = ROOT / module
        if not path.is_file() or f"def {function.rpartition('::')[2]}" not in path.read_text():
            missing.append(name)
    assert missing == []
