"""The problems of a suite for ``mtmc bench``, and the choice of some of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.export import REFERENCE
from mtmc_lsp.core.errors import Location, MtmcError, RequestError
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.workload.directive import parse_directive

REMEDY = "A problem is a class `Model` or a function above `get_inputs`, or a function below `# mtmc: ...`."


@dataclass(frozen=True)
class Problem:
    """One problem: ``Model`` or a function with ``get_inputs``, as in KernelBench's format, or a target with a directive."""

    name: str
    """The file's path in the suite without ``.py``, then ``::`` and the target if it is not ``Model``."""
    path: Path
    """The file."""
    suite: Path
    """The suite's folder."""
    level: str
    """Such as ``level1``; empty if no folder is called so."""
    target: str = REFERENCE


@dataclass(frozen=True)
class Shard:
    """Part ``index`` of ``count`` parts of a suite; the first is 1."""

    index: int = 1
    count: int = 1


def find_problems(folder: Path) -> list[Problem]:
    """Every problem of the suite in ``folder``, ordered by level and number.

    Raises:
        RequestError: the folder does not exist, or contains no problem.
    """
    if not folder.is_dir():
        raise RequestError("no such folder", where=Location(str(folder)), remedy="Name a folder of problems.")
    suite = folder.resolve()
    problems: list[Problem] = []
    for path in suite.rglob("*.py"):
        relative = path.relative_to(suite)
        if not any(part.startswith(".") for part in relative.parts):
            problems += _problems_in(path, str(relative.with_suffix("")), suite)
    if not problems:
        raise RequestError("no problem in this folder", where=Location(str(folder)), remedy=REMEDY)
    return sorted(problems, key=lambda problem: _natural(problem.name))


def problems_of_file(file: Path) -> list[Problem]:
    """The problems in one file, whose folder is the suite.

    Raises:
        RequestError: it contains none.
    """
    path = file.resolve()
    problems = _problems_in(path, path.stem, path.parent)
    if not problems:
        raise RequestError("no problem in this file", where=Location(str(file)), remedy=REMEDY)
    return problems


def _problems_in(path: Path, name: str, suite: Path) -> list[Problem]:
    """The problem of a file in KernelBench's format, else one for each target with a directive."""
    level = _level(path)
    try:
        text = path.read_bytes()
        targets = find_targets(text, str(path))
    except (OSError, MtmcError):
        return []
    names = {target.qualname for target in targets}
    if {REFERENCE, "get_inputs"} <= names:
        return [Problem(name, path, suite, level)]
    with_directive = [target.qualname for target in targets if _has_directive(text, target)]
    # A directive above a module's forward counts for the module too.
    chosen = [qualname for qualname in with_directive if f"{qualname}.forward" not in with_directive]
    functions = [target.qualname for target in targets if target.kind is TargetKind.FUNCTION]
    if not chosen and "get_inputs" in functions[1:]:
        # The function above its inputs.
        chosen = [functions[functions.index("get_inputs") - 1]]
    return [Problem(f"{name}::{qualname}", path, suite, level, qualname) for qualname in chosen]


def _has_directive(text: bytes, target: Target) -> bool:
    try:
        return parse_directive(text, target, target.path) is not None
    except MtmcError:
        # The problem's result reports the error.
        return True


def _level(path: Path) -> str:
    return next((part for part in reversed(path.parts[:-1]) if re.fullmatch(r"level\d+", part)), "")


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that orders ``2_x`` before ``10_x``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def choose(problems: Sequence[Problem], pattern: str, limit: int | None, shard: Shard) -> list[Problem]:
    """Choose problems: by name, then a shard, then at most ``limit``.

    Args:
        pattern: a pattern such as ``level2/*``, or a part of the name; empty for all.
        limit: the number of problems, taken from each level in turn; None for all.
    """
    matching = [p for p in problems if not pattern or pattern in p.name or fnmatch.fnmatch(p.name, pattern)]
    matching = matching[shard.index - 1 :: shard.count]
    if limit is None or limit >= len(matching):
        return matching
    levels: dict[str, list[Problem]] = {}
    for problem in matching:
        levels.setdefault(problem.level, []).append(problem)
    rounds = max(len(items) for items in levels.values())
    sample = [items[i] for i in range(rounds) for items in levels.values() if i < len(items)][:limit]
    return [problem for problem in matching if problem in sample]


def parse_shard(text: str) -> Shard:
    """Read a shard such as ``2/4``.

    Raises:
        RequestError: the text has another form.
    """
    parts = re.fullmatch(r"(\d+)/(\d+)", text)
    if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
        raise RequestError(f"cannot read --shard {text}", remedy="Write i/n with i from 1 to n, as in 2/4.")
    return Shard(int(parts[1]), int(parts[2]))
