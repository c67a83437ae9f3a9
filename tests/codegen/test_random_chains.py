"""Property: generated code equals eager for random chains of operations.

``MTMC_PROPERTY=long`` runs for an hour instead of a minute.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.verify.cases import Case
from tests.codegen.chains import Chain, chains
from tests.codegen.checker import Checker, greedy, planned

LONG = os.environ.get("MTMC_PROPERTY") == "long"
EXAMPLES = 12_000 if LONG else 120
CONFIGS: tuple[dict[str, object], ...] = (
    {},
    {"rows": 1, "block": 16, "loop": True, "warps": 4, "stages": 2},
    {"rows": 4, "block": 8, "loop": False, "warps": 4, "stages": 2},
    {"rows": 2, "block": 4, "loop": True, "warps": 4, "stages": 2},
    {"rows": 1, "block": 64, "loop": False, "warps": 4, "stages": 2},
)
"""Configurations: the default, and tiles that do not divide the sizes, with and without loops and splits."""


@pytest.mark.timeout(7200 if LONG else 600)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=not LONG,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(
    chain=chains(),
    config=st.sampled_from(CONFIGS),
    distribution=st.sampled_from(("normal", "uniform", "mixed")),
    seed=st.integers(0, 1000),
)
def test_generated_code_equals_eager(
    checker: Checker, chain: Chain, config: dict[str, object], distribution: str, seed: int
) -> None:
    note(chain.text)
    try:
        capture = checker.capture(chain.text)
    except TargetUnsupported as reason:
        event(f"not captured: {reason.message.split('does')[-1]}")
        return
    candidates = [item for item in (planned(capture), greedy(capture, config)) if item.code is not None]
    event(f"{len(candidates)} candidates")
    if not candidates:
        return
    case = Case(dict(capture.graph.sizes), distribution, seed)
    found = checker.failures(capture, candidates, case)
    for wrong, candidate in zip(found, candidates, strict=True):
        assert not wrong, f"{wrong}\n{candidate.source}"
