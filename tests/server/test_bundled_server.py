"""The server with the libraries that the VS Code extension brings, in an environment that has only torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from editor import editor

from tests import test_architecture

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "vscode-extension" / "scripts" / "bundle_server.py"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
TOPS = {"attrs": ("attr", "attrs"), "nvidia-ml-py": ("pynvml",)}
"""Packages and modules in a library, if there are others than its name says."""
OPTIONAL = {"lightgbm", "openai"}
USERS = "the user's"
MODEL = f"""\
import attr
import torch

assert attr.__version__ == "{USERS}", attr.__file__


# mtmc: x=f32[8,48]
def f(x):
    return torch.softmax(torch.relu(x) + 1, -1)
"""


def bundle_script() -> Any:
    spec = importlib.util.spec_from_file_location("bundle_server", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def libraries() -> list[str]:
    script = bundle_script()
    return [*script.PURE, *script.COMPILED]


def modules(library: str) -> tuple[str, ...]:
    return TOPS.get(library, (library.replace("-", "_"),))


def installed(name: str) -> Path | None:
    """The package or module of this name in this environment."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def users_environment(folder: Path) -> Path:
    """An environment with torch, triton and the user's ``attr``, but without the server's libraries. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    bundled = {name for library in libraries() for name in modules(library)} - {"typing_extensions"}
    torch = installed("torch")
    assert torch is not None
    for path in torch.parent.iterdir():
        if path.name.split(".")[0] not in bundled and path.suffix != ".pth" and not path.name.startswith("mtmc"):
            (purelib / path.name).symlink_to(path)
    (purelib / "attr.py").write_text(f'__version__ = "{USERS}"\n')
    return python


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The folder of the server as in the extension, with this environment's libraries."""
    folder = tmp_path / "extension" / "server"
    shutil.copytree(ROOT / "mtmc_lsp", folder / "mtmc_lsp", ignore=shutil.ignore_patterns("__pycache__"))
    pure = folder / "mtmc-libraries" / "any"
    pure.mkdir(parents=True)
    for library in libraries():
        for name in modules(library):
            path = installed(name)
            if path is not None:
                (pure / path.name).symlink_to(path)
    return folder


@pytest.mark.asyncio
async def test_the_bundled_server_plans_with_the_users_packages_in_the_workers(tmp_path: Path, server: Path) -> None:
    python = users_environment(tmp_path / "environment")
    for name in ("mtmc_lsp", "pygls", "tree_sitter"):
        assert subprocess.run([python, "-I", "-c", f"import {name}"], capture_output=True, check=False).returncode, name
    (tmp_path / "user").mkdir()
    command = [str(python), "-I", str(server / "mtmc_lsp" / "launch.py"), "mtmc_lsp.server.app"]
    settings = {"archs": ["sm_90"]}
    async with editor(tmp_path / "user", command, settings=settings, variables={"PYTHONPATH": ""}) as ide:
        uri = ide.open(MODEL)
        job = (await ide.command("plan", uri, "f"))["job"]
        message = await ide.finished(job)
        assert "1. Fuse all of f into one kernel" in message


def test_the_bundle_contains_every_library_that_the_server_imports() -> None:
    tops = set()
    for entry in ("server/app.py", "server/host.py", "server/recorder.py"):
        for file in {entry} | test_architecture.ours(entry):
            tops |= {module.split(".")[0] for module in test_architecture.imports(file)}
    external = tops - set(sys.stdlib_module_names) - {"__future__", "mtmc_lsp"} - OPTIONAL
    bundled = {name for library in libraries() for name in modules(library)}
    assert {"pygls", "tree_sitter", "pynvml"} <= external <= bundled


def test_the_bundle_contains_what_its_libraries_require() -> None:
    names = set(libraries())
    for library in names:
        try:
            requirements = importlib.metadata.requires(library) or []
        except importlib.metadata.PackageNotFoundError:
            assert library in ("exceptiongroup", "tomli"), "only older versions of Python need these"
            continue
        needed = {
            re.split(r"[^\w-]", line)[0].replace("_", "-").lower() for line in requirements if "extra ==" not in line
        }
        assert needed <= names, library


def test_the_locked_versions_fit_the_package_and_have_wheels_for_every_python_and_platform() -> None:
    script = bundle_script()
    entries = re.findall(r"^(\S+)==(\S+) \\\n((?:    --hash=\S+(?: \\)?\n)+)", script.LOCK.read_text(), re.MULTILINE)
    versions = {name: version for name, version, _ in entries}
    wheels = {name: hashes.count("--hash=sha256:") for name, _, hashes in entries}
    assert set(versions) == set(libraries())
    count = len(script.PYTHONS) * len(script.PLATFORMS)
    # tree-sitter-python uses the stable ABI: one wheel for every version of Python.
    expected = dict.fromkeys(script.PURE, 1) | {"tree-sitter": count, "tree-sitter-python": len(script.PLATFORMS)}
    assert wheels == expected
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        name, minimum = re.match(r"([\w-]+)>=([\d.]+)", line).groups()  # type: ignore[union-attr]
        if name in versions:
            assert [int(part) for part in versions[name].split(".")] >= [int(part) for part in minimum.split(".")], name
    assert f">=3.{script.PYTHONS[0][2:]},<3.{int(script.PYTHONS[-1][2:]) + 1}" == project["requires-python"]


def test_the_extension_has_the_version_of_its_server() -> None:
    package = json.loads((ROOT / "vscode-extension" / "package.json").read_text())
    assert package["version"] == toml.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
