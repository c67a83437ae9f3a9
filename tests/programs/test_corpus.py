"""What policies learn from: generated programs in a folder, and the looking half of a suite of packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.manifest import read_manifests
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.programs.corpus import generated_programs, public_programs, write_programs
from mtmc_lsp.programs.generator import generate

ROOT = Path(__file__).resolve().parents[2]


def mtmc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mtmc_lsp", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_written_programs_are_read_with_family_origin_and_text(tmp_path: Path) -> None:
    programs = generate(30, 0)
    write_programs(programs, tmp_path / "out")
    files = generated_programs(tmp_path / "out")
    assert {(item.family, item.problem.target, item.source) for item in files} == {
        (item.family, item.target, item.source) for item in programs
    }
    assert {item.origin for item in files} == {"generated"}


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("text")
    with pytest.raises(RequestError, match="is not an empty folder"):
        write_programs(generate(3, 0), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command_writes_the_programs_that_it_counts(tmp_path: Path) -> None:
    done = mtmc(tmp_path, "programs", "out", "--count", "12", "--seed", "3")
    assert (done.returncode, done.stdout.strip()) == (0, "12 programs of 12 families in out")
    assert len(list((tmp_path / "out").glob("*/*.py"))) == 12
    again = mtmc(tmp_path, "programs", "other", "--count", "12", "--seed", "3")
    assert again.returncode == 0
    for path in (tmp_path / "out").rglob("*.py"):
        assert path.read_bytes() == (tmp_path / "other" / path.relative_to(tmp_path / "out")).read_bytes()
    one = mtmc(tmp_path, "programs", "one", "--count", "2", "--family", "rotary")
    assert one.stdout.strip() == "2 programs of 1 family in one"


def test_the_command_explains_an_unknown_family_and_a_used_folder(tmp_path: Path) -> None:
    unknown = mtmc(tmp_path, "programs", "out", "--family", "nope")
    assert unknown.returncode == 2
    assert "there is no family nope" in unknown.stderr
    assert "rotary" in unknown.stderr
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.py").write_text("")
    used = mtmc(tmp_path, "programs", "used")
    assert used.returncode == 2
    assert "is not an empty folder" in used.stderr
    assert "Name a new folder" in used.stderr


def test_only_the_looking_half_of_a_suite_is_read(tmp_path: Path) -> None:
    """A suite with targets of a package that is installed for this tool."""
    manifest = f'package = "rich"\nversion = "{importlib.metadata.version("rich")}"\n'
    names = [f"rich.color::{name}" for name in ("parse_rgb_hex", "blend_rgb", "Color.parse", "Color.downgrade")]
    names += [f"rich.cells::{name}" for name in ("cell_len", "set_cell_size", "chop_cells", "get_character_cell_size")]
    for name in names:
        manifest += f'\n[[targets]]\nname = {json.dumps(name)}\nworkload = ["x=f32[8]"]\ntags = []\n'
    (tmp_path / "suite" / "packages").mkdir(parents=True)
    (tmp_path / "suite" / "packages" / "rich.toml").write_text(manifest)
    halves = {entry.name: entry.half for entry in read_manifests(tmp_path / "suite")}
    assert set(halves.values()) == {"looking", "reporting"}
    files = public_programs(tmp_path / "suite", tmp_path / "work", sys.executable)
    assert {item.problem.name for item in files} == {name for name, half in halves.items() if half == "looking"}
    assert {(item.family, item.origin, item.source) for item in files} == {("rich", "public", "")}
    assert all(item.problem.path.is_file() for item in files)


def test_packages_that_are_not_installed_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "suite" / "packages").mkdir(parents=True)
    manifest = 'package = "no-such-package-here"\nversion = "1"\n'
    manifest += "".join(
        f'\n[[targets]]\nname = "nothing::f{i}"\nworkload = ["x=f32[8]"]\ntags = []\n' for i in range(8)
    )
    (tmp_path / "suite" / "packages" / "nothing.toml").write_text(manifest)
    assert public_programs(tmp_path / "suite", tmp_path / "work", sys.executable) == []
