"""The tables of a folder of transitions, and the dataclasses as their rows.

Columns that are filtered are flat; the capture, schedules and actions are JSON text. ``docs/transitions.md`` describes each
column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.learning.transitions import Outcome, Program, Transition, Version
from mtmc_lsp.core.workload import Capture

SCHEMA_VERSION = 1
"""Version of the columns; a folder of another version is refused."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """One table: a file ``NAME-*.parquet`` has these columns."""

    name: str
    columns: Mapping[str, str]
    """Names of Arrow types by column."""
    program: str
    """The column with the id of the program."""
    identity: tuple[str, ...]
    """The columns that tell two rows apart."""
    is_better: Callable[[Row, Row], bool] = lambda row, other: False
    """Whether a row replaces an earlier one of the same identity."""


PROGRAMS = Table(
    "programs",
    {
        "id": "string",
        "name": "string",
        "family": "string",
        "origin": "string",
        "target": "string",
        "operations": "int32",
        "capture": "string",
        "source": "string",
    },
    program="id",
    identity=("id",),
)
VERSIONS = Table(
    "versions",
    {
        "id": "string",
        "program": "string",
        "parent": "string",
        "action": "string",
        "depth": "int32",
        "median_us": "float64",
        "predicted_us": "float64",
        "schedule": "string",
    },
    program="program",
    identity=("id",),
    is_better=lambda row, other: other.get("median_us") is None and row.get("median_us") is not None,
)
TRANSITIONS = Table(
    "transitions",
    {
        "program": "string",
        "family": "string",
        "version": "string",
        "kind": "string",
        "key": "string",
        "rank": "int32",
        "chosen_by": "string",
        "outcome": "string",
        "result": "string",
        "before_us": "float64",
        "after_us": "float64",
        "ratio": "float64",
        "ratio_error": "float64",
        "seconds": "float64",
        "detail": "string",
        "device": "string",
        "environment": "string",
        "action": "string",
    },
    program="program",
    identity=("program", "version", "key", "device"),
)
TABLES = (PROGRAMS, VERSIONS, TRANSITIONS)


def program_row(program: Program) -> Row:
    """The row of a program."""
    return {
        "id": program.id,
        "name": program.name,
        "family": program.family,
        "origin": program.origin,
        "target": program.capture.workload.target.qualname,
        "operations": len(program.capture.graph.nodes),
        "capture": _text(to_json(program.capture)),
        "source": program.source,
    }


def program_of(row: Row) -> Program:
    """The program of a row."""
    capture = from_json(Capture, json.loads(row["capture"]))
    return Program(row["id"], row["name"], row["family"], row["origin"], capture, row["source"])


def version_row(version: Version) -> Row:
    """The row of a version."""
    return {
        "id": version.id,
        "program": version.program,
        "parent": version.parent,
        "action": version.action,
        "depth": version.depth,
        "median_us": version.median_us,
        "predicted_us": version.predicted_us,
        "schedule": _text(version.schedule),
    }


def version_of(row: Row) -> Version:
    """The version of a row."""
    return Version(
        row["id"],
        row["program"],
        row["parent"],
        row["action"],
        row["depth"],
        json.loads(row["schedule"]),
        row["median_us"],
        row["predicted_us"],
    )


def transition_row(transition: Transition, family: str) -> Row:
    """The row of a transition of a program of a family."""
    return {
        "program": transition.program,
        "family": family,
        "version": transition.version,
        "kind": str(transition.action["kind"]),
        "key": transition.key,
        "rank": transition.rank,
        "chosen_by": transition.chosen_by,
        "outcome": transition.outcome.value,
        "result": transition.result,
        "before_us": transition.before_us,
        "after_us": transition.after_us,
        "ratio": transition.ratio,
        "ratio_error": transition.ratio_error,
        "seconds": transition.seconds,
        "detail": transition.detail,
        "device": transition.device,
        "environment": transition.environment,
        "action": _text(transition.action),
    }


def transition_of(row: Row) -> Transition:
    """The transition of a row."""
    return Transition(
        program=row["program"],
        version=row["version"],
        action=json.loads(row["action"]),
        key=row["key"],
        rank=row["rank"],
        chosen_by=row["chosen_by"],
        outcome=Outcome(row["outcome"]),
        result=row["result"],
        before_us=row["before_us"],
        after_us=row["after_us"],
        ratio=row["ratio"],
        ratio_error=row["ratio_error"],
        seconds=row["seconds"],
        detail=row["detail"],
        device=row["device"],
        environment=row["environment"],
    )


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
