"""Regions that no action of the catalogue covers. A language model may still write kernels for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from mtmc_lsp.actions.base import lines_of, size_text
from mtmc_lsp.actions.titles import operation_names, with_result
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

OPEN_REGION = "open"
"""Action parameter that marks an open region: the action does not change the schedule."""

FREE_EDIT = "edit"
"""Action parameter that marks an edit of any kernel and of the launcher. It holds a hash of the edited text: the action does not
change the schedule, and edits of the same version differ."""

MAX_STEPS_WITHOUT_GAIN = 2
"""Consecutive steps without gain after which the model is asked."""


class OpenRegionPlanner(RooflinePlanner):
    """The roofline ranking for a model as coder.

    Also offers every sequence of adjacent torch calls. Excludes actions that try many configurations: one model
    request for each would be expensive and give little information.
    """

    def ranked(self, state: State) -> list[MacroAction]:
        """All actions for this coder, best first."""
        # The schedule does not contain kernels of open regions, so its actions there would refer to torch calls that no
        # longer exist.
        in_open_regions = _written(state)
        scheduled = [
            action
            for action in super().ranked(state)
            if "variants" not in action.params and not in_open_regions & set(action.region)
        ]
        tried = {step.action.key for step in state.history}
        # For a model, fusing a region and writing it as one kernel are the same task.
        fused_actions = [step.action for step in state.history if step.action.kind is ActionKind.FUSE]
        regions = {action.region for action in (*scheduled, *fused_actions)}
        open_actions = [
            action for action in _open_actions(state) if action.key not in tried and action.region not in regions
        ]
        return sorted([*scheduled, *open_actions], key=lambda action: (-action.expected.saved_us, action.key))

    def _opening(self, state: State) -> MacroAction | None:
        """Unknown: the regions for the model are ranked with all others."""
        return None


class BuiltinFirstPlanner(RooflinePlanner):
    """The roofline ranking while the built-in coder has work, then the regions that still run as torch calls.

    After the model has written code, the built-in coder is no longer used. It generates code from the schedule, which
    does not contain the model's code, so it would undo the model's work.
    """

    def ranked(self, state: State) -> list[MacroAction]:
        """Actions for the coder of the next step, best first."""
        has_model_code = any(
            step.status is StepStatus.ACCEPTED and step.candidate and step.candidate.author is Author.MODEL
            for step in state.history
        )
        tried = {step.action.key for step in state.history}
        open_actions = [action for action in _open_actions(state) if action.key not in tried]
        open_actions.sort(key=lambda action: (-action.expected.saved_us, action.key))
        if has_model_code:
            return open_actions
        scheduled = super().ranked(state)
        # Tuning without gain must not use up the step limit before the open regions are tried.
        recent_statuses = [step.status for step in state.history[-MAX_STEPS_WITHOUT_GAIN:]]
        if (
            open_actions
            and len(recent_statuses) == MAX_STEPS_WITHOUT_GAIN
            and StepStatus.ACCEPTED not in recent_statuses
        ):
            return open_actions
        return scheduled or open_actions


def _open_actions(state: State) -> Iterator[MacroAction]:
    if state.capture.graph.backward is not None:
        # A model gets one launcher to edit; with a backward pass there are two.
        return
    schedule = from_json(Schedule, state.candidate.schedule)
    ir = ir_of(state.capture.graph, schedule)
    in_open_regions = _written(state)
    random = {prim.origin for prim in ir.prims.values() if prim.op is PrimOp.RANDOM}
    launch_units = units(ir, schedule)
    taken = in_open_regions | random | {node.name for node in ir.graph.nodes if node.row_loop is not None}
    for is_free, unit_run in groupby(launch_units, lambda unit: unit.plan is None and not set(unit.nodes) & taken):
        names = tuple(name for unit in unit_run for name in unit.nodes)
        if is_free and any(ir.graph.node(name).op.split(".")[1] not in VIEWS for name in names):
            yield _open_action(state, ir, names)


def _written(state: State) -> set[str]:
    """Nodes that accepted actions on open regions moved into kernels."""
    return {
        name
        for step in state.history
        if step.status is StepStatus.ACCEPTED and step.action.params.get(OPEN_REGION)
        for name in step.action.region
    }


def _open_action(state: State, ir: KernelIR, names: tuple[str, ...]) -> MacroAction:
    graph, sizes = ir.graph, ir.graph.sizes

    def total_bytes(types: list[TensorType]) -> float:
        return sum(tensor_bytes(tensor_type, sizes) for tensor_type in types)

    region = set(names)
    operations = [graph.node(name) for name in names if graph.node(name).op.split(".")[1] not in VIEWS]
    bytes_before = sum(
        total_bytes([graph.type_of(ref) for ref in set(node.inputs())] + list(node.outputs)) for node in operations
    )
    region_inputs = {ref for name in names for ref in graph.node(name).inputs() if ref.name not in region}
    outside = [node for node in graph.nodes if node.name not in region]
    live_values: set[Ref] = {ref for node in outside for ref in node.inputs()} | set(graph.outputs)
    live_values |= {mutation.value for mutation in graph.mutations}
    region_outputs = {ref for ref in live_values if ref.name in region}
    bytes_after = min(bytes_before, total_bytes([graph.type_of(ref) for ref in (*region_inputs, *region_outputs)]))
    saved_us = (bytes_before - bytes_after) / state.device.bandwidth * 1e6 + (
        len(operations) - 1
    ) * state.device.launch_us
    operation_text = operation_names(ir, [node.name for node in operations])
    return MacroAction(
        ActionKind.FUSE,
        names,
        lines_of(ir, names),
        {OPEN_REGION: True},
        f"{len(operations)} operations run as torch calls; one kernel would move {size_text(bytes_before - bytes_after)} less.",
        Expected(saved_us, bytes_before, bytes_after),
        f"{with_result(ir, f'Write {operation_text}', names)} as a kernel",
    )
