"""Networks are verified with fewer runs in float64; their wrong versions are refused all the same."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.sizes.case_sizes import is_network
from tests.planning.situations import act, proposed, start

NETWORK = """import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 24), nn.Linear(24, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(11)])

    # mtmc: x=f32[B,16] B=6
    def forward(self, x):
        return self.layers(x)
"""
FAULTS = {
    "a constant": (r"linear \* 0\.70710678118654\d*", "linear * 0.7073"),
    "a factor": (r", x \+ linear, mask", ", x + 1.0002 * linear, mask"),
    "the last element": (r"col_mask = cols < n_cols", "col_mask = cols < n_cols - 1"),
}


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, Any]]:
    known: dict[str, Any] = {}
    yield known
    if "measurer" in known:
        known["measurer"].close()


@pytest.fixture
def network(
    captured: Callable[[str, str], Capture], measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[LocalMeasurer, Candidate]:
    """A network with kernels, and what verifies its versions as on a GPU: without oracles until results differ."""

    def defers(self: Reference, data: Any) -> bool:
        return not data.is_first and not self._needs_oracles

    monkeypatch.setattr(Reference, "_defers_oracle", defers)
    if not measured:
        capture = captured(NETWORK, "Net")
        assert is_network(capture.graph)
        candidate = start(capture, NETWORK)
        for _ in range(2):
            action = next(iter(proposed(capture, candidate, ActionKind.FUSE)), None)
            candidate = (
                candidate if action is None else act(capture, candidate, action.kind, *action.region, **action.params)
            )
        measured |= {
            "measurer": LocalMeasurer(capture, sys.executable, MeasureOptions(archs=("sm_90",))),
            "candidate": candidate,
        }
    return measured["measurer"], measured["candidate"]


def test_a_network_s_kernels_are_correct(network: tuple[LocalMeasurer, Candidate]) -> None:
    measurer, candidate = network
    verdict = measurer.verify(candidate)
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert measurer._reference._needs_oracles


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_kernel_of_a_network_is_refused(fault: str, network: tuple[LocalMeasurer, Candidate]) -> None:
    measurer, candidate = network
    pattern, wrong = FAULTS[fault]
    text, count = re.subn(pattern, wrong, candidate.source)
    assert count, candidate.code
    verdict = measurer.verify(replace(candidate, id=fault, source=text))
    assert verdict.status is VerdictStatus.INCORRECT
