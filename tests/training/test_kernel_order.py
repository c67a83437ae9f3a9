"""Kernels that read each other's values: no step is proposed that would have to run before and after another kernel."""

from __future__ import annotations

import pytest

from mtmc_lsp.actions.base import sites
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.fusion.unit_order import parts_in_order
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.schedule.configs import TileConfig
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from tests.codegen.checker import Checker, start
from tests.training.targets import HEAD, cases
from tests.training.test_zero_gradients import TARGETS


def kernels(*nodes: str, again: str = "") -> Schedule:
    """One kernel for each text of node names."""
    plans = tuple(KernelPlan(tuple(text), TileConfig(), tuple(again)) for text in nodes)
    return Schedule(kernels=plans)


SOURCES = {"a": (), "b": ("a",), "x": (), "y": ("b", "x"), "z": ("y",), "c": ("x", "a"), "d": ("c", "z")}


@pytest.mark.parametrize(
    ("schedule", "nodes", "parts"),
    [
        (kernels(), "abc", ["abc"]),
        # x is computed by the kernel that reads b, and c reads x.
        (kernels("xy"), "abc", ["ab", "c"]),
        (kernels("xy"), "acd", ["a", "cd"]),
        (kernels("x"), "abc", ["abc"]),
        # Without a kernel, y and z must run between b and d.
        (kernels("xy"), "bd", ["b", "d"]),
        # The kernel computes x again for itself, so nobody waits for its x.
        (kernels("y", again="x"), "abc", ["abc"]),
        # A kernel that becomes part of the new one stays whole.
        (kernels("xy", "bc"), "abc", ["a", "bc"]),
    ],
)
def test_nodes_are_divided_at_the_kernels_that_must_run_between_them(
    schedule: Schedule, nodes: str, parts: list[str]
) -> None:
    assert parts_in_order(SOURCES, schedule, frozenset(nodes)) == [frozenset(part) for part in parts]


@pytest.mark.parametrize("is_together", [True, False], ids=["together", "one by one"])
def test_each_proposed_kernel_can_run_in_some_order(checker: Checker, is_together: bool) -> None:
    capture = checker.capture(HEAD + TARGETS["clip"])
    device = planning_model(("sm_90",))
    coder, planner = BuiltinCoder(device), RooflinePlanner()
    best, steps = start(capture), list[Step]()
    for number in range(1, 8):
        action = planner.propose(State(capture, best, tuple(steps), device, False))
        if not isinstance(action, MacroAction):
            break
        # Raises CannotCode where two kernels depend on each other.
        candidate = coder.write(capture, best, action)
        is_kept = is_together or number > 1
        best = candidate if is_kept else best
        status = StepStatus.ACCEPTED if is_kept else StepStatus.FAILED
        steps.append(Step(number, action, status, "", candidate=candidate))
    assert len(sites(steps[0].action)) > 2
    assert len(steps) > (1 if is_together else 4)
    assert checker.first_failure(capture, best, cases(capture)) == ""
