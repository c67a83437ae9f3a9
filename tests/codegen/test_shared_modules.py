"""Shared modules, tied weights and common buffers: cases set them under all names, and the guard checks the sharing."""

from __future__ import annotations

import re

import pytest
import torch

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.verify.worker.inputs import replace_tensor, slots_of
from tests.codegen.checker import planned
from tests.codegen.harness import verified

SHARED = {
    "tied weights": (
        "self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)\n        self.b.weight = self.a.weight",
        "self.b.weight is self.a.weight",
    ),
    "a module held twice": ("self.a = nn.BatchNorm1d(4)\n        self.b = self.a", "self.b is self.a"),
    "a buffer of two": (
        "self.a, self.b = nn.BatchNorm1d(4), nn.BatchNorm1d(4)\n        self.b.running_var = self.a.running_var",
        "self.b.running_var is self.a.running_var",
    ),
}


def network(parts: str) -> str:
    return f"""import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {parts}

    def forward(self, x):
        return torch.relu(self.b(torch.sort(self.a(x), -1).values * 2.0))


def get_inputs():
    return [torch.randn(6, 4)]


def get_init_inputs():
    return []
"""


def without_names(guard: str) -> str:
    """Expand the guard's cached lookups to full paths from ``self``."""
    guard = re.sub(r'\._(?:modules|parameters|buffers)\.get\("(\w+)"\)', r".\1", guard)
    while match := re.search(r"\((\w+) := (self[\w.]*)\)", guard):
        guard = re.sub(rf"(?<![\w.]){match[1]}(?!\w)(?! :=)", match[2], guard.replace(match[0], match[2]))
    return guard


@pytest.mark.parametrize("name", SHARED)
def test_sharing_is_verified_and_checked_by_the_guard(captured, name: str) -> None:
    parts, condition = SHARED[name]
    capture = captured(network(parts), "Net")
    candidate = planned(capture)
    assert candidate.launches
    assert condition in without_names(candidate.source.split("def net_fits(")[1].split("tensors = ")[0])
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_a_module_without_sharing_needs_no_check(captured) -> None:
    assert captured(network("self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)"), "Net").graph.aliases == ()


def test_a_tensor_is_set_under_all_its_names() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    net[1].weight = net[0].weight
    slots, other = slots_of(net), net[1].bias
    replace_tensor(slots[id(net[0].weight)], torch.ones(3, 3))
    replace_tensor(slots[id(net[2].running_mean)], torch.full((3,), 2.0))
    assert net[0].weight is net[1].weight and bool((net[1].weight == 1.0).all())
    assert isinstance(net[0].weight, torch.nn.Parameter) and net[1].bias is other
    assert bool((net[2].running_mean == 2.0).all()) and not isinstance(net[2].running_mean, torch.nn.Parameter)


def test_an_operation_with_unrecorded_updates_is_refused(captured) -> None:
    """The trace of an instance norm does not record the update of running statistics."""
    text = network("self.a, self.b = nn.InstanceNorm1d(4, track_running_stats=True), nn.Identity()")
    with pytest.raises(TargetUnsupported, match="running statistics"):
        captured(text.replace("torch.randn(6, 4)", "torch.randn(6, 4, 5)"), "Net")
