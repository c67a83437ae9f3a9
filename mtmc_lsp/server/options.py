"""What the client sets: once, by ``initializationOptions``, and any time, by ``workspace/configuration``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

SECTION = "mtmc"
"""The section of the client's settings that is ours."""

LLM = "llm_"
"""Before the names of those settings that are a table's of their own, ``[tool.mtmc.llm]``."""


@dataclass(frozen=True)
class Options:
    """``initializationOptions``; each is off unless the client says otherwise."""

    trusted: bool = False
    """Whether the client has asked the user and may vouch that the workspace's code can be run."""
    run_state: bool = False
    """Whether to send ``mtmc/runState`` notifications."""
    diff_view: bool = False
    """Whether the client shows diffs of its own, so that a whole run needs no refactor preview."""
    offers_workload: bool = False
    """Whether the client itself offers to write a missing workload (``mtmc/runState`` tells it), so that the server does not."""
    tells_results: bool = False
    """Whether the client itself tells what a job came to (``mtmc/runState`` has it); the server then tells failures alone."""


@dataclass(frozen=True)
class ClientSettings:
    """The client's settings; those of a run override ``[tool.mtmc]``, as the command line's options do."""

    python: str | None = None
    archs: tuple[str, ...] | None = None
    precision: str | None = None
    budget_seconds: float | None = None
    max_steps: int | None = None
    planner: str | None = None
    coder: str | None = None
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
    """The program that *Record inputs from a command* runs, without being asked which."""
    inlay_hints: bool = False
    """Show the measured time at the end of the ``def`` line."""
    ignored_checks: tuple[str, ...] = ()
    """Codes of static checks that are not reported."""

    def of_run(self) -> dict[str, Any]:
        """Those that a run takes, where they are set."""
        names = ("python", "archs", "precision", "budget_seconds", "max_steps", "planner", "coder")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        model = {f.name.removeprefix(LLM): getattr(self, f.name) for f in fields(self) if f.name.startswith(LLM)}
        model = {name: value for name, value in model.items() if value is not None}
        return {**found, "llm": model} if model else found


def read_options(data: Any) -> Options:
    """Options from what the client sent; what does not fit is left at its default."""
    given = data if isinstance(data, dict) else {}
    names = (item.name for item in fields(Options))
    return Options(**{name: True for name in names if given.get(_camel(name)) is True})


def read_settings(data: Any) -> tuple[ClientSettings, list[str]]:
    """Settings from what the client sent, and a sentence for each that does not fit and is therefore left out."""
    given = data if isinstance(data, dict) else {}
    values: dict[str, Any] = {}
    wrong = []
    for field in fields(ClientSettings):
        name = _camel(field.name)
        value = given.get(name)
        if value is None or value == "":
            continue
        fitted = _fitted(str(field.type), value)
        if fitted is None:
            wrong.append(f"setting {SECTION}.{name} cannot be {value!r}, so it is left out")
        else:
            values[field.name] = fitted
    return ClientSettings(**values), wrong


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _fitted(kind: str, value: Any) -> Any:
    """The value as the kind of setting takes it; None where it does not fit."""
    if kind.startswith("tuple"):
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return tuple(value) if is_list else None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind.startswith("float"):
        return float(value) if number and value >= 0 else None
    if kind.startswith("int"):
        return int(value) if number and value > 0 and int(value) == value else None
    return value if isinstance(value, bool if kind == "bool" else str) else None
