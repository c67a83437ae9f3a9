"""Files below ``.mtmc`` are never reached through links, and pipes do not block."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtmc_lsp.process.project_files import (
    UnsafeFile,
    check_database,
    check_file,
    make_folder,
    read_bytes,
    replace_bytes,
    writing,
)


def test_a_file_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / ".mtmc" / "deep" / "file"
    assert read_bytes(path) is None
    make_folder(path.parent)
    replace_bytes(path, b"one")
    assert read_bytes(path) == b"one"
    with writing(path) as stream:
        stream.write(b"2")
    assert read_bytes(path) == b"2", "the old content is replaced"
    assert os.listdir(path.parent) == ["file"], "no temporary file remains"


def test_no_function_follows_a_link_to_a_file(tmp_path: Path) -> None:
    (tmp_path / ".mtmc").mkdir()
    target, link = tmp_path / "target", tmp_path / ".mtmc" / "link"
    target.write_bytes(b"theirs")
    link.symlink_to(target)
    for attempt in (check_file, check_database, read_bytes, lambda path: replace_bytes(path, b"ours")):
        with pytest.raises(UnsafeFile, match="is a symbolic link"):
            attempt(link)
    with pytest.raises(UnsafeFile, match="is a symbolic link"), writing(link):
        pass
    assert target.read_bytes() == b"theirs"


@pytest.mark.parametrize("linked", [".mtmc", ".mtmc/inner"])
def test_no_function_follows_a_link_to_a_folder(tmp_path: Path, linked: str) -> None:
    target = tmp_path / "target"
    (target / "inner").mkdir(parents=True)
    link = tmp_path / "project" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    path = tmp_path / "project" / ".mtmc" / "inner" / "file"
    for attempt in (make_folder, check_file, check_database, read_bytes, lambda path: replace_bytes(path, b"ours")):
        with pytest.raises(UnsafeFile, match="is a symbolic link") as caught:
            attempt(path)
        assert caught.value.where is not None
        assert caught.value.where.path == str(link)
    assert os.listdir(target) == ["inner"]
    assert os.listdir(target / "inner") == []


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_anything_but_a_regular_file_is_refused_immediately(tmp_path: Path, kind: str) -> None:
    (tmp_path / ".mtmc").mkdir()
    path = tmp_path / ".mtmc" / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, 0o600 | 0o140000)
    for attempt in (check_file, check_database, read_bytes, lambda path: replace_bytes(path, b"ours")):
        with pytest.raises(UnsafeFile, match="is not a regular file"):
            attempt(path)


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_a_database_is_refused_because_of_its_journal_files(tmp_path: Path, ending: str) -> None:
    (tmp_path / ".mtmc").mkdir()
    path = tmp_path / ".mtmc" / "store.db"
    path.touch()
    check_database(path)
    path.with_name(f"store.db{ending}").symlink_to(tmp_path / "new")
    with pytest.raises(UnsafeFile, match=ending):
        check_database(path)


def test_a_file_outside_the_state_folder_may_be_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with writing(link) as stream:
        stream.write(b"new")
    assert (read_bytes(link), target.read_bytes()) == (b"new", b"new")


def test_a_link_above_the_project_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    path = tmp_path / "home" / ".mtmc" / "file"
    make_folder(path.parent)
    replace_bytes(path, b"one")
    assert (tmp_path / "real" / ".mtmc" / "file").read_bytes() == b"one"
