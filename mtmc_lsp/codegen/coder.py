"""The built-in coder: applies a planner action to the schedule and renders graph and schedule as a new version of the file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from mtmc_lsp.actions.catalogue import IllegalAction, apply_action
from mtmc_lsp.capture.result_structure import RESULTS, fill_structure, is_nested
from mtmc_lsp.codegen.kernel.device_functions import HELPERS, helpers_used
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.launches import write_launches
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR_SOURCE
from mtmc_lsp.codegen.module.conditions.tensors import size_text
from mtmc_lsp.codegen.module.constants import CONSTANT_SOURCE
from mtmc_lsp.codegen.module.cuda_graph import GRAPHS, RUN_CUDA_GRAPH
from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES
from mtmc_lsp.codegen.module.guard import Traced, bindings, returns_tensors, write_guard
from mtmc_lsp.codegen.module.guard_helpers import CAN_LAUNCH, GUARD_HELPERS
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.module.launchers.values import FLAG
from mtmc_lsp.codegen.module.naming import (
    base_name,
    launch_key,
)
from mtmc_lsp.codegen.module.region_dispatch import region_dispatch
from mtmc_lsp.codegen.module.shared_kernels import HELPER, KernelNames, SharedKernels
from mtmc_lsp.codegen.module.tables import kept_by_launcher
from mtmc_lsp.codegen.module.unpacking import unpacking
from mtmc_lsp.codegen.module.up_to_date import write_check
from mtmc_lsp.codegen.standalone import placed
from mtmc_lsp.codegen.training.autograd_function import AutogradFunction
from mtmc_lsp.codegen.training.early_gradients import EarlyGradients
from mtmc_lsp.codegen.training.operators import PassOperator
from mtmc_lsp.codegen.training.original_code import helpers_in, original_code
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, GeneratedCode, KernelLaunch, Placement
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture, TargetKind
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import analyse
from mtmc_lsp.ir.run_time_numbers import numbers_of
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.rewrites.saved_values import Passes, forward_part, split
from mtmc_lsp.schedule.launch_units import Unit, launches
from mtmc_lsp.schedule.precision_modes import rounds_as_tf32
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.line_wrapping import wrapped

TF32 = 'input_precision="tf32"'
"""In the source of kernels that compute products in TF32."""
IMPORTS = (
    "import torch",
    "import triton",
    "import triton.language as tl",
    "from torch.library import triton_op, wrap_triton",
)


class BuiltinCoder:
    """Generates Triton without a network. The same device, capture, candidate and action always give byte-identical output."""

    def __init__(self, device: DeviceModel | None = None, place: Placement = Placement.END) -> None:
        """Create a coder.

        Args:
            device: the GPU that the code is for; None for the one that represents the default architecture.
            place: where the code goes in the user's file.
        """
        self._device = device or default_model()
        self._place = place

    def start(self, capture: Capture, source: str) -> Candidate:
        """The starting point: the user's file without any generated code."""
        plain = strip_generated(source.encode(), capture.workload.target.qualname).decode()
        return Candidate(content_id(plain), None, None, plain, None, to_json(Schedule()))

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """Apply ``action`` to ``candidate`` and return the new candidate.

        Raises:
            CannotCode: the action is illegal for this schedule, or the result cannot be written in Triton.
        """
        schedule = from_json(Schedule, candidate.schedule)
        try:
            changed = apply_action(capture.graph, schedule, action)
            ir = ir_of(capture.graph, changed)
        except (IllegalAction, CannotRewrite) as reason:
            raise CannotCode(str(reason)) from None
        return self._written(capture, candidate, action, changed, ir)

    def rewrite(self, capture: Capture, source: str, schedule: object) -> Candidate:
        """The version with a schedule that an earlier process wrote, without the action that led to it.

        Args:
            source: the user's file.
            schedule: the coder's state as JSON.

        Raises:
            CannotCode: the schedule cannot be written in Triton.
            TypeError: the schedule is of another form.
        """
        start = self.start(capture, source)
        decoded = from_json(Schedule, schedule)
        if decoded == Schedule():
            return start
        try:
            ir = ir_of(capture.graph, decoded)
        except CannotRewrite as reason:
            raise CannotCode(str(reason)) from None
        return self._written(capture, start, None, decoded, ir)

    def _written(
        self, capture: Capture, candidate: Candidate, action: MacroAction | None, schedule: Schedule, ir: KernelIR
    ) -> Candidate:
        target = capture.workload.target
        plain = strip_generated(candidate.source.encode(), target.qualname)
        try:
            code, launches, names = render(capture, ir, schedule, plain.decode(), self._device)
        except RecursionError:
            why = "the chain of dependent operations in one kernel is too long for the code generator"
            raise CannotCode(f"{why}; fuse fewer operations") from None
        code = placed(code, self._place, plain)
        text = compose(plain, target, code).decode()
        schedule = replace(schedule, kernel_names=names)
        return Candidate(content_id(text), candidate.id, action, text, code, to_json(schedule), launches)


def content_id(text: str) -> str:
    """The id of a candidate with this text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Rendered(NamedTuple):
    """The code of a schedule."""

    code: GeneratedCode
    launches: tuple[KernelLaunch, ...]
    """The launch parameters of the kernels."""
    kernel_names: tuple[tuple[str, str], ...]
    """The names of the kernels, for the schedule."""


def render(
    capture: Capture,
    ir: KernelIR,
    schedule: Schedule,
    source: str,
    device: DeviceModel,
    helpers: Mapping[str, Kernel] = MappingProxyType({}),
) -> Rendered:
    """Generate the code for a schedule on a device. Kernels that the schedule names keep their names.

    Args:
        helpers: kernels that prepare operands, by their normal form, as an earlier step wrote them.
    """
    schedule = _with_random_kernels(ir, schedule, device)
    base = base_name(capture.workload.target, source)
    backward = ir.graph.backward
    both = split(ir.graph) if backward is not None and not backward.in_forward else None
    passes = _passes(capture, ir, both, schedule, base)
    lines = source.splitlines()
    shared = SharedKernels(helpers)
    units = [launch for each in passes for launch in each.units]
    live_keys = {launch_key(launch) for launch in units} | {unit.nodes[-1] for launch in units for unit in launch}
    live_keys |= {plan.key for plan in schedule.loop_kernels}
    is_live = {key: key in live_keys or key.startswith(HELPER) for key, _ in schedule.kernel_names}
    names = KernelNames(source, {key: name for key, name in schedule.kernel_names if is_live[key]})
    kernels: list[Kernel] = []
    for each in passes:
        for part in _parts(each):
            kernels += write_launches(
                each.ir, part, each.launcher, names, shared, each.base, lines, device, schedule.loop_kernels
            )
    if names.moved:
        kept = {key: name for key, name in schedule.kernel_names if name not in names.moved.values()} | names.moved
        return render(capture, ir, replace(schedule, kernel_names=tuple(kept.items())), source, device)
    if not shared.has(names.known_helpers):
        return render(capture, ir, schedule, source, device, names.known_helpers)
    limits = tuple(dict.fromkeys(limit for kernel in kernels for limit in kernel.limits))
    for limit in limits:
        # Safe to evaluate: limits are generated arithmetic over named sizes.
        if not eval(limit, {"__builtins__": {}}, dict(capture.graph.sizes)):
            raise CannotCode(
                f"the kernels require {limit}, which does not hold for the captured sizes; choose other settings"
            )
    block = _module_block(
        capture,
        limits,
        base,
        kernels,
        passes,
        both,
        uses_cuda_graph=schedule.cuda_graph,
        rounds_as_tf32=rounds_as_tf32(schedule) or any(TF32 in kernel.source for kernel in kernels),
    )
    launchers = [each.launcher for each in passes]
    launched = [launch for each in launchers for launch in (*each.launches, *each.function_launches)]
    compiled = tuple(launch for i, launch in enumerate(launched) if launch not in launched[:i])
    dispatch = _dispatch(capture, base, passes, uses_cuda_graph=schedule.cuda_graph)
    imports = ("import math", *IMPORTS) if any(number.uses_math for number in numbers_of(ir.graph)) else IMPORTS
    dispatch = region_dispatch(dispatch, capture.workload.target.region)
    return Rendered(GeneratedCode(imports, block, dispatch), compiled, tuple(names.given.items()))


class _Pass(NamedTuple):
    """The forward or the backward pass of a target."""

    base: str
    """Begins the names of its kernels."""
    ir: KernelIR
    launcher: Launcher
    units: list[list[Unit]]


def _passes(capture: Capture, ir: KernelIR, both: Passes | None, schedule: Schedule, base: str) -> list[_Pass]:
    """The forward pass, and the backward pass if the graph has one."""
    graphs = [(base, ir)]
    if both is not None:
        graphs = [(base, lower(both.forward)), (f"{base}_backward", lower(both.backward))]
    passes = []
    for name, part in graphs:
        kernels = tuple(plan for plan in schedule.kernels if plan.key in part.graph.named)
        of_part = replace(schedule, kernels=kernels)
        launcher = Launcher(part, recomputed=frozenset(node for plan in kernels for node in plan.recomputed))
        if part.graph.backward is not None:
            launcher.optional, launcher.flags = part.graph.only_for_gradients, (f"{FLAG}=True",)
        if not all(word.isidentifier() for word in capture.module_name.split(".")):
            # The module name is not a valid dotted name (KernelBench imports files such as 1_Square_matrix.py by path).
            launcher.namespace = "mtmc_{''.join(c if c.isalnum() else '_' for c in __name__)}"
        units = launches(part, of_part)
        launcher.may_be_kept = kept_by_launcher(part, units)
        passes.append(_Pass(name, part, launcher, units))
    return passes


def _parts(each: _Pass) -> Iterator[list[list[Unit]]]:
    """The launches of a pass; those that only gradients need come last, after a return without gradients."""
    graph = each.ir.graph
    if graph.backward is None:
        yield each.units
        return
    needed = graph.needed_by_results
    later = [launch for launch in each.units if not any(needed & set(unit.nodes) for unit in launch)]
    yield [launch for launch in each.units if launch not in later]
    results = [each.launcher.variables[ref] for ref in graph.forward_outputs]
    each.launcher.lines += [f"if not {FLAG}:", f"    return {', '.join(results)}"]
    yield later


def _with_random_kernels(ir: KernelIR, schedule: Schedule, device: DeviceModel) -> Schedule:
    """Put every random operation into a kernel, so that all of them use the launcher's single seed."""
    for prim in ir.prims.values():
        if prim.op is PrimOp.RANDOM and schedule.kernels and schedule.kernel_of(prim.origin) is None:
            config = default_config(ir, analyse(ir, (prim.origin,)), device)
            schedule = replace(schedule, kernels=(*schedule.kernels, KernelPlan((prim.origin,), config)))
    return schedule


def _module_block(
    capture: Capture,
    limits: tuple[str, ...],
    base: str,
    kernels: list[Kernel],
    passes: Sequence[_Pass],
    both: Passes | None,
    *,
    uses_cuda_graph: bool,
    rounds_as_tf32: bool,
) -> str:
    graph, launcher = forward_part(capture.graph), passes[0].launcher
    launchers = [each.launcher for each in passes]
    unpacked = unpacking(graph, capture.arguments)
    access = {item.name: item.access for item in graph.inputs} | unpacked.names
    check = write_check(f"{base}_up_to_date", graph.dependencies)
    guard = write_guard(
        f"{base}_fits",
        _guard_parameters(capture),
        graph,
        access,
        limits,
        tuple(launcher.aligned),
        uses_atomics=any(each.uses_atomics for each in launchers),
        tf32=capture.graph.tf32_libraries if rounds_as_tf32 else (),
        up_to_date=f"{base}_up_to_date()" if check else "",
        unpacked=unpacked,
        trained=capture.graph.backward.gradients if capture.graph.backward is not None else None,
        traced=_traced(base, passes),
    )
    target = capture.workload.target
    part = f"Region {target.region.number} of " if target.region is not None else ""
    summary = f"{part}``{target.qualname}`` with Triton kernels."
    sources = list(dict.fromkeys(text for kernel in kernels for text in (*kernel.functions.values(), kernel.source)))
    helpers = _helpers("\n".join(sources))
    # The helpers of every guard call the first one.
    checks = [
        source for name, source in GUARD_HELPERS.items() if name == CAN_LAUNCH or re.search(rf"\b{name}\b", guard)
    ]
    launch = _launchers(capture, base, passes, both, summary)
    launches_kernels = any(each.launches or each.function_launches for each in launchers)
    helpers_of_launcher = [DIRECT_LAUNCHES] if launches_kernels else []
    helpers_of_launcher += [ALLOCATOR_SOURCE] if any(each.makes_descriptors for each in launchers) else []
    helpers_of_launcher += [CONSTANT_SOURCE] if any(each.makes_constants for each in launchers) else []
    cuda_graph = [GRAPHS, RUN_CUDA_GRAPH, _cuda_graph_function(capture, base, launcher)] if uses_cuda_graph else []
    version_check = [check] if check else []
    differentiated = helpers_in(launch)
    parts = [
        *helpers,
        *sources,
        *checks,
        *version_check,
        guard,
        *helpers_of_launcher,
        *differentiated,
        launch,
        *cuda_graph,
    ]
    return wrapped("\n\n".join(parts))


def _launchers(capture: Capture, base: str, passes: Sequence[_Pass], both: Passes | None, summary: str) -> str:
    """The launcher with its operator; with a backward pass, both launchers and their autograd function."""
    forward = passes[0]
    graph = forward.ir.graph
    is_traced = _are_operators(base, passes)
    if graph.backward is not None:
        early = EarlyGradients(base, capture.workload.target.qualname, graph, forward.launcher, is_traced, capture)
        launcher = forward.launcher.finish_function(f"{base}_forward", base, f"Results and gradients of {summary}")
        operators = [early.operator.source()] if is_traced else []
        return "\n\n".join([launcher, *operators, early.source()])
    if both is None:
        return forward.launcher.finish(f"{base}_launch", f"{base}_triton", summary)
    backward = passes[1]
    launchers = (forward.launcher, backward.launcher)
    function = AutogradFunction(base, capture.workload.target.qualname, both, *launchers, is_traced, capture)
    return "\n\n".join(
        [
            launchers[0].finish_function(f"{base}_forward", base, f"Forward pass of {summary}"),
            launchers[1].finish_function(
                f"{base}_backward", f"{base}_backward", f"Backward pass of {summary}", distinct=True
            ),
            *(operator.source() for operator in function.operators if is_traced),
            function.source(),
        ]
    )


def _traced(base: str, passes: Sequence[_Pass]) -> Traced:
    """Which calls to a target with a backward pass torch.compile may trace."""
    if not _are_operators(base, passes):
        return Traced.NEVER
    # The operator of a pass that computes gradients early always computes them.
    return Traced.WITH_GRADIENTS if passes[0].ir.graph.backward is not None else Traced.ALWAYS


def _are_operators(base: str, passes: Sequence[_Pass]) -> bool:
    """Whether torch.compile may call the passes as operators."""
    return all(PassOperator(each.launcher, base).is_legal for each in passes) and (
        # An operator returns each tensor once; only gradients may be the same tensor.
        len(passes[0].launcher.distinct_outputs) == len(passes[0].ir.graph.outputs)
    )


def _cuda_graph_function(capture: Capture, base: str, launcher: Launcher) -> str:
    """Source of the function that runs the launcher as a CUDA graph."""
    numbers = list(launcher.number_names.values())
    kinds = {launcher.input_names[item.name]: item.kind for item in capture.graph.inputs}
    arguments = [name for name, kind in kinds.items() if kind is InputKind.ARGUMENT]
    module_tensors = [name for name in kinds if name not in arguments]
    if list(kinds) != [*arguments, *module_tensors]:
        raise CannotCode(
            "a CUDA graph needs arguments before module tensors in the graph's inputs; capture without CUDA graphs"
        )
    updated = {launcher.input_names[mutation.input] for mutation in capture.graph.mutations}
    if updated & set(arguments):
        raise CannotCode(
            "a CUDA graph works on copies of the arguments, so it cannot update arguments in place; leave CUDA graphs off"
        )
    groups = [arguments, module_tensors, [str(i) for i, name in enumerate(module_tensors) if name in updated]]
    tuples = [f"({', '.join(part)}{',' if len(part) == 1 else ''})" for part in (groups if updated else groups[:2])]
    tuples += [f"numbers=({', '.join(numbers)}{',' if len(numbers) == 1 else ''})"] if numbers else []
    return (
        f"def {base}_cuda_graph({', '.join([*kinds, *numbers])}):\n"
        f'    """``{base}_launch`` as one CUDA graph."""\n'
        f"    return {call_text('_run_cuda_graph', [f'{base}_launch', *tuples], '    ')}\n"
    )


def _helpers(text: str) -> list[str]:
    """Sources of all helper functions that ``text`` calls, directly or through other helpers."""
    needed = helpers_used(text)
    while True:
        added = [name for name in helpers_used(text + "".join(HELPERS[n] for n in needed)) if name not in needed]
        if not added:
            return [HELPERS[name] for name in HELPERS if name in needed]
        needed += added


def _guard_parameters(capture: Capture) -> list[str]:
    target = capture.workload.target
    receiver = capture.graph.receiver if target.kind is TargetKind.FUNCTION else "self"
    return [
        *([receiver] if receiver else []),
        *(argument.name for argument in capture.arguments if not argument.is_state),
    ]


def _dispatch(capture: Capture, base: str, passes: Sequence[_Pass], *, uses_cuda_graph: bool) -> str:
    graph, launcher = forward_part(capture.graph), passes[0].launcher
    run = f"{base}_cuda_graph" if uses_cuda_graph else f"{base}_launch"
    if len(passes) == 1 and launcher.is_operator():
        run = f"({base}_triton if torch.compiler.is_compiling() else {run})"
    further = [item.access for item in graph.numbers if item.name in launcher.number_names]
    if capture.graph.backward is not None and (original := original_code(capture, "", graph, launcher, ())):
        further.append(original.access)
    fits = call_text(f"{base}_fits", _guard_parameters(capture))
    if returns_tensors(graph):
        # The variable is prefixed with the target's name, so that it cannot shadow a global of the user's code.
        call, fits = f"{run}({', '.join([f'*{base}_tensors', *further])})", f"({base}_tensors := {fits}) is not None"
    else:
        call = call_text(run, [*(item.access for item in graph.inputs), *further], "    ")
    if is_nested(graph.returns) or graph.state_attributes:
        results = f"{base}_results"
        n_results = len(graph.results)
        kept_assignments = "".join(
            f"    {access} = {results}[{n_results + i}]\n" for i, access in enumerate(graph.state_attributes)
        )
        numbered_results = ", ".join(f"{RESULTS}[{i}]" for i in range(n_results))
        flat_structures = {
            "tensor": numbered_results,
            "tuple": f"({numbered_results},)",
            "list": f"[{numbered_results}]",
        }
        size_texts = {
            symbol: binding.operand
            for symbol, binding in bindings(graph, {i.name: i.access for i in graph.inputs}).items()
        }
        returned = fill_structure(
            flat_structures.get(graph.returns, graph.returns),
            lambda i: f"{results}[{i}]",
            lambda size: size_text(Size.parse(size), size_texts),
        )
        assignment = f"{results} = {call if len(graph.outputs) > 1 else f'({call},)'}" if graph.outputs else call
        return f"if {fits}:\n    {assignment}\n{kept_assignments}    return {returned}\n"
    if graph.returns == "list":
        call = f"list({call})"
    elif graph.returns == "tuple" and len(graph.outputs) == 1:
        call = f"({call},)"
    return f"if {fits}:\n    return {call}\n"
