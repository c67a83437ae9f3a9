"""Options of the client (``initializationOptions``) and its settings (``workspace/configuration``)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

SECTION = "mtmc"
"""Section of the client's settings that this server reads."""

LLM = "llm_"
"""Prefix of the settings that belong to ``[tool.mtmc.llm]``."""


@dataclass(frozen=True)
class Options:
    """``initializationOptions``; all default to false."""

    trusted: bool = False
    """Whether the user trusts the code of the workspace, as confirmed by the client."""
    run_state: bool = False
    """Whether to send ``mtmc/runState`` notifications."""
    diff_view: bool = False
    """Whether the client has its own diff view, so that no refactor preview is needed."""
    offers_workload: bool = False
    """Whether the client offers to add a missing workload, based on ``mtmc/runState``; the server then does not offer it."""
    shows_results: bool = False
    """Whether the client shows the result of a job, based on ``mtmc/runState``; the server then shows only failures."""
    marks_syntax_errors: bool = False
    """Whether another server of the client marks syntax errors, so that this one does not."""


@dataclass(frozen=True)
class ClientSettings:
    """The client's settings. Run settings override ``[tool.mtmc]``, like command-line options."""

    python: str | None = None
    archs: tuple[str, ...] | None = None
    baseline: str | None = None
    precision: str | None = None
    budget_seconds: float | None = None
    max_steps: int | None = None
    planner: str | None = None
    policy_file: str | None = None
    coder: str | None = None
    place: str | None = None
    llm_model: str | None = None
    llm_temperature: float | None = None
    llm_samples: int | None = None
    llm_context_tokens: int | None = None
    llm_budget_tokens: int | None = None
    llm_budget_seconds: float | None = None
    llm_budget_money: float | None = None
    llm_price_prompt: float | None = None
    llm_price_answer: float | None = None
    record_command: str = ""
    """The program that *Record inputs from a command* runs; if empty, the user is asked."""
    inlay_hints: bool = False
    """Show the measured time at the end of the ``def`` line."""
    ignored_checks: tuple[str, ...] = ()
    """Codes of static checks that are not reported."""

    def run_settings(self) -> dict[str, Any]:
        """The settings of a run that are set."""
        names = (
            *("python", "archs", "baseline", "precision", "budget_seconds", "max_steps"),
            *("planner", "policy_file", "coder", "place"),
        )
        settings = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        model_settings = {
            f.name.removeprefix(LLM): getattr(self, f.name) for f in fields(self) if f.name.startswith(LLM)
        }
        model_settings = {name: value for name, value in model_settings.items() if value is not None}
        return {**settings, "llm": model_settings} if model_settings else settings


def read_options(data: Any) -> Options:
    """Parse options; invalid values keep their default."""
    values = data if isinstance(data, dict) else {}
    names = (item.name for item in fields(Options))
    return Options(**{name: True for name in names if values.get(_camel(name)) is True})


def read_settings(data: Any) -> tuple[ClientSettings, list[str]]:
    """Parse settings. Returns them and a message for each invalid value, which is ignored."""
    data_by_name = data if isinstance(data, dict) else {}
    values: dict[str, Any] = {}
    errors = []
    for field in fields(ClientSettings):
        name = _camel(field.name)
        value = data_by_name.get(name)
        if value is None or value == "":
            continue
        converted = _converted(str(field.type), value)
        if converted is None:
            errors.append(f"setting {SECTION}.{name} is ignored: invalid value {value!r}")
        else:
            values[field.name] = converted
    return ClientSettings(**values), errors


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _converted(kind: str, value: Any) -> Any:
    """The value converted to the type ``kind``; None if it is invalid."""
    if kind.startswith("tuple"):
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return tuple(value) if is_list else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind.startswith("float"):
        return float(value) if is_number and value >= 0 else None
    if kind.startswith("int"):
        return int(value) if is_number and value > 0 and int(value) == value else None
    return value if isinstance(value, bool if kind == "bool" else str) else None
