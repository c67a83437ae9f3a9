"""Runs of the search against an endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import SOURCE
from endpoint import Endpoint
from searching import WRITES, AgreeingMeasurer, quick_settings, run_search

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.core.run import RunResult
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.endpoint.client import OpenAIModel


@pytest.fixture(scope="session")
def captures() -> dict[tuple[str, str], Capture]:
    """Cache of captures."""
    return {}


@pytest.fixture
def captured(captured, captures) -> Callable[[str, str], Capture]:
    """Captures a target of a source text, cached because tests do not modify captures."""

    def capture(text: str, name: str) -> Capture:
        if (text, name) not in captures:
            captures[text, name] = captured(text, name)
        return captures[text, name]

    return capture


@pytest.fixture
def run(captured):
    """Runs the search for one target with an endpoint and returns the result."""
    capture = captured(SOURCE, "ranks")

    def go(
        endpoint: Endpoint,
        backends: Backends = WRITES,
        measurer: AgreeingMeasurer | None = None,
        steps: int = 1,
        **llm: Any,
    ) -> RunResult:
        settings = quick_settings(**llm)
        with endpoint.serving() as environ:
            model = OpenAIModel(settings.llm, environ=environ)
            parts = {"backends": backends, "measurer": measurer, "steps": steps, "settings": settings}
            return run_search(capture, SOURCE, model, **parts)

    return go
