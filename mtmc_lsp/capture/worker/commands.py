"""The capture command of the worker: turns a workload into a graph and facts about the eager run."""

from __future__ import annotations

import contextlib
import gc
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mtmc_lsp.capture.accesses import dotted, is_of_module
from mtmc_lsp.capture.index_bounds import sizes_behind_indices, sizes_of_computed_indices
from mtmc_lsp.capture.messages import NO_BACKWARD, CaptureRequest, LocalValues, LocalValuesRequest
from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.capture.worker.arguments.description import (
    NOT_PLAIN,
    captured_arguments,
    names_of_leaves,
    plain_value,
    refuse_unknown_containers,
)
from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out
from mtmc_lsp.capture.worker.autocast.regions import gpu_autocast_on_cpu
from mtmc_lsp.capture.worker.calls import Call, build_call, constructed, user_error
from mtmc_lsp.capture.worker.convolution_modes import convolution_modes
from mtmc_lsp.capture.worker.dependencies import dependencies
from mtmc_lsp.capture.worker.dependency_recorder import DependencyRecorder
from mtmc_lsp.capture.worker.eager_run import buffers, call_slots, flat_function, run_eagerly, run_without_data
from mtmc_lsp.capture.worker.export import export_graph
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.capture.worker.loops.folding import fold_loops
from mtmc_lsp.capture.worker.loops.keeping import Keeper, keeping_loops
from mtmc_lsp.capture.worker.loops.statements.functions import functions_of, library_functions
from mtmc_lsp.capture.worker.module_state import (
    StateFound,
    non_parameter_tensors,
    refuse_new_state,
    refuse_unset_state,
    with_other_names,
)
from mtmc_lsp.capture.worker.module_structure import aliases_in, class_name, used_modules
from mtmc_lsp.capture.worker.modules.attribute_tensors import containers_of
from mtmc_lsp.capture.worker.modules.irrelevant_values import without_irrelevant_values
from mtmc_lsp.capture.worker.modules.members import access_of
from mtmc_lsp.capture.worker.modules.module_dtype import with_module_dtype
from mtmc_lsp.capture.worker.passes.gradients import GradientTrace, NotTrainable, why_not_trainable
from mtmc_lsp.capture.worker.passes.graph_cleanup import (
    Layout,
    remove_dead_nodes,
    separate_unread_inputs,
    with_layouts,
    with_returned_inputs,
)
from mtmc_lsp.capture.worker.passes.masked_updates import refuse_unknown_sizes, rewrite_masked_updates
from mtmc_lsp.capture.worker.passes.noop_writes import remove_noop_writes
from mtmc_lsp.capture.worker.passes.one_hot_gradients import compare_instead_of_scattering
from mtmc_lsp.capture.worker.passes.recurrent_layers import single_recurrent_operators
from mtmc_lsp.capture.worker.passes.redundant_nodes import remove_redundant_nodes
from mtmc_lsp.capture.worker.passes.row_writes import stack_rows
from mtmc_lsp.capture.worker.passes.size_names import size_names, widths_of
from mtmc_lsp.capture.worker.precision_settings import precision_settings
from mtmc_lsp.capture.worker.regions.local_values import local_values
from mtmc_lsp.capture.worker.regions.region_errors import in_region
from mtmc_lsp.capture.worker.side_effects import (
    is_random,
    recording_attribute_uses,
    refuse_hidden_mutations,
    refuse_random,
)
from mtmc_lsp.capture.worker.size_branches import (
    long_enough_for_cudnn,
    more_than_one_value,
    never_empty,
    rolled_within,
    sizes_above_one,
)
from mtmc_lsp.capture.worker.tracing.free_flags import MAX_NODES, FreeFlags, free_flags
from mtmc_lsp.capture.worker.tracing.free_numbers import export_with_numbers
from mtmc_lsp.capture.worker.tracing.random_draws import RandomDraws
from mtmc_lsp.capture.worker.tracing.target_body import check_decorators, observed_call, owner_of, receiver_of
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.dtypes import COMPLEX, ITEMSIZE, itemsize
from mtmc_lsp.core.errors import FailureKind, Location, MtmcError, RequestError, SourceSyntaxError, TargetUnsupported
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.workload import Capture, CapturedArgument, Environment, Target, Workload, WorkloadSource

NOTE_ON_PAIRS = "infinite and NaN inputs are not compared: kernels leave out products of complex parts with 0"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Begins with a line such as ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build``."""
COLLECTION_THRESHOLDS = (100_000, 20, 100)
"""Of Python's garbage collector during an export, which creates millions of objects and frees few: 13 % of a network's capture
were collections at the usual thresholds."""
EAGER_LIMIT_ELEMENTS = 1 << 23
"""Above this many input elements, capture does not run the target on the CPU. Verification runs it on reduced sizes."""


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_collections()
def capture(request: CaptureRequest) -> Capture:
    """Capture a target. Repeats the capture when it finds state tensors, with these as further arguments."""
    target = request.workload.target
    module = _load_module(target, request.source)
    text = (request.source or Path(target.path).read_text("utf-8")).splitlines()

    def with_state(workload: Workload) -> Capture:
        while True:
            try:
                return _with_gradients_if_possible(module, workload, request.variables, text)
            except StateFound as state:
                workload = replace(workload, state=with_other_names(workload, state.tensors))

    try:
        with _gpu_autocast(request.workload):
            return with_module_dtype(with_state, request.workload)
    except MtmcError as error:
        raise in_region(error, target) from error


def _gpu_autocast(workload: Workload) -> contextlib.AbstractContextManager[None]:
    """The casts of a GPU, where a CPU stands in for it."""
    stands_in = workload.device == "cuda" and _device(workload) == "cpu"
    return gpu_autocast_on_cpu() if stands_in else contextlib.nullcontext()


def values_of_locals(request: LocalValuesRequest) -> LocalValues:
    """Describe the local variables of a target at each of its statements."""
    module = _load_module(request.workload.target, request.source)
    with _gpu_autocast(request.workload):
        return local_values(module, request.workload, _device(request.workload))


def _device(workload: Workload) -> str:
    return "cuda" if workload.device == "cuda" and torch.cuda.is_available() else "cpu"


def _with_gradients_if_possible(
    module: Any, workload: Workload, variables: Mapping[int, str], text: Sequence[str]
) -> Capture:
    """Capture the target with its backward pass if the workload asks for gradients; without it if that is not supported."""
    if not workload.trains or workload.target.region is not None:
        return _capture_once(module, workload, variables, text, trains=False)
    try:
        return _capture_once(module, workload, variables, text, trains=True)
    except (NotTrainable, TargetUnsupported) as error:
        reason = error.message if isinstance(error, TargetUnsupported) else str(error)
    found = _capture_once(module, workload, variables, text, trains=False)
    note = f"{NO_BACKWARD}{reason}"
    return replace(found, workload=replace(found.workload, assumed=(*found.workload.assumed, note)))


def _capture_once(
    module: Any, workload: Workload, variables: Mapping[int, str], text: Sequence[str], *, trains: bool
) -> Capture:
    """Capture the target.

    Args:
        trains: whether to capture the backward pass, too.

    Raises:
        NotTrainable: the backward pass is not supported.
        StateFound: the target has state tensors that the workload does not list.
    """
    device = _device(workload)
    constructing, calling = DependencyRecorder(), DependencyRecorder()
    call = _build_target(module, workload, device, constructing)
    if call.decorated is not None:
        workload = _for_body(call, workload)
        call = _build_target(module, workload, device, constructing)
    inputs = _inputs(call, workload)
    named_class = partial(class_name, file=module)
    _check_inputs(inputs, workload.target, takes_complex=not trains)
    refuse_unknown_containers(call, named_class, workload.target)
    elements = sum(item.value.numel() for item in inputs)
    returned: list[Layout] = []
    runs_eagerly = device == "cuda" or elements <= EAGER_LIMIT_ELEMENTS
    if runs_eagerly:
        with calling:
            returned = run_eagerly(module, call, inputs, workload.target)
    before = non_parameter_tensors(call.instance)
    gradients = GradientTrace(_need_gradients(call, workload, inputs)) if trains else None
    export = partial(
        export_graph,
        inputs=inputs,
        target=workload.target,
        variables=variables,
        class_name=named_class,
        text=text,
        target_result=call.target_result,
        # A directive of numbers and ``get_inputs`` state sizes once, and kernels for constant image sizes can be faster.
        windows_vary=bool(workload.sizes) or workload.source is WorkloadSource.RECORDED,
        gradients=gradients,
    )

    def cleaned(graph: Graph) -> Graph:
        graph = remove_noop_writes(stack_rows(rewrite_masked_updates(with_layouts(graph, returned))))
        graph = compare_instead_of_scattering(graph)
        return remove_dead_nodes(fold_loops(remove_dead_nodes(remove_redundant_nodes(graph))))

    def traced(of: Call) -> Graph:
        """The graph with the values of numbers."""
        return cleaned(export(flat_function(of, inputs, workload.target))[0])

    def run(of: Call, draws: RandomDraws | None = None) -> tuple[float, list[str]]:
        # The eager run has called all functions of the call itself, and a recorded run takes longer.
        with contextlib.nullcontext() if runs_eagerly and of is call and not trains else calling:
            return run_without_data(of, inputs, workload.target, named_class, trains=trains, observer=draws)

    def observed(of: Call) -> tuple[list[str], bool]:
        draws = RandomDraws()
        return run(of, draws)[1], draws.any

    function = flat_function(call, inputs, workload.target)
    # Runs without data would leave tensors without data in caches that no eager run has filled.
    has_numbers = runs_eagerly and any(type(value) in (int, float) for value in call.values)

    def traced_once() -> tuple[Graph, tuple[str, ...]]:
        graph, notes = export_with_numbers(export, call, inputs, workload.target) if has_numbers else export(function)
        return cleaned(graph), notes

    keeper = Keeper()
    functions = [*functions_of(module, workload.target.path, call.function), *library_functions(calling.libraries)]
    keeping = partial(keeping_loops, keeper, functions, workload.target.path)
    with (
        single_recurrent_operators(),
        keeping(),
        recording_attribute_uses(call.instance, workload.target.path) as uses,
    ):
        try:
            graph, notes = keeper.repeated(traced_once, workload.target.path)
        finally:
            refuse_new_state(before, uses.writes.keys() - call.accesses, device)
        first = graph
        _check_inputs(inputs, workload.target, takes_complex=graph.has_pairs)
        refuse_unknown_sizes(graph, workload.target)
        size_conditions = (
            *sizes_above_one(function, graph, device),
            *more_than_one_value(graph),
            *never_empty(graph),
            *rolled_within(graph),
            *long_enough_for_cudnn(graph),
        )
        graph = replace(graph, conditions=tuple(dict.fromkeys((*graph.conditions, *size_conditions))))
        flops, returned_inputs = run(call)
    with single_recurrent_operators(), keeping():
        plain = (lambda: traced(call)) if first.numbers else (lambda: first)
        is_small = len(first.nodes) <= MAX_NODES
        values = (call, uses, plain, returned_inputs, workload.target.path, traced, observed)
        flags = free_flags(*values) if is_small else FreeFlags()
    calling.replace_codes(keeper.codes.values())
    notes = (*notes, *keeper.notes(text), *((NOTE_ON_PAIRS,) if graph.has_pairs else ()))
    uses.refuse_writes(workload.target, {item.access for item in workload.state})
    refuse_unset_state(call.state_homes, workload.state, uses.overwritten, workload.target)
    refuse_random(graph, workload.target)
    refuse_hidden_mutations(graph, workload.target)
    if trains and (why := why_not_trainable(graph)):
        raise NotTrainable(why)
    constants = _constants(call, without_irrelevant_values(call.instance, uses.reads), workload.target)
    free = {*flags.modes, *flags.arguments, *(item.access for item in graph.numbers)}
    constants = {access: value for access, value in constants.items() if access not in free}
    graph = replace(
        graph,
        constants=constants,
        free_flags=flags.arguments,
        state_attributes=tuple(item.access for item in workload.state),
    )
    settings = precision_settings(workload.autocast)
    graph = replace(
        graph,
        fp32_matmul=settings.float32_products,
        fp32_convolution=settings.float32_convolutions,
        autocast=settings.autocast,
        deterministic=settings.deterministic,
    )
    graph = remove_dead_nodes(with_returned_inputs(graph, returned_inputs))
    graph = separate_unread_inputs(graph, uses.tensors, uses.overwritten)
    _check_graph(graph, workload.target)
    if device == "cuda":
        copies = (laid_out(item.value, item.value.stride()) for item in inputs)
        modes = convolution_modes(lambda: flat_function(call, inputs, workload.target)(*copies), graph)
        graph = replace(graph, observed_convolution_modes=modes)
    tensors = [item.access for item in (*graph.inputs, *graph.unread_inputs)]
    accesses = (*filter(is_of_module, tensors), *uses.reads, *graph.state_attributes)
    modules = used_modules(call.instance, module, uses.called, accesses)
    used = {*(item.access for item in modules), *tensors}
    attributes = [i.access for i in (*graph.inputs, *graph.unread_inputs) if i.kind is InputKind.ATTRIBUTE]
    containers = containers_of(call.instance, attributes)
    graph = replace(
        graph, modules=modules, containers=containers, aliases=(*aliases_in(call.instance, used), *flags.equal_modes)
    )
    owner = owner_of(call.function)
    graph = replace(graph, dependencies=dependencies(module, calling, constructing, call.instance, owner))
    if owner is not None:
        # Another class, which inherits the method, may have other attributes.
        receiver = receiver_of(call.function)
        graph = replace(graph, receiver=receiver, aliases=((receiver, owner.__qualname__),))
    if words := ", ".join(settings.words):
        notes = (*notes, f"the process computes with {words}")
    arguments = captured_arguments(call, {item.path: item.name for item in inputs}, named_class)
    return Capture(
        workload=replace(workload, assumed=(*workload.assumed, *notes)),
        graph=graph,
        arguments=arguments,
        environment=environment(),
        flops=flops,
        bytes=_bytes(graph),
        module_name=module_name(Path(workload.target.path)),
        variable_sizes=_variable_sizes(graph, arguments, workload),
        uses_random=any(is_random(node.op) for node in graph.nodes),
        settings=settings,
    )


def _load_module(target: Target, source: str | None) -> Any:
    try:
        return load_user_module(target.path, source, in_place=True)
    except SyntaxError as error:
        where = Location(error.filename or target.path, error.lineno or 0)
        raise SourceSyntaxError(
            f"the file does not parse: {error.msg}", where=where, remedy="Correct the syntax error."
        ) from None
    except Exception as error:
        raise user_error(error, target, "when its file is imported") from error


def _build_target(module: Any, workload: Workload, device: str, constructing: DependencyRecorder) -> Call:
    def construct(*arguments: Any) -> torch.nn.Module:
        with constructing:
            return constructed(*arguments)

    try:
        return build_call(module, workload, device, workload.sizes, construct=construct)
    except TypeError as error:
        raise RequestError(
            f"the workload does not match {workload.target.qualname}: {error}",
            where=Location(workload.target.path, workload.line or workload.target.start_line),
            remedy="List every argument that has no default value, and constructor arguments after `init:`.",
        ) from error
    except Exception as error:
        raise user_error(error, workload.target, "while its inputs are created") from error


def _for_body(call: Call, workload: Workload) -> Workload:
    """The workload of a decorated target with the dtypes that its decorator passes to the body."""
    target = workload.target
    values = dict(zip(call.names, call.values, strict=True))
    sizes = sum(value.numel() for value in values.values() if isinstance(value, torch.Tensor))
    if sizes > EAGER_LIMIT_ELEMENTS and not torch.cuda.is_available():
        return workload
    positional, keywords = call.passed(call.values)
    named = {name: value for name, value in keywords.items() if name not in call.state_homes}
    try:
        with call.in_mode():
            observed = observed_call(call.decorated, call.function, tuple(positional), named)
    except Exception as error:
        raise user_error(error, target, "on the workload's inputs") from error
    dtypes, autocast = check_decorators(observed, values, target)
    arguments = tuple(
        replace(item, tensor=replace(item.tensor, dtype=dtypes[item.name]))
        if item.tensor is not None and item.name in dtypes
        else item
        for item in workload.arguments
    )
    notes = [f"{name} is {dtype}, as the decorator of {target.qualname} passes it" for name, dtype in dtypes.items()]
    if autocast != workload.autocast:
        state = f"under autocast with {autocast}" if autocast else "without autocast"
        notes.append(f"the decorator of {target.qualname} runs its body {state}")
    return replace(workload, arguments=arguments, assumed=(*workload.assumed, *notes), autocast=autocast)


def _inputs(call: Call, workload: Workload) -> list[InputTensor]:
    """Input tensors: arguments, then parameters, then buffers. The name of a parameter is its access without ``self.``."""
    specs = workload.tensors
    widths = widths_of(spec.shape for spec in specs.values())
    state = {item.name: item.access for item in workload.state}
    leaf_names = names_of_leaves(call)
    result: list[InputTensor] = []
    for path, value in zip(call.names, call.values, strict=True):
        if isinstance(value, torch.Tensor):
            spec = specs.get(path)
            sizes = size_names(spec.shape, widths) if spec else ()
            access = state.get(path, path)
            result.append(InputTensor(leaf_names[path], access, InputKind.ARGUMENT, value.detach(), sizes, path))
    used_names = {item.name for item in result}

    def new_name(path: str) -> str:
        name = re.sub(r"\W+", "_", re.sub(r"\W+$", "", path)) or "tensor"
        while name in used_names:
            name += "_"
        used_names.add(name)
        return name

    if call.instance is not None:
        tensors = [(n, p, InputKind.PARAMETER) for n, p in call.instance.named_parameters()]
        tensors += [(n, b, InputKind.BUFFER) for n, b in buffers(call)]
        for full, value, kind in tensors:
            if is_lazy(value):
                raise TargetUnsupported(
                    f"{access_of(call.instance, full)} has no shape before the first call",
                    where=Location(workload.target.path, workload.target.start_line),
                    remedy="Specify the number of features, for example BatchNorm1d(64) instead of LazyBatchNorm1d().",
                )
            name = new_name(full)
            result.append(InputTensor(name, access_of(call.instance, full), kind, value.detach()))
        device = next((item.value.device for item in result), torch.device("cpu"))
        for slot in call_slots(call):
            name = new_name(dotted(slot.access))
            result.append(InputTensor(name, slot.access, InputKind.ATTRIBUTE, slot.value.detach().to(device)))
    return result


def _check_inputs(inputs: list[InputTensor], target: Target, *, takes_complex: bool) -> None:
    """Refuse dtypes that are not supported; ``takes_complex`` permits parameters and buffers that become pairs."""
    where = Location(target.path, target.start_line)
    if not inputs:
        raise TargetUnsupported(
            f"{target.qualname} has no tensor arguments",
            where=where,
            remedy="Choose a function of tensors.",
            kind=FailureKind.NO_TENSORS,
        )
    for item in inputs:
        dtype = str(item.value.dtype).removeprefix("torch.")
        is_complex = dtype in COMPLEX and item.kind is not InputKind.ARGUMENT and takes_complex
        if dtype not in ITEMSIZE and not is_complex:
            raise TargetUnsupported(f"{item.access} has dtype {item.value.dtype}, which is not supported", where=where)


def _need_gradients(call: Call, workload: Workload, inputs: Sequence[InputTensor]) -> list[bool]:
    """For each input, whether the workload asks for its gradient: ``grad=`` names arguments, and parameters follow."""
    arguments = {path for path, tensor in workload.tensors.items() if tensor.requires_grad}
    parameters = dict(call.instance.named_parameters()) if call.instance is not None else {}
    trained = {access_of(call.instance, name) for name, parameter in parameters.items() if parameter.requires_grad}
    return [item.path in arguments if item.kind is InputKind.ARGUMENT else item.access in trained for item in inputs]


def _constants(call: Call, reads: dict[str, object], target: Target) -> dict[str, object]:
    constants: dict[str, object] = {}
    for path, value in zip(call.names, call.values, strict=True):
        if isinstance(value, torch.Tensor):
            continue
        plain = plain_value(value)
        if plain is NOT_PLAIN:
            raise TargetUnsupported(
                f"argument {path!r} of {target.qualname} is a {type(value).__name__}",
                where=Location(target.path, target.start_line),
                remedy="Pass tensors and plain values, or tuples, lists, dictionaries, named tuples and dataclasses of these.",
            )
        constants[path] = plain
    return {**constants, **reads}


def _check_graph(graph: Graph, target: Target) -> None:
    if not graph.nodes:
        raise TargetUnsupported(
            f"{target.qualname} has no tensor operations",
            where=Location(target.path, target.start_line),
            remedy="Choose another function.",
            kind=FailureKind.NO_TENSORS,
        )


SELECTING = frozenset({"index", "index_put", "masked_select", "masked_scatter", "nonzero"})
"""Operations that select as many elements as a mask has true ones."""


def _variable_sizes(graph: Graph, arguments: tuple[CapturedArgument, ...], workload: Workload) -> tuple[str, ...]:
    """Sizes that verification may vary: not sizes of parameters, and not sizes that an index tensor may refer to."""
    fixed = sizes_of_computed_indices(graph)
    indexing = {item.name for item in graph.inputs if item.type.dtype in ("int64", "int32")}
    bounded = {path for path, tensor in workload.tensors.items() if tensor.high_size is not None}
    for argument in (leaf for item in arguments for leaf in item.leaves):
        may_index = argument.input in indexing and argument.name not in bounded
        if may_index and argument.input and argument.high is not None and argument.high > 1:
            indexed = sizes_behind_indices(graph, argument.input)
            larger = {name for name, value in graph.sizes.items() if value > argument.high}
            fixed |= larger if indexed is None else indexed
    held = [item for item in graph.inputs if item.kind is not InputKind.ARGUMENT]
    of_module = {name for item in held for size in item.type.shape for name in size.symbols()}
    for item in held:
        if item.name in indexing:
            # Buffers keep their values at all sizes.
            indexed = sizes_behind_indices(graph, item.name)
            fixed |= of_module if indexed is None else indexed
        elif item.type.dtype == "bool" and any(node.word in SELECTING for node in graph.readers(item.name)):
            # How many elements it selects is the size of other tensors.
            fixed |= of_module
    in_shapes = {name for item in graph.inputs for size in item.type.shape for name in size.symbols()}
    return tuple(name for name in graph.sizes if name in in_shapes and name not in fixed)


def _bytes(graph: Graph) -> float:
    types = [item.type for item in graph.inputs]
    types += [graph.type_of(ref) for ref in dict.fromkeys(graph.outputs)]
    return float(sum(kind.numel.value(graph.sizes) * itemsize(kind.dtype) for kind in types))


def environment() -> Environment:
    """Versions of the interpreter's packages, and its GPU."""
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = ""
    gpu = capability = driver = ""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        capability = f"sm_{major}{minor}"
        driver = _driver()
    return Environment(platform.python_version(), str(torch.__version__), triton_version, gpu, capability, driver)


def _driver() -> str:
    """The version of NVIDIA's driver; empty if it is unknown."""
    try:
        words = DRIVER_FILE.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        # Windows' subsystem for Linux has no such file.
        return _driver_by_command()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _driver_by_command() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip().splitlines()[0] if process.stdout.strip() else ""
