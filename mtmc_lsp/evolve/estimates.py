"""Estimates of a version from its schedule: time, memory and launches. A language model's kernels are not in the schedule."""

from __future__ import annotations

import ast
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Author, Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import CannotFuse
from mtmc_lsp.llm.coder.code_policy import torch_calls
from mtmc_lsp.llm.coder.editable_text import functions_of, split_code
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import launches
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.memory import peak_bytes
from mtmc_lsp.tuning.schedule_cost import estimated_us

LEAST_SHARE = 0.1
"""Least share of an estimate that is left after the launches that a model saved are subtracted."""


def estimate_us(capture: Capture, candidate: Candidate, device: DeviceModel) -> float | None:
    """Predicted microseconds of a version at the sizes of a capture; ``None`` if the cost model cannot read it.

    Of the kernels of a language model, only the launches that they save count.
    """
    us = estimated_us(capture.graph, candidate.schedule, device)
    if us is None or candidate.author is Author.BUILTIN:
        return us
    scheduled = launches_of(capture.graph, replace(candidate, author=Author.BUILTIN))
    saved = scheduled - launches_of(capture.graph, candidate)
    return max(LEAST_SHARE * us, us - device.launch_us * saved)


def launches_of(graph: Graph, candidate: Candidate) -> int:
    """Kernels and torch calls of one call of a version; 0 if that is unknown."""
    if candidate.author is Author.MODEL and candidate.code is not None:
        editable = split_code(candidate.code)
        launcher = functions_of(editable.text)[editable.launcher]
        kernels = sum(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) for node in ast.walk(launcher)
        )
        return kernels + torch_calls(launcher).total()
    try:
        schedule = from_json(Schedule, candidate.schedule)
        return len(launches(ir_of(graph, schedule), schedule))
    except (TypeError, CannotRewrite, CannotFuse, CannotCode):
        return 0


def memory_of(graph: Graph, candidate: Candidate) -> float:
    """Estimated bytes that a call allocates; 0 if that is unknown."""
    try:
        return peak_bytes(graph, from_json(Schedule, candidate.schedule))
    except (TypeError, CannotRewrite, CannotFuse, CannotCode):
        return 0.0
