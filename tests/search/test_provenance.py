"""Which version and commit a result is from, and how paths of a machine are removed from it."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from mtmc_lsp.app import provenance
from mtmc_lsp.app.provenance import current_build, without_absolute_paths


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that stands in for ours, in a folder of its own."""
    folder = tmp_path / "checkout" / "mtmc_lsp"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(provenance, "PACKAGE", folder)
    current_build.cache_clear()
    yield folder
    current_build.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit(package: Path) -> str:
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return git(package.parent, "rev-parse", "HEAD")[:12]


def test_a_checkout_gives_its_commit_and_says_whether_the_package_was_changed(package: Path) -> None:
    head = commit(package)
    (package.parent / "results.jsonl").write_text("{}\n")
    assert current_build().commit == head, "files beside the package change no result"
    current_build.cache_clear()
    (package / "code.py").write_text("x = 2\n")
    assert current_build().commit == f"{head}-dirty"


def test_a_package_inside_the_repository_of_another_project_does_not_take_its_commit(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(package)
    inside = package.parent / "site-packages" / "mtmc_lsp"
    inside.mkdir(parents=True)
    monkeypatch.setattr(provenance, "PACKAGE", inside)
    monkeypatch.setattr(provenance, "_installed_commit", lambda: "")
    assert current_build().commit == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "0123456789abcdef"}}', "0123456789ab"),
        ('{"url": "file:///x", "dir_info": {}}', ""),
        (None, ""),
    ],
)
def test_a_package_installed_from_git_gives_the_commit_that_pip_noted(
    package: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            return text if name == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert current_build().commit == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/suite/level1/2_a.py", "level1/2_a.py"),
        ('File "/home/me/env/torch/nn.py", line 3', 'File "nn.py", line 3'),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("level1/2_a at 3.2 TB/s, 1/2", "level1/2_a at 3.2 TB/s, 1/2"),
    ],
)
def test_paths_below_the_suite_become_relative_and_others_lose_their_folders(text: str, expected: str) -> None:
    assert without_absolute_paths({"a": [text, 3]}, Path("/suite")) == {"a": [expected, 3]}
