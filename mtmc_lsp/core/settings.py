"""Every setting of ``[tool.mtmc]``, declared once."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.core.errors import Location, RequestError


@dataclass(frozen=True)
class LlmSettings:
    """``[tool.mtmc.llm]``: the model that ``--planner llm`` and ``--coder llm`` ask.

    The endpoint's address and key come from the environment alone (``OPENAI_BASE_URL``, ``OPENAI_API_KEY``): a project
    that was cloned must not be able to send a user's key and code elsewhere.
    """

    model: str = ""
    """The model's name at the endpoint; ``MTMC_LLM_MODEL`` overrides it."""
    temperature: float = -1.0
    """Below 0: the endpoint's own."""
    samples: int = 1
    """How many answers are asked for at once where a step is to be written; the best that verifies is taken."""
    answer_tokens: int = 8192
    """Most tokens of one answer; less is asked for where a budget leaves less."""
    context_tokens: int = 32768
    """Most tokens of one prompt, estimated; what matters least is left out of longer ones."""
    budget_tokens: int = 400_000
    """Most tokens of a run, prompts and answers together, those of parallel answers too."""
    budget_money: float = 0.0
    """Most money of a run, in the currency of the prices; 0 for no limit."""
    budget_seconds: float = 600.0
    """Most seconds that a run waits for the model."""
    price_prompt: float = 0.0
    """Price of a million prompt tokens."""
    price_answer: float = 0.0
    """Price of a million answer tokens."""
    timeout_seconds: float = 120.0
    """Most seconds for one answer."""
    retries: int = 2
    """How often a request is sent again after a rate limit or a fault of the server."""
    repairs: int = 3
    """How often the model may mend one step."""

    def __post_init__(self) -> None:
        for name in (
            "samples",
            "answer_tokens",
            "context_tokens",
            "budget_tokens",
            "budget_seconds",
            "timeout_seconds",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"llm.{name}: {getattr(self, name):g} is nothing to work with; it must be above 0")
        for name in ("budget_money", "price_prompt", "price_answer", "retries", "repairs"):
            if getattr(self, name) < 0:
                raise ValueError(f"llm.{name}: {getattr(self, name):g} makes no sense; it must not be below 0")
        if self.budget_money and not (self.price_prompt or self.price_answer):
            raise ValueError("llm.budget_money: money is counted by llm.price_prompt and llm.price_answer; set these")


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
    planner: str = "roofline"
    """Who chooses the next step: ``roofline``, or ``llm``."""
    coder: str = "builtin"
    """Who writes it: ``builtin``; ``llm``; or ``auto``, the built-in one first and a model where that cannot."""
    max_autotune: bool = False
    """Whether ``torch.compile`` in its mode ``max-autotune``, which takes minutes, is timed as a baseline too."""
    llm: LlmSettings = LlmSettings()
    """The language model, where one is asked for. Nothing here is the user's consent to ask it."""

    @property
    def compiled_baselines(self) -> tuple[str, ...]:
        """What is timed beside eager."""
        return ("compile", "max-autotune") if self.max_autotune else ("compile",)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            wrong = check(getattr(self, name))
            if wrong:
                raise ValueError(f"{name}: {wrong}")


def _wrong_archs(archs: tuple[str, ...]) -> str:
    bad = [arch for arch in archs if not re.fullmatch(r"sm_\d{2,3}a?|gfx[0-9a-f]{3,4}", arch)]
    if bad or not archs:
        return f"{bad[0] if bad else 'nothing'!r} is no architecture; write names like sm_90 or gfx942"
    return ""


PLANNERS = ("roofline", "llm")
CODERS = ("builtin", "auto", "llm")


def _one_of(known: tuple[str, ...]) -> typing.Callable[[Any], str]:
    return lambda value: "" if value in known else f"{value!r} does not exist; there is {', '.join(known)}"


CHECKS: dict[str, typing.Callable[[Any], str]] = {
    "archs": _wrong_archs,
    "precision": lambda value: "" if value in ("budget", "strict") else f"{value!r} is neither budget nor strict",
    "budget_seconds": lambda value: "" if value > 0 else f"{value:g} is no time to work in; it must be above 0",
    "max_steps": lambda value: "" if value > 0 else f"{value} is no number of steps; it must be above 0",
    "planner": _one_of(PLANNERS),
    "coder": _one_of(CODERS),
}
"""Setting to what is wrong with a value of it; empty where nothing is."""


def read_settings(folder: Path) -> Settings:
    """The settings of the nearest ``pyproject.toml`` at or above ``folder``; defaults where there is none.

    Raises:
        RequestError: an unknown name or a value of the wrong kind; says which and what is allowed.
    """
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if file.is_file():
            return _from_file(file)
    return Settings()


def changed(settings: Settings, **values: Any) -> Settings:
    """``settings`` with the given values, where they are not ``None``; ``llm`` may be a table of its own settings.

    Raises:
        RequestError: a value is not allowed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        if isinstance(given.get("llm"), dict):
            given["llm"] = dataclasses.replace(settings.llm, **given["llm"])
        return dataclasses.replace(settings, **given)
    except ValueError as error:
        raise RequestError(str(error), remedy="Change the option.") from None


def _from_file(file: Path) -> Settings:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text).get("tool", {}).get("mtmc", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RequestError(f"cannot be read: {error}", where=Location(str(file)), remedy="Mend it.") from None
    if not isinstance(table, dict):
        raise RequestError("tool.mtmc is no table", where=Location(str(file)), remedy="Write [tool.mtmc].")
    llm = table.pop("llm", {})
    if not isinstance(llm, dict):
        raise RequestError("tool.mtmc.llm is no table", where=Location(str(file)), remedy="Write [tool.mtmc.llm].")
    values = _values(table, Settings, "tool.mtmc", file, text)
    try:
        values["llm"] = LlmSettings(**_values(llm, LlmSettings, "tool.mtmc.llm", file, text))
    except ValueError as error:
        raise RequestError(str(error), where=Location(str(file)), remedy="Change the value.") from None
    if "/" in values.get("python", ""):
        values["python"] = str(file.parent / Path(values["python"]).expanduser())
    return Settings(**values)


def _values(table: dict[str, Any], kind: type, header: str, file: Path, text: str) -> dict[str, Any]:
    """A table's settings by the names of ``kind``'s fields."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = Location(str(file), _line_of(text, key, header))
        name = key.replace("-", "_")
        if name not in hints:
            known = ", ".join(field.name for field in dataclasses.fields(kind))
            raise RequestError(f"no setting {key!r} in [{header}]", where=where, remedy=f"There are {known}.")
        values[name] = _checked(name, value, hints[name], where, header)
    return values


def _line_of(text: str, key: str, table: str) -> int:
    """The line that sets ``key``, after the table's header where there is one."""
    header = re.search(rf"^[ \t]*\[{re.escape(table)}\]", text, re.MULTILINE)
    start = header.end() if header else 0
    found = re.compile(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=", re.MULTILINE).search(text, start)
    return text.count("\n", 0, found.start()) + 1 if found else 0


def _checked(name: str, value: Any, kind: Any, where: Location, table: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if typing.get_origin(kind) is tuple:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        value = tuple(value) if fits else value
    else:
        fits = type(value) is kind
    if not fits:
        wanted = {str: "a string", float: "a number", int: "a whole number", bool: "true or false"}.get(
            kind, "a list of strings"
        )
        raise RequestError(f"{name} in [{table}] cannot be {value!r}", where=where, remedy=f"It must be {wanted}.")
    wrong = CHECKS[name](value) if name in CHECKS else ""
    if wrong:
        raise RequestError(f"{name} in [{table}]: {wrong}", where=where, remedy="Change the value.")
    return value
