"""The action catalogue: what each macro action does to a schedule, when it is legal, and how it is said to people."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import CannotFuse, analyse
from mtmc_lsp.macro.schedule import KernelPlan, Schedule


class IllegalAction(Exception):
    """The action does not apply in this state; the message says why, for people."""


def apply_action(program: Program, schedule: Schedule, action: MacroAction) -> Schedule:
    """The schedule after ``action``.

    Raises:
        IllegalAction: it does not apply.
    """
    if action.kind in (ActionKind.FUSE, ActionKind.TENSOR_CORE):
        return _fuse(program, schedule, action)
    plan = next((kernel for kernel in schedule.kernels if set(action.region) & set(kernel.nodes)), None)
    if plan is None:
        raise IllegalAction(f"{action.kind.value}: no kernel computes {', '.join(action.region)} yet")
    changes = action.params.get("config")
    if not isinstance(changes, Mapping):
        raise IllegalAction(f"{action.kind.value}: the action has no configuration")
    return schedule.with_kernel(plan.with_config(**changes))


def _fuse(program: Program, schedule: Schedule, action: MacroAction) -> Schedule:
    """One kernel out of the region; kernels it touches are taken into it whole."""
    nodes = set(action.region)
    for kernel in schedule.kernels:
        if nodes & set(kernel.nodes):
            nodes |= set(kernel.nodes)
    try:
        region = analyse(program, nodes)
    except CannotFuse as reason:
        raise IllegalAction(str(reason)) from None
    config = action.params.get("config")
    return schedule.with_kernel(KernelPlan(region.nodes, dict(config) if isinstance(config, Mapping) else {}))
