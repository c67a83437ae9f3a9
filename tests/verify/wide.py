"""Compares a candidate with a reference and its oracle as workers do, for plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.worker import expectations
from mtmc_lsp.verify.worker.comparison.compare import compare_case
from mtmc_lsp.verify.worker.oracle_runs import runs
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt
from mtmc_lsp.verify.worker.run_target import flatten

Function = Callable[..., Any]


def expected(
    function: Function,
    inputs: Mapping[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    *,
    wanted: Draws = Draws.ALL,
    attempt: Attempt | None = None,
) -> dict[str, Any]:
    """The result of :func:`expectations.expected_of` for a function of named tensors."""

    def run_case(module: object, capture: object, tensors: dict[str, torch.Tensor], *rest: Any, **more: Any) -> Any:
        with torch.no_grad():
            results = flatten(function(**tensors))
        return {"results": results, "after": {}, "facts": [{} for _ in results], "changed_state": []}

    monkeypatch.setattr(runs, "run_case", run_case)
    graph = Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={})
    capture: Any = SimpleNamespace(graph=graph, uses_random=False)
    case = Case({}, "normal", 3)
    return expectations.expected_of(None, capture, dict(inputs), "cpu", case, wanted=wanted, attempt=attempt)


def compared(
    function: Function, candidate: Function, inputs: Mapping[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str]]:
    """The errors of a candidate for a function on these inputs, and the inconclusive results."""
    reference = expected(function, inputs, monkeypatch)
    results = flatten(candidate(**{name: tensor.clone() for name, tensor in inputs.items()}))
    observed = {"results": results, "facts": reference["facts"], "after": {}, "changed_state": []}
    comparison = compare_case(inputs, reference, observed, "budget")
    failed = [f"{check['name']}: {check['detail']}" for check in comparison["checks"] if check["status"] == "failed"]
    return "; ".join(failed), comparison["inconclusive"]
