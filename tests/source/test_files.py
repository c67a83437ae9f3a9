"""Diffs can be applied, and files are replaced atomically."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import FileChanged, RequestError
from mtmc_lsp.process.project_files import UnsafeFile
from mtmc_lsp.source.compose import unified_diff, write_if_unchanged


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\nc\n", "a\nB\nc\n"),
        ("a\nb", "a\nb\n"),
        ("a\nb\n", "a\nb"),
        ("", "a"),
        ("a\r\nb\r\n", "a\r\nnew\r\nb\r\n"),
        ("a\x0cb\u2028c\nd\n", "a\x0cb\u2028c\nD\n"),
        ("é\n", "é\nü\n"),
    ],
)
def test_git_applies_the_diff_and_gets_the_new_text(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_bytes(before.encode())
    diff = unified_diff(before, after, "m.py").encode()
    subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], input=diff, cwd=tmp_path, check=True)
    assert path.read_bytes() == after.encode()


def test_the_diff_of_equal_texts_is_empty() -> None:
    assert unified_diff("a\n", "a\n", "m.py") == ""


def test_replacing_a_file_preserves_its_mode_and_backs_up_the_old_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("old")
    path.chmod(0o755)
    backup = write_if_unchanged(path, sha("old"), b"new", tmp_path / "deep" / "backups")
    assert (path.read_text(), backup.read_text()) == ("new", "old")
    assert path.stat().st_mode & 0o777 == 0o755
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_two_versions_have_two_backups(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("one")
    first = write_if_unchanged(path, sha("one"), b"two", tmp_path / "backups")
    second = write_if_unchanged(path, sha("two"), b"three", tmp_path / "backups")
    assert (first.read_text(), second.read_text()) == ("one", "two")


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    link.symlink_to(real)
    write_if_unchanged(link, sha("old"), b"new", tmp_path / "backups")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_file_that_changed_since_it_was_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("changed by the user")
    with pytest.raises(FileChanged, match="changed on disk") as caught:
        write_if_unchanged(path, sha("old"), b"new", tmp_path / "backups")
    assert path.read_text() == "changed by the user"
    assert not (tmp_path / "backups").exists()
    assert str(path) in str(caught.value)
    assert caught.value.remedy


def test_a_deleted_file_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FileChanged, match="was deleted"):
        write_if_unchanged(tmp_path / "m.py", sha("old"), b"new", tmp_path / "backups")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_file_and_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.py"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RequestError, match="No space left") as caught:
        write_if_unchanged(path, sha("old"), b"new", tmp_path / "backups")
    assert path.read_text() == "old"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["backups", "m.py"]
    assert str(path) in str(caught.value)
    assert "writable" in caught.value.remedy


def test_the_file_is_not_written_if_the_backup_folder_cannot_be_created(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("old")
    (tmp_path / "backups").write_text("a file is in the way")
    with pytest.raises(RequestError, match="cannot be written"):
        write_if_unchanged(path, sha("old"), b"new", tmp_path / "backups")
    assert path.read_text() == "old"


def test_no_backup_is_written_through_a_link_out_of_the_project(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "project" / "m.py", tmp_path / "elsewhere"
    (tmp_path / "project" / ".mtmc").mkdir(parents=True)
    elsewhere.mkdir()
    path.write_text("old")
    (tmp_path / "project" / ".mtmc" / "backups").symlink_to(elsewhere)
    with pytest.raises(UnsafeFile, match="is a symbolic link"):
        write_if_unchanged(path, sha("old"), b"new", tmp_path / "project" / ".mtmc" / "backups")
    assert path.read_text() == "old"
    assert list(elsewhere.iterdir()) == []
