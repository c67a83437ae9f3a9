"""The built-in coder: applies a macro action to the schedule and renders graph + schedule as a new version of the file."""

from __future__ import annotations

import hashlib
import itertools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.actions.catalogue import IllegalAction, apply_action
from mtmc_lsp.capture.result_structure import RESULTS, is_nested, put_together
from mtmc_lsp.codegen.attention.attention_kernel import write_attention_kernel
from mtmc_lsp.codegen.kernel.device_functions import HELPERS, helpers_used
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import LINE, call_text
from mtmc_lsp.codegen.matmul.descriptors import MEMORY_SOURCE
from mtmc_lsp.codegen.matmul.matmul_kernel import whole_product, write_product_kernels
from mtmc_lsp.codegen.matmul.split_k import write_split_product
from mtmc_lsp.codegen.matmul.split_on_load import write_product_split_on_load
from mtmc_lsp.codegen.matmul.stream_k import write_stream_product
from mtmc_lsp.codegen.module.constants import CONSTANT_SOURCE
from mtmc_lsp.codegen.module.cuda_graph import GRAPHS, REPLAYED
from mtmc_lsp.codegen.module.guard import bindings, gives_tensors, size_text, write_guard
from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS
from mtmc_lsp.codegen.module.launcher import Launcher
from mtmc_lsp.codegen.module.naming import identifier, value_name
from mtmc_lsp.codegen.module.shared_kernels import SharedKernels
from mtmc_lsp.codegen.module.side_by_side import side_by_side
from mtmc_lsp.codegen.module.up_to_date import write_check
from mtmc_lsp.codegen.recurrent.recurrent_launcher import RecurrentSteps
from mtmc_lsp.codegen.tile.split_kernel import write_split_kernels
from mtmc_lsp.codegen.tile.tile_kernel import write_tile_kernel
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, GeneratedCode, KernelLaunch
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture, TargetKind
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind, analyse
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.rewrites.specialised_sizes import guard_conditions, in_captured_sizes
from mtmc_lsp.schedule.configs import AttentionConfig, KernelConfig, MatmulConfig, RecurrentConfig, TileConfig
from mtmc_lsp.schedule.launch_units import Unit, launches
from mtmc_lsp.schedule.matmul_configs import by_pointers
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.source.compose import compose, strip_generated

HOW = {
    RegionKind.MAP: "One pass over memory",
    RegionKind.REDUCE: "Each row is read, reduced and written by one program",
    RegionKind.SCAN: "Each row is scanned by one program, a block of columns at a time",
    RegionKind.MATMUL: "Each program makes one tile of the product; what surrounds the product is done on the tile in registers",
    RegionKind.RECURRENT: "Steps of layers (or directions) that do not wait for one another are one launch, and these follow one "
    "another; each program makes all gates of a block of units",
    RegionKind.ATTENTION: "Each program keeps a block of queries and walks the keys; the scores never go to memory",
}
MOST_NAMED = 3
"""Results in the name of a kernel that makes several."""
IMPORTS = (
    "import torch",
    "import triton",
    "import triton.language as tl",
    "from torch.library import triton_op, wrap_triton",
)


class BuiltinCoder:
    """Writes Triton with no network; the same capture, candidate and action give the same candidate byte for byte."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """The user's own file, nothing generated."""
        plain = strip_generated(source.encode(), capture.workload.target.qualname).decode()
        return Candidate(_content_id(plain), None, None, plain, None, to_json(Schedule()))

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied.

        Raises:
            CannotCode: the action is not legal here, or has no Triton form.
        """
        schedule = from_json(Schedule, candidate.schedule)
        try:
            changed = apply_action(capture.graph, schedule, action)
            ir = ir_of(capture.graph, changed)
        except (IllegalAction, CannotRewrite) as reason:
            raise CannotCode(str(reason)) from None
        target = capture.workload.target
        plain = strip_generated(candidate.source.encode(), target.qualname)
        try:
            code, launches = render(capture, ir, changed, plain.decode())
        except RecursionError:
            why = "more of its operations wait for one another than one kernel can be written with"
            raise CannotCode(f"{why}; fuse fewer of them") from None
        text = compose(plain, target, code).decode()
        return Candidate(_content_id(text), candidate.id, action, text, code, to_json(changed), launches)


def _content_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def render(
    capture: Capture, ir: KernelIR, schedule: Schedule, source: str
) -> tuple[GeneratedCode, tuple[KernelLaunch, ...]]:
    """Generated code for a schedule, and how its kernels are launched."""
    graph = ir.graph
    schedule = _with_random_kernels(ir, schedule)
    base = _base_name(capture.workload.target.qualname, source)
    again = frozenset(name for kernel in schedule.kernels for name in kernel.recomputed)
    launcher = Launcher(ir, recomputed=again)
    if not all(part.isidentifier() for part in capture.module_name.split(".")):
        # KernelBench's files, such as 1_Square_matrix.py, are imported by their path.
        launcher.namespace = "mtmc_{''.join(c if c.isalnum() else '_' for c in __name__)}"
    kernels: list[Kernel] = []
    lines = source.splitlines()
    todo = launches(ir, schedule)
    shared = SharedKernels()
    several = sum(1 for launch in todo for unit in launch if unit.plan is not None) > 1
    for unit, *others in todo:
        if unit.plan is None or unit.region is None:
            launcher.torch_call(graph.node(unit.nodes[0]))
            continue
        if others:
            kernel = shared.one_for(_write_side_by_side(ir, [unit, *others], launcher, base, kernels, lines))
            launcher.launch(kernel, [each.region for each in (unit, *others) if each.region is not None])
            kernels.append(kernel)
            continue
        name = _free(_kernel_name(ir, unit, base, several), kernels)
        if isinstance(unit.plan.config, RecurrentConfig):
            docstring = _docstring(ir, unit.region, unit.plan, lines)
            steps = RecurrentSteps(ir, unit.region, unit.plan.config)
            kernel = shared.one_for(steps.kernel(name, docstring))
            steps.launch(launcher, kernel)
            kernels.append(kernel)
            continue
        for written in _write_kernels(ir, unit.region, unit.plan, launcher, name, lines):
            kernel = shared.one_for(written)
            launcher.launch(kernel, [unit.region])
            # Another place may have called it already; its limits are its own.
            kernels.append(kernel)
    asked = dict.fromkeys(limit for kernel in kernels for limit in kernel.limits)
    own_sizes = (in_captured_sizes(limit, schedule.rewrites) for limit in asked)
    limits = (*guard_conditions(schedule.rewrites), *own_sizes)
    for limit in limits:
        # The limits are the kernels' own: arithmetic over named sizes.
        if not eval(limit, {"__builtins__": {}}, dict(capture.graph.sizes)):
            raise CannotCode(f"the kernels hold for {limit} alone, which these sizes are not")
    block = _block(capture, limits, base, kernels, launcher, is_replayed=schedule.cuda_graph)
    compiled = tuple(launch for i, launch in enumerate(launcher.launches) if launch not in launcher.launches[:i])
    dispatch = _dispatch(capture, base, launcher, is_replayed=schedule.cuda_graph)
    return GeneratedCode(IMPORTS, block, dispatch), compiled


def _with_random_kernels(ir: KernelIR, schedule: Schedule) -> Schedule:
    """Every random operation runs in a kernel, so that all draw from the launcher's one seed."""
    for prim in ir.prims.values():
        if prim.op is PrimOp.RANDOM and schedule.kernels and schedule.kernel_of(prim.origin) is None:
            config = default_config(ir, analyse(ir, (prim.origin,)), default_model())
            schedule = replace(schedule, kernels=(*schedule.kernels, KernelPlan((prim.origin,), config)))
    return schedule


def _write_kernels(
    ir: KernelIR,
    region: Region,
    plan: KernelPlan,
    launcher: Launcher,
    name: str,
    lines: list[str],
) -> list[Kernel]:
    missing = [prim for prim in region.inputs if prim not in launcher.buffers]
    if missing:
        raise CannotCode(f"{ir.prims[missing[0]].origin} is not in memory")
    config = plan.config
    docstring = _docstring(ir, region, plan, lines)
    if isinstance(config, MatmulConfig):
        if config.splits_one_operand_on_load:
            return write_product_split_on_load(ir, region, launcher.buffers, config, name, docstring)
        finished = whole_product
        if config.split_k > 1:
            finished = write_split_product
        elif config.stream_k:
            finished = write_stream_product
        kernels = write_product_kernels(ir, region, launcher.buffers, config, name, docstring, finished)
        if all(launcher.may_be_described(kernel) for kernel in kernels):
            return kernels
        return write_product_kernels(ir, region, launcher.buffers, by_pointers(config), name, docstring, finished)
    if isinstance(config, AttentionConfig):
        return [write_attention_kernel(ir, region, launcher.buffers, config, name, docstring)]
    assert isinstance(config, TileConfig)
    if config.is_split:
        return write_split_kernels(ir, region, launcher.buffers, config, name, docstring)
    return [write_tile_kernel(ir, region, launcher.buffers, config, name, docstring)]


def _write_side_by_side(
    ir: KernelIR,
    together: Sequence[Unit],
    launcher: Launcher,
    base: str,
    kernels: Sequence[Kernel],
    lines: list[str],
) -> Kernel:
    """The kernels of several units as one launch."""
    parts: list[Kernel] = []
    for unit in together:
        assert unit.plan is not None and unit.region is not None
        name = _free(_kernel_name(ir, unit, base, several=True), [*kernels, *parts])
        written = _write_kernels(ir, unit.region, unit.plan, launcher, name, lines)
        if len(written) > 1:
            raise CannotCode(f"{name} is {len(written)} launches")
        parts += written
    results = [value_name(ir, unit.region.outputs[-1]) for unit in together if unit.region is not None]
    own = results if len(results) <= MOST_NAMED else [*results[: MOST_NAMED - 1], "others"]
    name = _free(f"{base}_{identifier('_and_'.join(own))}_kernel", [*kernels, *parts])
    return side_by_side(name, parts, f"{', '.join(results[:-1])} and {results[-1]}, side by side in one launch.")


def _how(region: Region, config: KernelConfig) -> str:
    """How the work is distributed."""
    if isinstance(config, TileConfig) and config.is_split:
        return "Many programs share each row, and combine what the kernels before found for each part of it"
    if isinstance(config, MatmulConfig) and config.split_k > 1:
        return "The sums of all parts of K are added; what surrounds the product is done on the tile in registers"
    if isinstance(config, MatmulConfig) and config.stream_k:
        return "The parts of the tiles that programs share are added; what surrounds the product is done on the tile in registers"
    how = HOW[region.kind]
    is_persistent = isinstance(config, (TileConfig, MatmulConfig)) and config.persist > 0
    return f"{how}, one piece of work after another" if is_persistent else how


def _docstring(
    ir: KernelIR,
    region: Region,
    plan: KernelPlan,
    lines: list[str],
) -> str:
    """The user's own lines that the kernel computes, and what is saved."""
    numbers = sorted({ir.graph.node(name).line for name in (*region.nodes, *plan.recomputed)} - {0})
    quoted = [lines[n - 1].strip() for n in numbers if 0 < n <= len(lines)]
    results = ", ".join(value_name(ir, ref) for ref in region.outputs)
    inner = len(region.nodes) - len(region.outputs)
    saved = "; nothing between is written to memory" if inner > 0 else ""
    passes = _how(region, plan.config)
    head = f"{results}, in one kernel."
    body = "".join(f"    {text}\n" for text in dict.fromkeys(quoted))
    prose = textwrap.fill(f"{passes}{saved}.", LINE)
    return f"{head}\n\n{body}\n{prose}".replace('"""', "'''").replace("\\", "\\\\")


def _base_name(qualname: str, source: str) -> str:
    """Snake-case stem of the generated names, free in the user's file."""
    parts = [part for part in qualname.split(".") if part != "forward"]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", "_".join(parts)).lower()
    base = identifier(words)
    while any(
        re.search(rf"\b{base}_{suffix}\b", source)
        for suffix in ("fits", "launch", "triton", "kernel", "replay", "tensors", "results", "up_to_date")
    ):
        base += "_mtmc"
    return base


def _kernel_name(ir: KernelIR, unit: Unit, base: str, several: bool) -> str:
    assert unit.region is not None
    return f"{base}_{identifier(value_name(ir, unit.region.outputs[-1]))}_kernel" if several else f"{base}_kernel"


def _free(name: str, kernels: Sequence[Kernel]) -> str:
    """``name``, or with a number in front of ``_kernel`` where another kernel has it.

    So has one that is named after it, such as what finds the parts of its sums: where two such need the same kernel behind them,
    there is only one of that, of the other's name.
    """
    taken = [name for kernel in kernels for name in (kernel.name, *kernel.functions)]

    def is_taken(choice: str) -> bool:
        return any(name == choice or name.startswith(f"{choice}_") for name in taken)

    choices = itertools.chain([name], (f"{name.removesuffix('_kernel')}_{n}_kernel" for n in itertools.count(2)))
    return next(choice for choice in choices if not is_taken(choice))


def _block(
    capture: Capture,
    limits: tuple[str, ...],
    base: str,
    kernels: list[Kernel],
    launcher: Launcher,
    *,
    is_replayed: bool,
) -> str:
    graph = capture.graph
    access = {item.name: item.access for item in graph.inputs}
    check = write_check(f"{base}_up_to_date", graph.dependencies)
    guard = write_guard(
        f"{base}_fits",
        _guard_parameters(capture),
        graph,
        access,
        limits,
        tuple(launcher.aligned),
        adds_in_no_order=launcher.adds_in_no_order,
        up_to_date=f"{base}_up_to_date()" if check else "",
    )
    what = f"``{capture.workload.target.qualname}`` by Triton kernels."
    sources = list(dict.fromkeys(text for kernel in kernels for text in (*kernel.functions.values(), kernel.source)))
    helpers = _helpers("\n".join(sources))
    checks = [source for name, source in GUARD_HELPERS.items() if f"{name}(" in guard]
    launch = launcher.finish(f"{base}_launch", f"{base}_triton", what)
    memory = [MEMORY_SOURCE] if launcher.makes_descriptors else []
    memory += [CONSTANT_SOURCE] if launcher.makes_constants else []
    replay = [GRAPHS, REPLAYED, _replay(capture, base, launcher)] if is_replayed else []
    own_check = [check] if check else []
    return "\n\n".join([*helpers, *sources, *checks, *own_check, guard, *memory, launch, *replay])


def _replay(capture: Capture, base: str, launcher: Launcher) -> str:
    """The function that replays the launcher."""
    kinds = {launcher.input_names[item.name]: item.kind for item in capture.graph.inputs}
    given = [name for name, kind in kinds.items() if kind is InputKind.ARGUMENT]
    held = [name for name in kinds if name not in given]
    if list(kinds) != [*given, *held]:
        raise CannotCode("the module's tensors come before the arguments")
    changed = {launcher.input_names[mutation.input] for mutation in capture.graph.mutations}
    if changed & set(given):
        raise CannotCode("a graph has copies of the arguments, of which some are changed")
    parts = [given, held, [str(i) for i, name in enumerate(held) if name in changed]]
    texts = [f"({', '.join(part)}{',' if len(part) == 1 else ''})" for part in (parts if changed else parts[:2])]
    return (
        f"def {base}_replay({', '.join(kinds)}):\n"
        f'    """``{base}_launch``, replayed as one CUDA graph."""\n'
        f"    return {call_text('_replayed', [f'{base}_launch', *texts], '    ')}\n"
    )


def _helpers(text: str) -> list[str]:
    """Sources of the helper functions that are called, including by one another."""
    found = helpers_used(text)
    while True:
        more = [name for name in helpers_used(text + "".join(HELPERS[n] for n in found)) if name not in found]
        if not more:
            return [HELPERS[name] for name in HELPERS if name in found]
        found += more


def _guard_parameters(capture: Capture) -> list[str]:
    target = capture.workload.target
    own = [] if target.kind is TargetKind.FUNCTION else ["self"]
    return [*own, *(argument.name for argument in capture.arguments if not argument.is_kept)]


def _dispatch(capture: Capture, base: str, launcher: Launcher, *, is_replayed: bool) -> str:
    graph = capture.graph
    run = f"{base}_replay" if is_replayed else f"{base}_launch"
    if launcher.is_operator():
        run = f"({base}_triton if torch.compiler.is_compiling() else {run})"
    fits = call_text(f"{base}_fits", _guard_parameters(capture))
    if gives_tensors(graph):
        # Under a name of the target's own: the user's code may have a global one of any other.
        call, fits = f"{run}(*{base}_tensors)", f"({base}_tensors := {fits}) is not None"
    else:
        call = call_text(run, [item.access for item in graph.inputs], "    ")
    if is_nested(graph.returns) or graph.kept:
        results = f"{base}_results"
        own = len(graph.results)
        kept = "".join(f"    {access} = {results}[{own + i}]\n" for i, access in enumerate(graph.kept))
        numbered = ", ".join(f"{RESULTS}[{i}]" for i in range(own))
        plain = {"tensor": numbered, "tuple": f"({numbered},)", "list": f"[{numbered}]"}
        texts = {symbol: own.text for symbol, own in bindings(graph, {i.name: i.access for i in graph.inputs}).items()}
        returned = put_together(
            plain.get(graph.returns, graph.returns),
            lambda i: f"{results}[{i}]",
            lambda size: size_text(Size.parse(size), texts),
        )
        given = f"{results} = {call if len(graph.outputs) > 1 else f'({call},)'}" if graph.outputs else call
        return f"if {fits}:\n    {given}\n{kept}    return {returned}\n"
    if graph.returns == "list":
        call = f"list({call})"
    elif graph.returns == "tuple" and len(graph.outputs) == 1:
        call = f"({call},)"
    return f"if {fits}:\n    return {call}\n"
