"""Runs of the search against an endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import SOURCE
from endpoint import Endpoint
from searching import WRITES, Agreeing, quick_settings, searched

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.core.run import RunResult
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.endpoint.client import OpenAIModel


@pytest.fixture(scope="session")
def captures() -> dict[tuple[str, str], Capture]:
    """What was captured before."""
    return {}


@pytest.fixture
def captured(captured, captures) -> Callable[[str, str], Capture]:
    """Captures a target of a user's text; the same one only once, as nothing here changes a capture."""

    def capture(text: str, name: str) -> Capture:
        if (text, name) not in captures:
            captures[text, name] = captured(text, name)
        return captures[text, name]

    return capture


@pytest.fixture
def run(captured):
    """Runs the search for one target against an endpoint; gives the result."""
    capture = captured(SOURCE, "ranks")

    def go(
        endpoint: Endpoint, backends: Backends = WRITES, measurer: Agreeing | None = None, steps: int = 1, **llm: Any
    ) -> RunResult:
        settings = quick_settings(**llm)
        with endpoint.serving() as environ:
            model = OpenAIModel(settings.llm, environ=environ)
            parts = {"backends": backends, "measurer": measurer, "steps": steps, "settings": settings}
            return searched(capture, SOURCE, model, **parts)

    return go
