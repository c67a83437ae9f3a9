"""Regions that no action of the catalogue writes: a coder that is not bound to the schedule may try them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from mtmc_lsp.actions.base import operation_names, size_text, where
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Author, StepStatus
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.launch_units import units
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import tensor_bytes

OPEN = "open"
"""The parameter that marks an action which changes no schedule."""

ENOUGH_TUNING = 2
"""Steps in a row that come to nothing before a model's turn comes."""


class WidePlanner(RooflinePlanner):
    """The roofline's ranking for a coder that writes freely.

    Every run of neighbouring torch calls is offered too. Actions that try many configurations are left out: asking
    a model for each would cost much and tell little.
    """

    def ranked(self, state: State) -> list[MacroAction]:
        """Every action that such a coder may be given, best first."""
        # The schedule knows nothing of what an open action wrote, so its own actions there would be about torch calls
        # that are gone.
        written = _written(state)
        known = [
            action
            for action in super().ranked(state)
            if "variants" not in action.params and not written & set(action.region)
        ]
        tried = {step.action.key for step in state.history}
        # To fuse a region and to write it as a kernel is one and the same to such a coder.
        fused = [step.action for step in state.history if step.action.kind is ActionKind.FUSE]
        regions = {action.region for action in (*known, *fused)}
        wide = [action for action in _open_actions(state) if action.key not in tried and action.region not in regions]
        return sorted([*known, *wide], key=lambda action: (-action.expected.saved_us, action.key))


class BuiltinFirst(RooflinePlanner):
    """The roofline's ranking as long as the built-in coder has something to do, then what it leaves to torch.

    Once a model has written something the built-in coder is not asked again: it writes from the schedule, which knows
    nothing of what the model wrote, and would undo it.
    """

    def ranked(self, state: State) -> list[MacroAction]:
        """Actions for whoever is to write next, best first."""
        by_model = any(
            step.status is StepStatus.ACCEPTED and step.candidate and step.candidate.author is Author.MODEL
            for step in state.history
        )
        tried = {step.action.key for step in state.history}
        wide = [action for action in _open_actions(state) if action.key not in tried]
        wide.sort(key=lambda action: (-action.expected.saved_us, action.key))
        if by_model:
            return wide
        known = super().ranked(state)
        # Tuning that no longer gains must not use up a run before the rest is tried.
        recent = [step.status for step in state.history[-ENOUGH_TUNING:]]
        if wide and len(recent) == ENOUGH_TUNING and StepStatus.ACCEPTED not in recent:
            return wide
        return known or wide


def _open_actions(state: State) -> Iterator[MacroAction]:
    schedule = from_json(Schedule, state.candidate.schedule)
    ir = ir_of(state.capture.graph, schedule)
    written = _written(state)
    random = {prim.origin for prim in ir.prims.values() if prim.op is PrimOp.RANDOM}
    todo = units(ir, schedule)
    for free, run in groupby(todo, lambda unit: unit.plan is None and not set(unit.nodes) & (written | random)):
        names = tuple(name for unit in run for name in unit.nodes)
        if free and any(ir.graph.node(name).op.split(".")[1] not in VIEWS for name in names):
            yield _open_action(state, ir, names)


def _written(state: State) -> set[str]:
    """Nodes that open actions put into kernels."""
    return {
        name
        for step in state.history
        if step.status is StepStatus.ACCEPTED and step.action.params.get(OPEN)
        for name in step.action.region
    }


def _open_action(state: State, ir: KernelIR, names: tuple[str, ...]) -> MacroAction:
    graph, sizes = ir.graph, ir.graph.sizes

    def moved(types: list[TensorType]) -> float:
        return sum(tensor_bytes(kind, sizes) for kind in types)

    inside = set(names)
    working = [graph.node(name) for name in names if graph.node(name).op.split(".")[1] not in VIEWS]
    before = sum(moved([graph.type_of(ref) for ref in set(node.inputs())] + list(node.outputs)) for node in working)
    read = {ref for name in names for ref in graph.node(name).inputs() if ref.name not in inside}
    outside = [node for node in graph.nodes if node.name not in inside]
    kept: set[Ref] = {ref for node in outside for ref in node.inputs()} | set(graph.outputs)
    kept |= {mutation.value for mutation in graph.mutations}
    written = {ref for ref in kept if ref.name in inside}
    after = min(before, moved([graph.type_of(ref) for ref in (*read, *written)]))
    saved = (before - after) / state.device.bandwidth * 1e6 + (len(working) - 1) * state.device.launch_us
    lines, place = where(ir, names)
    operations = operation_names(ir, [node.name for node in working])
    return MacroAction(
        ActionKind.FUSE,
        names,
        lines,
        {OPEN: True},
        f"{len(working)} operations run as torch calls; as one kernel {size_text(before - after)} less would move.",
        Expected(saved, before, after),
        f"write {operations} in {place} as a kernel",
    )
