"""Where the programs of a suite come from, by which training and test sets are split."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.explore.families import families_of
from mtmc_lsp.explore.runner import in_order

PACKAGE = "package = 'some-layers'\nversion = '1.0'\n\n[[targets]]\nname = 'layers.norm::Norm'\nworkload = ['x=f32[8,8]']\ntags = []\n"


def problem(name: str) -> Problem:
    return Problem(name, Path("x.py"), Path("."), "")


@pytest.mark.parametrize("project", ["[project]\nname = 'other'\n", "[tool.x]\n", "not TOML [", ""])
def test_the_source_of_other_projects_is_not_stored(tmp_path: Path, project: str) -> None:
    (tmp_path / "pyproject.toml").write_text(project)
    families = families_of(tmp_path)
    assert not families.stores_source
    assert families.origin == tmp_path.name


def test_programs_of_the_generator_are_stored_with_source_and_the_folder_is_the_family(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mtmc-programs'\nversion = '0'\n")
    families = families_of(tmp_path)
    assert families.stores_source
    assert (families.origin, families.family(problem("norm/rms_17::rms"))) == ("generated", "norm")


def test_a_file_alone_is_a_family(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mtmc-programs'\nversion = '0'\n")
    (tmp_path / "swiglu.py").write_text("")
    families = families_of(tmp_path / "swiglu.py")
    assert (families.origin, families.family(problem("swiglu::f")), families.stores_source) == (
        "swiglu",
        "swiglu",
        False,
    )


def test_an_installed_package_is_a_family(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "layers.toml").write_text(PACKAGE)
    assert families_of(tmp_path).family(problem("layers.norm::Norm")) == "some-layers"


def test_programs_with_the_fewest_transitions_go_first(tmp_path: Path) -> None:
    from growing import grow

    grow(tmp_path, depth=1)
    problems = [problem("suite/f"), problem("suite/new"), problem("suite/other")]
    assert [item.name for item in in_order(problems, tmp_path)] == ["suite/new", "suite/other", "suite/f"]
