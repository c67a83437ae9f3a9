"""Copies of installed modules that contain a suite's targets, as files of an ordinary project with a directive each.

The copies are written at run time below ``.mtmc``, so the repository and the results contain no source of other people.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.bench.manifest import REQUIREMENTS, Entry
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.core.errors import EnvironmentNotAble, Location
from mtmc_lsp.process import project_files
from mtmc_lsp.process.isolation import LEAVE_WORKING_FOLDER
from mtmc_lsp.source.syntax import line_start, parse_with_recovery, text_of, walk, with_decorators
from mtmc_lsp.source.targets import find_definition

LOCATE_SECONDS = 60.0
# Runs in the user's interpreter. Only the top package's location is looked up: importing it could take seconds or a GPU.
LOCATE = """
import importlib.metadata as metadata, importlib.util, json, os
def located(module):
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return ""
    folders = spec.submodule_search_locations
    if not parts:
        return spec.origin
    stems = [os.path.join(folder, *parts) for folder in folders or ()]
    files = [stem + ending for stem in stems for ending in (".py", os.sep + "__init__.py")]
    return next((file for file in files if os.path.isfile(file)), "")
def version(package):
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
asked = json.load(sys.stdin)
versions = {package: version(package) for package in asked}
files = {module: located(module) for package, modules in asked.items() if versions[package] for module in modules}
print(json.dumps({"versions": versions, "files": files}))
"""


@dataclass(frozen=True)
class Copies:
    """What was copied."""

    skipped: frozenset[str]
    """Names of the entries whose package is not installed."""
    remedy: str
    """The command that installs all packages of the suite."""


def manifest_problems(entries: Iterable[Entry], work: Path) -> list[Problem]:
    """The problem of each entry, with its half as the level. Its file exists after :func:`copy_targets`.

    Args:
        work: the folder of the copies.
    """
    return [Problem(entry.name, work / _file_name(entry), work, entry.half, entry.qualname) for entry in entries]


def copy_targets(entries: Sequence[Entry], folder: Path, work: Path, python: str) -> Copies:
    """Write a copy of its module for each entry whose package is installed.

    Args:
        folder: the suite's folder, with the manifests.
        work: the folder of the copies.
        python: the interpreter that has the packages.

    Raises:
        EnvironmentNotAble: an installed package has another version, or lacks a module of the suite.
    """
    remedy = f"{python} -m pip install -r {folder / REQUIREMENTS}"
    versions, files = _locate(entries, python)
    installed = [entry for entry in entries if versions[entry.package]]
    others = sorted({f"{e.package} {versions[e.package]}" for e in installed if versions[e.package] != e.version})
    if others:
        wanted = sorted({entry.requirement for entry in installed if versions[entry.package] != entry.version})
        raise EnvironmentNotAble(
            f"the suite needs {', '.join(wanted)}; installed is {', '.join(others)}", remedy=f"Run: {remedy}"
        )
    # A project of its own: the settings and modules of the folder around it do not apply.
    _write(work / "pyproject.toml", b"[project]\nname = 'copies'\nversion = '0'\n")
    for entry in installed:
        if not files[entry.module]:
            raise EnvironmentNotAble(
                f"{entry.requirement} has no file of the module {entry.module}", remedy=f"Run: {remedy}"
            )
        file = Path(files[entry.module])
        _write(work / _file_name(entry), copied_text(file.read_bytes(), entry, str(file)))
    return Copies(frozenset(entry.name for entry in entries if not versions[entry.package]), remedy)


def _file_name(entry: Entry) -> str:
    # Its folder is in sys.path, so the name must not be that of a package.
    return f"{entry.module}.{entry.qualname}".replace(".", "_") + "_copy.py"


def copied_text(text: bytes, entry: Entry, path: str) -> bytes:
    """The module's text as a file outside its package: absolute imports, the directive, and the entry's inputs at the end.

    Raises:
        RequestError: the module does not contain the target.
    """
    is_package = Path(path).name == "__init__.py"
    node = with_decorators(find_definition(text, path, entry.qualname).node)
    start = line_start(text, node.start_byte)
    margin = text[start : node.start_byte]
    directive = b"".join(margin + f"# mtmc: {line}\n".encode() for line in entry.workload)
    edits = [(start, start, directive)]
    root, _ = parse_with_recovery(text)
    for item in walk(root):
        if item.type == "relative_import":
            edits.append(
                (item.start_byte, item.end_byte, _absolute(text_of(item), entry.module, is_package=is_package).encode())
            )
    for first, last, replacement in sorted(edits, reverse=True):
        text = text[:first] + replacement + text[last:]
    return text + (f"\n\n{entry.code}\n".encode() if entry.code else b"")


def _absolute(relative: str, module: str, *, is_package: bool) -> str:
    """The absolute name of a relative import in ``module``."""
    name = relative.lstrip(".")
    levels = len(relative) - len(name) - is_package
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - levels], *([name.strip()] if name.strip() else [])])


def _locate(entries: Sequence[Entry], python: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The installed version of each package, and the file of each module; empty for what is not installed."""
    asked: dict[str, list[str]] = {}
    for entry in entries:
        asked.setdefault(entry.package, []).append(entry.module)
    try:
        done = subprocess.run(
            [python, "-c", f"{LEAVE_WORKING_FOLDER}{LOCATE}"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=LOCATE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentNotAble(
            f"cannot look up packages with {python}: {error}", remedy="Name another interpreter with --python."
        ) from None
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["versions"], answer["files"]


def _write(path: Path, text: bytes) -> None:
    try:
        project_files.make_folder(path.parent)
        # Atomic, because several benches may share the folder.
        project_files.replace_bytes(path, text)
    except OSError as error:
        raise EnvironmentNotAble(
            f"cannot be written: {error.strerror}", where=Location(str(path)), remedy="Name another --out."
        ) from None
