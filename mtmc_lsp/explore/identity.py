"""Ids of programs and versions, and captures without paths of this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from mtmc_lsp.app.provenance import ABSOLUTE_PATH, Build, without_absolute_paths
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.workload import Capture, Environment

ID_LENGTH = 20
NOT_IN_ID = ("kernel_names",)
"""Parts of a schedule that change nothing but names."""
DETAIL_LENGTH = 200


def portable(capture: Capture) -> Capture:
    """The capture as it is stored: paths are cut to the name of the file."""
    workload, graph = capture.workload, capture.graph
    target = replace(workload.target, path=PurePath(workload.target.path).name)
    dependencies = tuple(replace(item, path=PurePath(item.path).name) for item in graph.dependencies)
    return replace(capture, workload=replace(workload, target=target), graph=replace(graph, dependencies=dependencies))


def program_id(capture: Capture) -> str:
    """The hash of the graph and the workload. The folder of the file does not count."""
    stored = portable(capture)
    return _digest([to_json(stored.graph), to_json(stored.workload)])


def version_id(program: str, schedule: object) -> str:
    """The hash of the program's id and the schedule. Names of kernels and their order in the schedule do not count."""
    assert isinstance(schedule, Mapping)
    relevant = {name: value for name, value in schedule.items() if name not in NOT_IN_ID}
    kernels = relevant.get("kernels")
    if isinstance(kernels, list):
        relevant["kernels"] = sorted(kernels, key=_text)
    return _digest([program, relevant])


def one_line(text: str) -> str:
    """The first line of a reason without absolute paths, as :class:`~mtmc_lsp.core.learning.transitions.Transition` has it."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return ABSOLUTE_PATH.sub("", first)[:DETAIL_LENGTH]


def reason_of(error: MtmcError, suite: Path) -> str:
    """What went wrong in one line, and where in the suite."""
    place = f" ({PurePath(error.where.path).name}:{error.where.line})" if error.where is not None else ""
    return one_line(str(without_absolute_paths(error.message, suite))) + place


def environment_text(environment: Environment, build: Build) -> str:
    """``torch 2.11.0, triton 3.6.0, mtmc 0.5.0 (abc1234)``."""
    commit = f" ({build.commit})" if build.commit else ""
    return f"torch {environment.torch}, triton {environment.triton}, mtmc {build.version}{commit}"


def _digest(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:ID_LENGTH]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
