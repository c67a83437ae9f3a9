"""Suites of targets in installed packages: the manifests, the copies, and the suite of this repository."""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.manifest import Entry, is_manifest_folder, read_manifests, requirements_text
from mtmc_lsp.app.bench.package_copies import copied_text, copy_targets, manifest_problems
from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
from mtmc_lsp.source.workload.directive_syntax import Reader

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SUITES = pytest.mark.parametrize("suite", ["public", "public_loops"])
LAYERS = '''\
from __future__ import annotations

import functools
from . import scale as scaling
from .. import toy
from .helpers.names import (
    NAME,
)


def unchanged(x):
    return x


class Block:
    @functools.cache
    def forward(self, x):
        """``from .helpers import x`` is text."""
        from .helpers import twice

        return twice(x)
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages with the package ``toy`` 1.0, which cannot be imported."""
    folder = tmp_path / "site"
    (folder / "toy" / "layers").mkdir(parents=True)
    (folder / "toy" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "toy" / "layers" / "__init__.py").write_text(
        "from .block import Block\n\n\ndef half(x):\n    return x / 2\n"
    )
    (folder / "toy" / "layers" / "block.py").write_text(LAYERS)
    (folder / "toy-1.0.dist-info").mkdir()
    (folder / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def entry(module: str, qualname: str, package: str = "toy", version: str = "1.0", code: str = "") -> Entry:
    return Entry(package, version, module, qualname, () if code else ("x=f32[B,64] B=8",), code, ())


def test_a_copy_imports_from_the_package_and_has_the_directive_above_the_decorators() -> None:
    copy = copied_text(
        LAYERS.encode(), entry("toy.layers.block", "Block.forward"), "/site/toy/layers/block.py"
    ).decode()
    assert (
        "from toy.layers import scale as scaling\nfrom toy import toy\nfrom toy.layers.helpers.names import (\n" in copy
    )
    assert "        from toy.layers.helpers import twice\n" in copy
    assert "``from .helpers import x`` is text" in copy
    assert "    # mtmc: x=f32[B,64] B=8\n    @functools.cache\n    def forward" in copy
    assert len(copy.splitlines()) == len(LAYERS.splitlines()) + 1


def test_a_copy_of_a_packages_init_file_imports_from_that_package() -> None:
    text = b"from .block import Block\nfrom .. import other\n\n\ndef half(x):\n    return x / 2\n"
    copy = copied_text(text, entry("toy.layers", "half"), "/site/toy/layers/__init__.py").decode()
    assert copy.startswith("from toy.layers.block import Block\nfrom toy import other\n")


def test_targets_are_copied_without_importing_their_package(site: Path, tmp_path: Path) -> None:
    entries = [
        entry("toy.layers", "half"),
        entry("toy.layers.block", "unchanged", code="def get_inputs():\n    return [1]"),
    ]
    copies = copy_targets(entries, tmp_path, tmp_path / "work", sys.executable)
    assert not copies.skipped
    texts = [problem.path.read_text() for problem in manifest_problems(entries, tmp_path / "work")]
    assert "# mtmc: x=f32[B,64] B=8\ndef half(x):" in texts[0]
    assert texts[1].endswith("\n\n\ndef get_inputs():\n    return [1]\n")


def test_a_package_that_is_not_installed_is_skipped_with_the_command_that_installs_it(
    site: Path, tmp_path: Path
) -> None:
    entries = [entry("toy.layers", "half"), entry("absent.nn", "relu", package="absent")]
    copies = copy_targets(entries, tmp_path, tmp_path / "work", sys.executable)
    assert copies.skipped == {"absent.nn::relu"}
    assert copies.remedy == f"{sys.executable} -m pip install -r {tmp_path / 'requirements.txt'}"


def test_another_version_is_refused_with_both_versions_and_the_command(site: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotAble) as refused:
        copy_targets([entry("toy.layers", "half", version="2.1")], tmp_path, tmp_path / "work", sys.executable)
    assert refused.value.message == "the suite needs toy==2.1; installed is toy 1.0"
    assert refused.value.remedy == f"Run: {sys.executable} -m pip install -r {tmp_path / 'requirements.txt'}"


def test_a_module_that_the_package_lacks_is_named(site: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotAble, match=r"toy==1\.0 has no file of the module toy\.gone"):
        copy_targets([entry("toy.gone", "half")], tmp_path, tmp_path / "work", sys.executable)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ('name = "toy"\nworkload = ["x=f32[8]"]\ntags = []', "toy is not MODULE::TARGET"),
        ('name = "toy::f"\ntags = []', "toy::f needs either a workload or inputs"),
        (
            'name = "toy::f"\nworkload = ["x=f32[8]"]\ninputs = ["1"]\ntags = []',
            "toy::f needs either a workload or inputs",
        ),
        ('name = "toy::f"\nworkload = ["x=f32[8]"]\nsize = 1\ntags = []', "toy::f has an unknown key size"),
        ('name = "toy::f"\nworkload = ["x=f32[8]"]', "tags is missing"),
    ],
)
def test_a_wrong_manifest_is_refused_with_its_file_and_the_reason(tmp_path: Path, target: str, message: str) -> None:
    path = tmp_path / "packages" / "toy.toml"
    path.parent.mkdir()
    path.write_text(f'package = "toy"\nversion = "1.0"\n\n[[targets]]\n{target}\n')
    with pytest.raises(RequestError) as refused:
        read_manifests(tmp_path)
    assert refused.value.message == f"is not a manifest: {message}"
    assert refused.value.where is not None and refused.value.where.path == str(path)


def test_a_project_file_does_not_make_a_folder_of_problems_a_suite_of_packages(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert not is_manifest_folder(tmp_path)
    assert is_manifest_folder(BENCHMARKS / "public")


# The suite of this repository -------------------------------------------------------------------------------------


def test_the_public_suite_covers_many_packages_in_two_halves_of_similar_size() -> None:
    entries = read_manifests(BENCHMARKS / "public")
    assert len(entries) >= 150
    assert len({item.package for item in entries}) >= 20
    looking = [item for item in entries if item.half == "looking"]
    assert 0.4 < len(looking) / len(entries) < 0.6
    assert all(hashlib.sha256(item.name.encode()).digest()[0] % 2 == 0 for item in looking)


@SUITES
def test_the_requirements_name_every_package_of_the_suite(suite: str) -> None:
    folder = BENCHMARKS / suite
    command = f"python scripts/public_suite.py requirements benchmarks/{suite}"
    assert (folder / "requirements.txt").read_text() == requirements_text(read_manifests(folder)), f"run: {command}"


@SUITES
def test_every_call_of_the_suite_is_python_or_a_directive(suite: str) -> None:
    for item in read_manifests(BENCHMARKS / suite):
        ast.parse(item.code)
        reader = Reader(item.name)
        for part in reader.entries(list(enumerate(item.workload, 1))):
            if part.is_tensor:
                reader.tensor(part)
        assert item.tags, item.name
