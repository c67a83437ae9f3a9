"""The built-in coder: applies a planner action to the schedule and renders graph and schedule as a new version of the file."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from mtmc_lsp.actions.catalogue import IllegalAction, apply_action
from mtmc_lsp.capture.result_structure import RESULTS, fill_structure, is_nested
from mtmc_lsp.codegen.attention.attention_kernel import write_attention_kernel
from mtmc_lsp.codegen.kernel.device_functions import HELPERS, helpers_used
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import LINE, call_text
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR_SOURCE
from mtmc_lsp.codegen.matmul.matmul_kernel import write_product_kernels, write_whole_product
from mtmc_lsp.codegen.matmul.split_k import write_split_product
from mtmc_lsp.codegen.matmul.split_on_load import write_product_split_on_load
from mtmc_lsp.codegen.matmul.stream_k import write_stream_product
from mtmc_lsp.codegen.module.constants import CONSTANT_SOURCE
from mtmc_lsp.codegen.module.cuda_graph import GRAPHS, RUN_CUDA_GRAPH
from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES
from mtmc_lsp.codegen.module.guard import bindings, returns_tensors, size_text, write_guard
from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS
from mtmc_lsp.codegen.module.launcher import Launcher
from mtmc_lsp.codegen.module.naming import (
    base_name,
    identifier,
    kernel_name,
    launch_key,
    value_name,
)
from mtmc_lsp.codegen.module.region_dispatch import region_dispatch
from mtmc_lsp.codegen.module.shared_kernels import HELPER, KernelNames, SharedKernels
from mtmc_lsp.codegen.module.side_by_side import side_by_side
from mtmc_lsp.codegen.module.unpacking import unpacking
from mtmc_lsp.codegen.module.up_to_date import write_check
from mtmc_lsp.codegen.recurrent.recurrent_launcher import RecurrentSteps
from mtmc_lsp.codegen.standalone import placed
from mtmc_lsp.codegen.tile.split_kernel import write_split_kernels
from mtmc_lsp.codegen.tile.tile_kernel import write_tile_kernel
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, GeneratedCode, KernelLaunch, Placement
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture, TargetKind
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import VIEWS, Region, RegionKind, analyse
from mtmc_lsp.ir.run_time_numbers import numbers_of
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.configs import AttentionConfig, KernelConfig, MatmulConfig, RecurrentConfig, TileConfig
from mtmc_lsp.schedule.launch_units import Unit, launches
from mtmc_lsp.schedule.matmul_configs import by_pointers
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.line_wrapping import wrapped

DISTRIBUTION = {
    RegionKind.MAP: "One pass over memory",
    RegionKind.REDUCE: "One program instance reads, reduces and writes each row",
    RegionKind.SCAN: "One program instance scans each row, one block of columns at a time",
    RegionKind.MATMUL: "Each program instance computes one tile of the product and applies the fused operations in registers",
    RegionKind.RECURRENT: "Each launch runs the independent steps of all layers (or directions); launches run in sequence. "
    "Each program instance computes all gates of a block of units",
    RegionKind.ATTENTION: "Each program instance holds a block of queries and loops over the keys; scores stay on chip",
}
MAX_NAMED_RESULTS = 3
"""Maximum number of results that appear in the name of a kernel that computes several."""
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
    graph = ir.graph
    schedule = _with_random_kernels(ir, schedule, device)
    base = base_name(capture.workload.target, source)
    recomputed = frozenset(name for kernel in schedule.kernels for name in kernel.recomputed)
    launcher = Launcher(ir, recomputed=recomputed)
    if not all(part.isidentifier() for part in capture.module_name.split(".")):
        # The module name is not a valid dotted name (KernelBench imports files such as 1_Square_matrix.py by path).
        launcher.namespace = "mtmc_{''.join(c if c.isalnum() else '_' for c in __name__)}"
    kernels: list[Kernel] = []
    lines = source.splitlines()
    units = launches(ir, schedule)
    shared = SharedKernels(helpers)
    live_keys = {launch_key(launch) for launch in units} | {unit.nodes[-1] for launch in units for unit in launch}
    is_live = {key: key in live_keys or key.startswith(HELPER) for key, _ in schedule.kernel_names}
    names = KernelNames(source, {key: name for key, name in schedule.kernel_names if is_live[key]})
    is_one_of_several = sum(not _is_view(ir, unit) for launch in units for unit in launch) > 1
    for unit, *grouped in units:
        if unit.plan is None or unit.region is None:
            launcher.torch_call(graph.node(unit.nodes[0]))
            continue
        if grouped:
            launch = [unit, *grouped]
            kernel = shared.shared(_write_side_by_side(ir, launch, launcher, base, names, lines, device))
            launcher.launch(kernel, [each.region for each in launch if each.region is not None])
            kernels.append(kernel)
            parts = [each.nodes[-1] for each in launch]
            names.written(launch_key(launch), kernel.name, [kernel.name, *kernel.functions], parts)
            continue
        key = unit.nodes[-1]
        name = names.choose(key, kernel_name(ir, unit, base, is_one_of_several))
        if isinstance(unit.plan.config, RecurrentConfig):
            docstring = _docstring(ir, unit.region, unit.plan, lines)
            steps = RecurrentSteps(ir, unit.region, unit.plan.config)
            kernel = shared.shared(steps.kernel(name, docstring))
            steps.launch(launcher, kernel)
            kernels.append(kernel)
            names.written(key, kernel.name, [kernel.name])
            continue
        written = []
        drafts = _write_kernels(ir, unit.region, unit.plan, launcher, name, lines, device)
        for draft in drafts:
            if draft is not drafts[-1]:
                names.note_helper(draft)
            written.append(shared.shared(draft))
            launcher.launch(written[-1], [unit.region])
        # A shared kernel may appear several times here, each time with its own limits.
        kernels += written
        names.written(key, written[-1].name, [kernel.name for kernel in written])
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
    block = _module_block(capture, limits, base, kernels, launcher, uses_cuda_graph=schedule.cuda_graph)
    compiled = tuple(launch for i, launch in enumerate(launcher.launches) if launch not in launcher.launches[:i])
    dispatch = _dispatch(capture, base, launcher, uses_cuda_graph=schedule.cuda_graph)
    imports = ("import math", *IMPORTS) if any(number.uses_math for number in numbers_of(graph)) else IMPORTS
    dispatch = region_dispatch(dispatch, capture.workload.target.region)
    return Rendered(GeneratedCode(imports, block, dispatch), compiled, tuple(names.given.items()))


def _is_view(ir: KernelIR, unit: Unit) -> bool:
    """Whether it is a torch call that computes nothing."""
    return unit.plan is None and ir.graph.node(unit.nodes[-1]).op.split(".")[1] in VIEWS


def _with_random_kernels(ir: KernelIR, schedule: Schedule, device: DeviceModel) -> Schedule:
    """Put every random operation into a kernel, so that all of them use the launcher's single seed."""
    for prim in ir.prims.values():
        if prim.op is PrimOp.RANDOM and schedule.kernels and schedule.kernel_of(prim.origin) is None:
            config = default_config(ir, analyse(ir, (prim.origin,)), device)
            schedule = replace(schedule, kernels=(*schedule.kernels, KernelPlan((prim.origin,), config)))
    return schedule


def _write_kernels(
    ir: KernelIR,
    region: Region,
    plan: KernelPlan,
    launcher: Launcher,
    name: str,
    lines: list[str],
    device: DeviceModel,
) -> list[Kernel]:
    missing = [prim for prim in region.inputs if prim not in launcher.buffers]
    if missing:
        raise CannotCode(f"the input {ir.prims[missing[0]].origin} of this kernel is not in memory; fuse its producer")
    config = plan.config
    docstring = _docstring(ir, region, plan, lines)
    if isinstance(config, MatmulConfig):
        if config.splits_one_operand_on_load:
            return write_product_split_on_load(ir, region, launcher.buffers, config, name, docstring, device)
        write_product = write_whole_product
        if config.split_k > 1:
            write_product = write_split_product
        elif config.stream_k:
            write_product = write_stream_product
        kernels = write_product_kernels(ir, region, launcher.buffers, config, name, docstring, write_product, device)
        if all(launcher.supports_descriptors(kernel) for kernel in kernels):
            return kernels
        config = by_pointers(config, device)
        return write_product_kernels(ir, region, launcher.buffers, config, name, docstring, write_product, device)
    if isinstance(config, AttentionConfig):
        return [write_attention_kernel(ir, region, launcher.buffers, config, name, docstring)]
    assert isinstance(config, TileConfig)
    if config.is_split:
        return write_split_kernels(ir, region, launcher.buffers, config, name, docstring)
    return [write_tile_kernel(ir, region, launcher.buffers, config, name, docstring)]


def _write_side_by_side(
    ir: KernelIR,
    units: Sequence[Unit],
    launcher: Launcher,
    base: str,
    names: KernelNames,
    lines: list[str],
    device: DeviceModel,
) -> Kernel:
    """Write the kernels of several units as one launch."""
    members: list[Kernel] = []
    for unit in units:
        assert unit.plan is not None and unit.region is not None
        name = names.choose(unit.nodes[-1], kernel_name(ir, unit, base, is_one_of_several=True))
        written = _write_kernels(ir, unit.region, unit.plan, launcher, name, lines, device)
        if len(written) > 1:
            raise CannotCode(f"{name} needs {len(written)} launches; only kernels with one launch can share a launch")
        members += written
    results = [value_name(ir, unit.region.outputs[-1]) for unit in units if unit.region is not None]
    named_results = results if len(results) <= MAX_NAMED_RESULTS else [*results[: MAX_NAMED_RESULTS - 1], "others"]
    name = names.choose(launch_key(units), f"{base}_{identifier('_and_'.join(named_results))}_kernel")
    return side_by_side(name, members, f"{', '.join(results[:-1])} and {results[-1]}, in one launch.")


def _distribution(region: Region, config: KernelConfig) -> str:
    """Describe how the work is distributed over program instances."""
    if isinstance(config, TileConfig) and config.is_split:
        return "Several program instances share each row and combine the partial results of the preceding kernels"
    if isinstance(config, MatmulConfig) and config.split_k > 1:
        return "Adds the partial sums over K and applies the fused operations to the tile in registers"
    if isinstance(config, MatmulConfig) and config.stream_k:
        return "Adds the partial sums of shared tiles and applies the fused operations to each tile in registers"
    how = DISTRIBUTION[region.kind]
    is_persistent = isinstance(config, (TileConfig, MatmulConfig)) and config.persist > 0
    return f"{how}; each program instance loops over several work items" if is_persistent else how


def _docstring(
    ir: KernelIR,
    region: Region,
    plan: KernelPlan,
    lines: list[str],
) -> str:
    """The kernel's docstring: the source lines that it computes, and which memory traffic it avoids."""
    line_numbers = sorted({ir.graph.node(name).line for name in (*region.nodes, *plan.recomputed)} - {0})
    quoted = [lines[n - 1].strip() for n in line_numbers if 0 < n <= len(lines)]
    quoted = [text if len(text) <= LINE else f"{text[: LINE - 4]} ..." for text in quoted]
    results = ", ".join(value_name(ir, ref) for ref in region.outputs)
    n_intermediates = len(region.nodes) - len(region.outputs)
    memory_note = "; intermediate values are not written to memory" if n_intermediates > 0 else ""
    distribution = _distribution(region, plan.config)
    summary = f"{results}, in one kernel."
    source_lines = "".join(f"    {text}\n" for text in dict.fromkeys(quoted))
    prose = textwrap.fill(f"{distribution}{memory_note}.", LINE)
    return f"{summary}\n\n{source_lines}\n{prose}".replace('"""', "'''").replace("\\", "\\\\")


def _module_block(
    capture: Capture,
    limits: tuple[str, ...],
    base: str,
    kernels: list[Kernel],
    launcher: Launcher,
    *,
    uses_cuda_graph: bool,
) -> str:
    graph = capture.graph
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
        uses_atomics=launcher.uses_atomics,
        up_to_date=f"{base}_up_to_date()" if check else "",
        unpacked=unpacked,
    )
    target = capture.workload.target
    part = f"Region {target.region.number} of " if target.region is not None else ""
    summary = f"{part}``{target.qualname}`` with Triton kernels."
    sources = list(dict.fromkeys(text for kernel in kernels for text in (*kernel.functions.values(), kernel.source)))
    helpers = _helpers("\n".join(sources))
    checks = [source for name, source in GUARD_HELPERS.items() if re.search(rf"\b{name}\b", guard)]
    launch = launcher.finish(f"{base}_launch", f"{base}_triton", summary)
    helpers_of_launcher = [DIRECT_LAUNCHES] if launcher.launches else []
    helpers_of_launcher += [ALLOCATOR_SOURCE] if launcher.makes_descriptors else []
    helpers_of_launcher += [CONSTANT_SOURCE] if launcher.makes_constants else []
    cuda_graph = [GRAPHS, RUN_CUDA_GRAPH, _cuda_graph_function(capture, base, launcher)] if uses_cuda_graph else []
    version_check = [check] if check else []
    parts = [*helpers, *sources, *checks, *version_check, guard, *helpers_of_launcher, launch, *cuda_graph]
    return wrapped("\n\n".join(parts))


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


def _dispatch(capture: Capture, base: str, launcher: Launcher, *, uses_cuda_graph: bool) -> str:
    graph = capture.graph
    run = f"{base}_cuda_graph" if uses_cuda_graph else f"{base}_launch"
    if launcher.is_operator():
        run = f"({base}_triton if torch.compiler.is_compiling() else {run})"
    number_accesses = [item.access for item in graph.numbers if item.name in launcher.number_names]
    fits = call_text(f"{base}_fits", _guard_parameters(capture))
    if returns_tensors(graph):
        # The variable is prefixed with the target's name, so that it cannot shadow a global of the user's code.
        numbers = "".join(f", {access}" for access in number_accesses)
        call, fits = f"{run}(*{base}_tensors{numbers})", f"({base}_tensors := {fits}) is not None"
    else:
        call = call_text(run, [*(item.access for item in graph.inputs), *number_accesses], "    ")
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
