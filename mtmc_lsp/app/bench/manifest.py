"""Suites of targets in installed packages: ``SUITE/packages/*.toml`` names them, and no source is stored.

A file names a package with its version, and its targets with their workloads::

    package = "timm"
    version = "1.0.31"

    [[targets]]
    name = "timm.layers.mlp::Mlp"
    workload = ["x=f32[B,N,D] B=64 N=196 D=768 init: in_features=D"]
    tags = ["mlp"]

Where a directive cannot describe the call, as for a constructor that takes a configuration object, ``inputs`` and ``init`` are
the Python expressions that ``get_inputs`` and ``get_init_inputs`` return, and ``imports`` the statements that they need::

    inputs = ["torch.randn(4, 1024, 2048)"]
    init = ["LlamaConfig(hidden_size=2048, intermediate_size=5632)"]

How the files are copied is in :mod:`mtmc_lsp.app.bench.package_copies`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.core.errors import Location, RequestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFESTS, REQUIREMENTS = "packages", "requirements.txt"
"""The folder of the manifests in the suite's folder, and the file that installs their packages."""
HALVES = ("looking", "reporting")
"""Results of the first half may guide changes of this tool; those of the second are only reported."""
KEYS = frozenset({"name", "workload", "inputs", "init", "imports", "tags"})
"""What a target's table may contain."""


@dataclass(frozen=True)
class Entry:
    """One target of an installed package."""

    package: str
    """The name that pip knows."""
    version: str
    module: str
    """Dotted name of the module."""
    qualname: str
    workload: tuple[str, ...]
    """Lines of the directive, without ``# mtmc:``."""
    code: str
    """``get_inputs`` and ``get_init_inputs``, if there is no directive."""
    tags: tuple[str, ...]

    @property
    def name(self) -> str:
        """``MODULE::TARGET``, which is unique in a suite."""
        return f"{self.module}::{self.qualname}"

    @property
    def half(self) -> str:
        """The half of the suite, by a hash of the name."""
        return HALVES[hashlib.sha256(self.name.encode()).digest()[0] % 2]

    @property
    def requirement(self) -> str:
        """The package as pip reads it."""
        return f"{self.package}=={self.version}"


def is_manifest_folder(folder: Path) -> bool:
    """Whether the folder holds manifests instead of problems."""
    return any((folder / MANIFESTS).glob("*.toml"))


def read_manifests(folder: Path) -> tuple[Entry, ...]:
    """The entries of all manifests of the folder, ordered by package and as written.

    Raises:
        RequestError: a manifest cannot be read; names the file.
    """
    entries = [entry for path in sorted((folder / MANIFESTS).glob("*.toml")) for entry in _read(path)]
    names = [entry.name for entry in entries]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        where = Location(str(folder))
        raise RequestError(f"{repeated[0]} is in the suite twice", where=where, remedy="Remove one of them.")
    return tuple(entries)


def requirements_text(entries: Sequence[Entry]) -> str:
    """The text of ``requirements.txt`` for the packages of the entries."""
    packages = sorted({entry.requirement for entry in entries}, key=str.lower)
    return "".join(f"{line}\n" for line in ["# Written by scripts/public_suite.py requirements.", *packages])


def _read(path: Path) -> list[Entry]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return [_entry(data["package"], data["version"], item) for item in data["targets"]]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValueError, TypeError) as error:
        message = f"is not a manifest: {error}"
    except KeyError as error:
        message = f"is not a manifest: {error.args[0]} is missing"
    raise RequestError(message, where=Location(str(path)), remedy="See docs/bench.md for the format.")


def _entry(package: str, version: str, item: Mapping[str, Any]) -> Entry:
    module, separator, qualname = item["name"].partition("::")
    if not separator:
        raise ValueError(f"{item['name']} is not MODULE::TARGET")
    unknown = set(item) - KEYS
    if unknown:
        raise ValueError(f"{item['name']} has an unknown key {min(unknown)}")
    if ("workload" in item) == ("inputs" in item):
        raise ValueError(f"{item['name']} needs either a workload or inputs")
    workload = tuple(item.get("workload", ()))
    return Entry(
        package, version, module, qualname, workload, "" if workload else _input_code(item), tuple(item["tags"])
    )


def _input_code(item: Mapping[str, Any]) -> str:
    """The functions of KernelBench's format, for the end of the copied file."""
    parts = ["\n".join(item["imports"])] if "imports" in item else []
    for function, expressions in (("get_inputs", item["inputs"]), ("get_init_inputs", item.get("init", []))):
        values = "".join(f"        {expression},\n" for expression in expressions)
        parts.append(
            f"def {function}():\n    return [\n{values}    ]" if values else f"def {function}():\n    return []"
        )
    return "\n\n\n".join(parts)
