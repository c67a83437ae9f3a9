"""Every setting of ``[tool.mtmc]``, declared once."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.core.errors import Location, RequestError


@dataclass(frozen=True)
class Settings:
    """The settings of a project; the command line overrides each."""

    python: str = ""
    """The interpreter that user code runs under; empty to look for one (VIRTUAL_ENV, .venv, our own)."""
    archs: tuple[str, ...] = ("sm_80", "sm_90", "gfx942")
    """Architectures that kernels are cross-compiled for where there is no GPU."""
    precision: str = "budget"
    """``budget``: steps may change rounding within the error budget; ``strict``: such steps are never proposed."""
    budget_seconds: float = 300.0
    """Wall time of a run."""
    max_steps: int = 24
    """Most steps that a run tries."""


CHOICES = {"precision": ("budget", "strict")}


def read_settings(folder: Path) -> Settings:
    """The settings of the nearest ``pyproject.toml`` at or above ``folder``; defaults where there is none.

    Raises:
        RequestError: an unknown name or a value of the wrong kind; says which and what is allowed.
    """
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if file.exists():
            return _from_table(_load(file).get("tool", {}).get("mtmc", {}), file)
    return Settings()


def _load(file: Path) -> dict[str, Any]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"cannot be read: {error}", where=Location(str(file)), remedy="Mend the TOML.") from None


def _from_table(table: dict[str, Any], file: Path) -> Settings:
    hints = typing.get_type_hints(Settings)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in hints:
            known = ", ".join(field.name for field in dataclasses.fields(Settings))
            raise RequestError(
                f"no setting {key!r} in [tool.mtmc]", where=Location(str(file)), remedy=f"There are {known}."
            )
        values[name] = _checked(name, value, hints[name], file)
    return Settings(**values)


def _checked(name: str, value: Any, kind: Any, file: Path) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if typing.get_origin(kind) is tuple:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        value = tuple(value) if fits else value
    else:
        fits = type(value) is kind
    if not fits or (name in CHOICES and value not in CHOICES[name]):
        allowed = " or ".join(CHOICES.get(name, (getattr(kind, "__name__", "a list of strings"),)))
        raise RequestError(
            f"{name} in [tool.mtmc] cannot be {value!r}", where=Location(str(file)), remedy=f"It must be {allowed}."
        )
    return value
