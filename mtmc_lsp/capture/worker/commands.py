"""The capture command, run in a worker: from a workload to its graph and eager facts."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mtmc_lsp.capture.messages import CaptureRequest
from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.capture.worker.calls import Call, build_call, constructed, user_error
from mtmc_lsp.capture.worker.convolution_modes import convolution_modes
from mtmc_lsp.capture.worker.dependencies import Recorder, dependencies
from mtmc_lsp.capture.worker.eager_run import buffers, flat_function, run_eagerly, traced
from mtmc_lsp.capture.worker.export import export_graph
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.capture.worker.module_state import StateFound, held_tensors, refuse_unknown
from mtmc_lsp.capture.worker.module_structure import class_name, shared_parts, used_modules
from mtmc_lsp.capture.worker.passes.graph_cleanup import (
    Layout,
    laid_out_as,
    returning,
    with_unread_apart,
    without_dead_nodes,
)
from mtmc_lsp.capture.worker.passes.masked_updates import refuse_unknown_sizes, with_masks_in_place
from mtmc_lsp.capture.worker.passes.noop_writes import without_idle_writes
from mtmc_lsp.capture.worker.passes.recurrent_layers import kept_whole, without_idle_modes
from mtmc_lsp.capture.worker.passes.row_writes import with_rows_stacked
from mtmc_lsp.capture.worker.side_effects import (
    access_of,
    is_random,
    refuse_random,
    refuse_unseen_changes,
    watching_attributes,
)
from mtmc_lsp.capture.worker.size_branches import more_than_one_value, never_empty, rolled_within, sizes_above_one
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.dtypes import ITEMSIZE, itemsize
from mtmc_lsp.core.errors import Location, RequestError, SourceSyntaxError, TargetUnsupported
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.workload import Capture, CapturedArgument, Environment, Target, Workload

EAGER_LIMIT_ELEMENTS = 1 << 23
"""Above this many input elements the CPU does not run the target in capture: verification runs it, on reduced sizes."""


def capture(request: CaptureRequest) -> Capture:
    """Capture a target; once more for each set of tensors that it turns out to keep between calls."""
    workload = request.workload
    module = _load(workload.target, request.source)
    text = (request.source or Path(workload.target.path).read_text("utf-8")).splitlines()
    while True:
        try:
            return _captured(module, workload, request.variables, text)
        except StateFound as found:
            workload = replace(workload, state=(*workload.state, *found.tensors))


def _captured(module: Any, workload: Workload, variables: Mapping[int, str], text: Sequence[str]) -> Capture:
    """The capture.

    Raises:
        StateFound: the target keeps more than the workload says.
    """
    device = "cuda" if workload.device == "cuda" and torch.cuda.is_available() else "cpu"
    constructing, calling = Recorder(), Recorder()
    call = _build(module, workload, device, constructing)
    inputs = _inputs(call, workload)
    _check_inputs(inputs, workload.target)
    elements = sum(item.value.numel() for item in inputs)
    returned: list[Layout] = []
    named = partial(class_name, file=module)
    if device == "cuda" or elements <= EAGER_LIMIT_ELEMENTS:
        with calling:
            returned = run_eagerly(module, call, inputs, workload.target)
    before = held_tensors(call.instance)
    with kept_whole(), watching_attributes(call.instance, workload.target.path) as watched:
        flat = flat_function(call, inputs)
        try:
            graph, notes = export_graph(flat, inputs, workload.target, variables, named, text, call.own)
        finally:
            refuse_unknown(before, watched.writes.keys() - call.accesses, device)
        graph = laid_out_as(graph, returned)
        graph = without_dead_nodes(without_idle_writes(with_rows_stacked(with_masks_in_place(graph))))
        refuse_unknown_sizes(graph, workload.target)
        asked = (
            *sizes_above_one(flat, graph, device),
            *more_than_one_value(graph),
            *never_empty(graph),
            *rolled_within(graph),
        )
        graph = replace(graph, conditions=tuple(dict.fromkeys((*graph.conditions, *asked))))
        with calling:
            flops, given_back = traced(call, inputs, workload.target, named)
    watched.refuse_writes(workload.target, {item.access for item in workload.state})
    refuse_random(graph, workload.target)
    refuse_unseen_changes(graph, workload.target)
    notes += _gradient_notes(workload)
    constants = _constants(call, without_idle_modes(call.instance, watched.reads), workload.target)
    graph = replace(graph, constants=constants, state_attributes=tuple(item.access for item in workload.state))
    graph = replace(graph, fp32_matmul=_fp32_matmul(), fp32_convolution=_fp32_convolution())
    graph = with_unread_apart(without_dead_nodes(returning(graph, given_back)), watched.tensors)
    _check_graph(graph, workload.target)
    if device == "cuda":
        seen = convolution_modes(lambda: flat_function(call, inputs)(*(item.value.clone() for item in inputs)), graph)
        graph = replace(graph, observed_convolution_modes=seen)
    tensors = [item.access for item in (*graph.inputs, *graph.unread_inputs)]
    read = (*(access for access in tensors if access.startswith("self.")), *watched.reads, *graph.state_attributes)
    modules = used_modules(call.instance, module, watched.called, read)
    used = {*(item.access for item in modules), *tensors}
    graph = replace(graph, modules=modules, aliases=shared_parts(call.instance, used))
    graph = replace(graph, dependencies=dependencies(module, calling, constructing, call.instance))
    return Capture(
        workload=replace(workload, assumed=(*workload.assumed, *notes)),
        graph=graph,
        arguments=_arguments(call, inputs),
        environment=environment(),
        flops=flops,
        bytes=_bytes(graph),
        module_name=module_name(Path(workload.target.path)),
        variable_sizes=_variable_sizes(graph, _arguments(call, inputs), workload),
        uses_random=any(is_random(node.op) for node in graph.nodes),
    )


def _load(target: Target, source: str | None) -> Any:
    try:
        return load_user_module(target.path, source, in_place=True)
    except SyntaxError as error:
        where = Location(error.filename or target.path, error.lineno or 0)
        raise SourceSyntaxError(f"the file does not parse: {error.msg}", where=where, remedy="Mend it first.") from None
    except Exception as error:
        raise user_error(error, target, "when its file is imported") from error


def _build(module: Any, workload: Workload, device: str, constructing: Recorder) -> Call:
    def construct(*given: Any) -> torch.nn.Module:
        with constructing:
            return constructed(*given)

    try:
        return build_call(module, workload, device, workload.sizes, stand_in=True, construct=construct)
    except TypeError as error:
        raise RequestError(
            f"the workload does not fit {workload.target.qualname}: {error}",
            where=Location(workload.target.path, workload.line or workload.target.start_line),
            remedy="Give every argument without a default, and constructor arguments after `init:`.",
        ) from error
    except Exception as error:
        raise user_error(error, workload.target, "while its inputs are made") from error


def _inputs(call: Call, workload: Workload) -> list[InputTensor]:
    """Arguments, then parameters, then buffers; a parameter's name is its access without ``self.``."""
    specs = {spec.name: spec.tensor for spec in workload.arguments if spec.tensor is not None}
    kept = {item.name: item.access for item in workload.state}
    result: list[InputTensor] = []
    for name, value in zip(call.names, call.values, strict=True):
        if isinstance(value, torch.Tensor):
            spec = specs.get(name)
            names = tuple(str(s) if s.is_symbol else "" for s in spec.shape) if spec else ()
            result.append(InputTensor(name, kept.get(name, name), InputKind.ARGUMENT, value.detach(), names))
    taken = {item.name for item in result}
    if call.instance is not None:
        tensors = [(n, p, InputKind.PARAMETER) for n, p in call.instance.named_parameters()]
        tensors += [(n, b, InputKind.BUFFER) for n, b in buffers(call)]
        for full, value, kind in tensors:
            if is_lazy(value):
                raise TargetUnsupported(
                    f"{access_of(full)} has no shape before a first call",
                    where=Location(workload.target.path, workload.target.start_line),
                    remedy="Construct its module with the numbers of features, as BatchNorm1d(64) for LazyBatchNorm1d().",
                )
            name = full.replace(".", "_")
            while name in taken:
                name += "_"
            taken.add(name)
            result.append(InputTensor(name, access_of(full), kind, value.detach()))
    return result


def _check_inputs(inputs: list[InputTensor], target: Target) -> None:
    where = Location(target.path, target.start_line)
    if not inputs:
        raise TargetUnsupported(
            f"{target.qualname} takes no tensor", where=where, remedy="Choose a function of tensors."
        )
    for item in inputs:
        if str(item.value.dtype).removeprefix("torch.") not in ITEMSIZE:
            raise TargetUnsupported(f"{item.access} has dtype {item.value.dtype}, which is not supported", where=where)


def _gradient_notes(workload: Workload) -> tuple[str, ...]:
    names = [spec.name for spec in workload.arguments if spec.tensor is not None and spec.tensor.requires_grad]
    if not names:
        return ()
    return (
        f"gradients are asked for {', '.join(names)}: the Triton version is forward only; calls that record gradients "
        "keep running the original code, so training is as before and only calls under torch.no_grad() get faster",
    )


def _constants(call: Call, reads: dict[str, object], target: Target) -> dict[str, object]:
    constants: dict[str, object] = {}
    for name, value in zip(call.names, call.values, strict=True):
        if isinstance(value, torch.Tensor):
            continue
        if name in call.further:
            constants[name] = {}
            continue
        if isinstance(value, (tuple, list)) and all(isinstance(item, (bool, int, float, str)) for item in value):
            value = list(value)
        if not (value is None or isinstance(value, (bool, int, float, str, list))):
            raise TargetUnsupported(
                f"argument {name!r} of {target.qualname} is a {type(value).__name__}",
                where=Location(target.path, target.start_line),
                remedy="Pass tensors and plain Python values only.",
            )
        constants[name] = value
    return {**constants, **reads}


def _arguments(call: Call, inputs: list[InputTensor]) -> tuple[CapturedArgument, ...]:
    arguments = []
    tensors = {item.name for item in inputs}
    for name, value in zip(call.names, call.values, strict=True):
        keyword, is_state = name in call.keyword, name in call.state_homes
        if name in tensors and isinstance(value, torch.Tensor):
            low = high = None
            if not value.is_floating_point() and value.dtype is not torch.bool and value.numel():
                low, high = float(value.min()), float(value.max())
            elif value.is_floating_point() and value.numel():
                # Only the sign is of use, which stand-ins share: sums of what is never negative cancel nothing.
                comparable = value.detach().float() if value.itemsize == 1 else value.detach()
                low = 0.0 if bool(comparable.amin() >= 0) else None
            arguments.append(CapturedArgument(name, name, None, keyword, low, high, is_state))
        else:
            plain = {} if name in call.further else list(value) if isinstance(value, tuple) else value
            arguments.append(CapturedArgument(name, None, plain, keyword))
    return tuple(arguments)


def _check_graph(graph: Graph, target: Target) -> None:
    if not graph.nodes:
        raise TargetUnsupported(
            f"{target.qualname} does no tensor work",
            where=Location(target.path, target.start_line),
            remedy="Choose another.",
        )


def _variable_sizes(graph: Graph, arguments: tuple[CapturedArgument, ...], workload: Workload) -> tuple[str, ...]:
    """Sizes that may be given other values: not a parameter's, and not one that a tensor of indices may point into."""
    pinned: set[str] = set()
    indexing = {item.name for item in graph.inputs if item.type.dtype in ("int64", "int32")}
    tied = {spec.name for spec in workload.arguments if spec.tensor is not None and spec.tensor.high_size is not None}
    for argument in arguments:
        may_index = argument.input in indexing and argument.name not in tied
        if may_index and argument.high is not None and argument.high > 1:
            pinned |= {name for name, value in graph.sizes.items() if value > argument.high}
    in_shapes = {name for item in graph.inputs for size in item.type.shape for name in size.symbols()}
    return tuple(name for name in graph.sizes if name in in_shapes and name not in pinned)


def _bytes(graph: Graph) -> float:
    types = [item.type for item in graph.inputs]
    types += [graph.type_of(ref) for ref in dict.fromkeys(graph.outputs)]
    return float(sum(kind.numel.value(graph.sizes) * itemsize(kind.dtype) for kind in types))


def _fp32_matmul() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _fp32_convolution() -> str:
    try:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    except RuntimeError:
        # The user set it by the newer names, and the older one may no longer be asked.
        return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"


def environment() -> Environment:
    """The interpreter's versions and its GPU."""
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
    import subprocess

    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""
