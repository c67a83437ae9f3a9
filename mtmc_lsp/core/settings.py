"""Every setting of ``[tool.mtmc]``, declared in one place."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.run import Placement


@dataclass(frozen=True)
class LlmSettings:
    """``[tool.mtmc.llm]``: the model for ``--planner llm`` and ``--coder llm``.

    The endpoint's address and key come only from the environment (``OPENAI_BASE_URL``, ``OPENAI_API_KEY``): a cloned project
    must not be able to send the user's key and code to another host.
    """

    model: str = ""
    """The model's name at the endpoint. ``MTMC_LLM_MODEL`` overrides it."""
    temperature: float = -1.0
    """Below 0: the endpoint's default."""
    samples: int = 1
    """Number of answers sampled in parallel for each step; the best verified one is used."""
    answer_tokens: int = 8192
    """Maximum tokens of one answer; reduced when a budget has fewer left."""
    context_tokens: int = 32768
    """Maximum estimated tokens of one prompt; the least important parts of a longer prompt are dropped."""
    budget_tokens: int = 400_000
    """Maximum tokens of a run: prompts and all answers, parallel ones included."""
    budget_money: float = 0.0
    """Maximum cost of a run, in the currency of the prices; 0 for no limit."""
    budget_seconds: float = 600.0
    """Maximum time in seconds that a run waits for the model."""
    price_prompt: float = 0.0
    """Price per million prompt tokens."""
    price_answer: float = 0.0
    """Price per million answer tokens."""
    timeout_seconds: float = 120.0
    """Maximum time for one answer."""
    retries: int = 2
    """Number of retries after a rate limit or a server error."""
    repairs: int = 3
    """Maximum number of repairs by the model per step."""

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
                raise ValueError(f"llm.{name}: must be above 0, not {getattr(self, name):g}")
        for name in ("budget_money", "price_prompt", "price_answer", "retries", "repairs"):
            if getattr(self, name) < 0:
                raise ValueError(f"llm.{name}: must not be below 0, is {getattr(self, name):g}")
        if self.budget_money and not (self.price_prompt or self.price_answer):
            raise ValueError("llm.budget_money: needs a price; set llm.price_prompt or llm.price_answer")


@dataclass(frozen=True)
class Settings:
    """The settings of a project. Command-line options override them."""

    python: str = ""
    """The interpreter for user code; empty to search VIRTUAL_ENV, .venv and the current interpreter."""
    archs: tuple[str, ...] = ("sm_80", "sm_90", "gfx942")
    """Architectures for which kernels are cross-compiled without a GPU."""
    baseline: str = "current"
    """What a version must beat to be delivered. ``current``: what the user runs today, eager mode unless the file or the
    recorded calls compile the target; ``eager``; ``compile``: ``torch.compile``; ``best``: the fastest of all that are timed."""
    precision: str = "budget"
    """``budget``: steps may change rounding within the error budget. ``strict``: such steps are never proposed."""
    budget_seconds: float = 300.0
    """Time limit of a run in seconds."""
    max_steps: int = 24
    """Maximum number of steps in a run."""
    planner: str = "roofline"
    """What chooses the next step: ``roofline``, ``ranker`` or ``lm`` (trained policies), or ``llm``."""
    policy_file: str = ""
    """The model file of ``ranker``, or the policy folder of ``lm``. Empty: the shipped model. A relative path starts at the
    folder of ``pyproject.toml``."""
    search: str = "greedy"
    """How steps are tried: ``greedy``, each on the last accepted version; ``beam`` or ``mcts``, on several versions in a tree."""
    coder: str = "builtin"
    """What writes the step: ``builtin``, ``llm``, or ``auto`` (built-in first, then the model for what it cannot write)."""
    place: str = "end"
    """Where generated code goes: ``end``, one block at the end of the file with its imports, or ``above`` the target."""
    exclude_actions: tuple[str, ...] = ()
    """Action kinds and rewrite rules that the planner never proposes, such as ``autotune``."""
    cluster_files: tuple[str, ...] = ()
    """Patterns of further files of the project that workers of a cluster need, such as ``configs/*.json``. Modules that a target
    imports are sent without being named."""
    max_autotune: bool = False
    """Whether to time ``torch.compile`` in ``max-autotune`` mode as another baseline. This takes minutes."""
    llm: LlmSettings = LlmSettings()
    """Language model settings. None of them is the user's consent to use a model."""

    @property
    def compiled_baselines(self) -> tuple[str, ...]:
        """Baselines other than eager."""
        return ("compile", "max-autotune") if self.max_autotune else ("compile",)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            problem = check(getattr(self, name))
            if problem:
                raise ValueError(f"{name}: {problem}")


def _archs_problem(archs: tuple[str, ...]) -> str:
    invalid = [arch for arch in archs if not re.fullmatch(r"sm_\d{2,3}a?|gfx[0-9a-f]{3,4}", arch)]
    if invalid or not archs:
        return f"{invalid[0] if invalid else 'nothing'!r} is not an architecture; use names like sm_90 or gfx942"
    return ""


BASELINES = ("current", "eager", "compile", "best")
PLANNERS = ("roofline", "ranker", "lm", "llm")
RANDOM = "random"
"""A planner for measurements alone: what chance reaches."""
SEARCHES = ("greedy", "beam", "mcts")
CODERS = ("builtin", "auto", "llm")
PLACES = tuple(place.value for place in Placement)


def _one_of(allowed: tuple[str, ...]) -> typing.Callable[[Any], str]:
    return lambda value: "" if value in allowed else f"{value!r} is not one of {', '.join(allowed)}"


def _files_problem(patterns: tuple[str, ...]) -> str:
    invalid = [pattern for pattern in patterns if not pattern or pattern.startswith("/") or ".." in Path(pattern).parts]
    return (
        f"{invalid[0]!r} is not a pattern of files inside the project; use one like configs/*.json" if invalid else ""
    )


def _exclude_problem(names: tuple[str, ...]) -> str:
    invalid = [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)]
    return f"{invalid[0]!r} is not the name of an action or rewrite rule; use names like autotune" if invalid else ""


CHECKS: dict[str, typing.Callable[[Any], str]] = {
    "archs": _archs_problem,
    "baseline": lambda value: _one_of(BASELINES)(value),
    "precision": lambda value: "" if value in ("budget", "strict") else f"{value!r} is neither budget nor strict",
    "budget_seconds": lambda value: "" if value > 0 else f"{value:g} seconds are not possible; it must be above 0",
    "max_steps": lambda value: "" if value > 0 else f"{value} steps are not possible; it must be above 0",
    "planner": lambda value: "" if value == RANDOM else _one_of(PLANNERS)(value),
    "search": _one_of(SEARCHES),
    "coder": _one_of(CODERS),
    "place": _one_of(PLACES),
    "exclude_actions": _exclude_problem,
    "cluster_files": _files_problem,
}
"""Setting to a function that returns the problem with a value, or an empty string."""


MAX_FILE_BYTES = 1 << 20
"""Maximum size of a ``pyproject.toml``."""


def read_settings(folder: Path) -> Settings:
    """Read the nearest ``pyproject.toml`` at or above ``folder``; defaults if there is none.

    Raises:
        RequestError: a name is unknown or a value has the wrong type; the message says what is allowed.
    """
    for ancestor in (folder, *folder.parents):
        file = ancestor / "pyproject.toml"
        if file.is_file():
            return _from_file(file)
    return Settings()


def override_settings(settings: Settings, **values: Any) -> Settings:
    """``settings`` with all ``values`` that are not ``None``. ``llm`` may be a dict of settings for that table.

    Raises:
        RequestError: a value is not allowed.
    """
    overrides = {name: value for name, value in values.items() if value is not None}
    try:
        if isinstance(overrides.get("llm"), dict):
            overrides["llm"] = dataclasses.replace(settings.llm, **overrides["llm"])
        return dataclasses.replace(settings, **overrides)
    except ValueError as error:
        raise RequestError(str(error), remedy="Change the option.") from None


def _from_file(file: Path) -> Settings:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(
                f"has more than {MAX_FILE_BYTES >> 20} MB", where=Location(str(file)), remedy="Correct the file."
            )
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text).get("tool", {}).get("mtmc", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RequestError(f"cannot be read: {error}", where=Location(str(file)), remedy="Correct the file.") from None
    if not isinstance(table, dict):
        raise RequestError("tool.mtmc is not a table", where=Location(str(file)), remedy="Write [tool.mtmc].")
    llm = table.pop("llm", {})
    if not isinstance(llm, dict):
        raise RequestError("tool.mtmc.llm is not a table", where=Location(str(file)), remedy="Write [tool.mtmc.llm].")
    values = _values(table, Settings, "tool.mtmc", file, text)
    try:
        values["llm"] = LlmSettings(**_values(llm, LlmSettings, "tool.mtmc.llm", file, text))
    except ValueError as error:
        raise RequestError(str(error), where=Location(str(file)), remedy="Change the value.") from None
    if "/" in values.get("python", ""):
        values["python"] = str(file.parent / Path(values["python"]).expanduser())
    if values.get("policy_file"):
        values["policy_file"] = str(file.parent / Path(values["policy_file"]).expanduser())
    return Settings(**values)


def _values(table: dict[str, Any], kind: type, header: str, file: Path, text: str) -> dict[str, Any]:
    """Read a table into values for the fields of ``kind``."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = Location(str(file), _line_of(text, key, header))
        name = key.replace("-", "_")
        if name not in hints:
            allowed = ", ".join(field.name for field in dataclasses.fields(kind))
            raise RequestError(
                f"unknown setting {key!r} in [{header}]", where=where, remedy=f"Available settings: {allowed}."
            )
        values[name] = _checked(name, value, hints[name], where, header)
    return values


def _line_of(text: str, key: str, table: str) -> int:
    """1-based line that sets ``key``, searched after the table's header if there is one."""
    header = re.search(rf"^[ \t]*\[{re.escape(table)}\]", text, re.MULTILINE)
    start = header.end() if header else 0
    match = re.compile(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=", re.MULTILINE).search(text, start)
    return text.count("\n", 0, match.start()) + 1 if match else 0


def _checked(name: str, value: Any, kind: Any, where: Location, table: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if typing.get_origin(kind) is tuple:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        value = tuple(value) if fits else value
    else:
        fits = type(value) is kind
    if not fits:
        expected = {str: "a string", float: "a number", int: "a whole number", bool: "true or false"}.get(
            kind, "a list of strings"
        )
        raise RequestError(f"{name} in [{table}] cannot be {value!r}", where=where, remedy=f"It must be {expected}.")
    problem = CHECKS[name](value) if name in CHECKS else ""
    if problem:
        raise RequestError(f"{name} in [{table}]: {problem}", where=where, remedy="Change the value.")
    return value
