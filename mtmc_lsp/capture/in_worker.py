"""The capture command, run in a worker: from a workload to its graph and eager facts."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from mtmc_lsp.capture.branches import more_than_one_value, sizes_above_one
from mtmc_lsp.capture.calls import Call, build_call, user_error
from mtmc_lsp.capture.effects import (
    Snapshot,
    access_of,
    is_random,
    refuse_random,
    refuse_unseen_changes,
    watching_attributes,
)
from mtmc_lsp.capture.exporting import export_error, export_graph
from mtmc_lsp.capture.kept import KeepsTensors, held_tensors, refuse_unknown
from mtmc_lsp.capture.loading import load_user_module
from mtmc_lsp.capture.loading_paths import module_name
from mtmc_lsp.capture.masks import refuse_unknown_sizes, with_masks_in_place
from mtmc_lsp.capture.reading import InputTensor
from mtmc_lsp.capture.recurrent import kept_whole, without_idle_modes
from mtmc_lsp.capture.rounding import convolution_modes
from mtmc_lsp.capture.settling import Layout, laid_out_as, returning, without_dead_nodes, without_unused_inputs
from mtmc_lsp.capture.structure import class_name, shared_parts, used_modules
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.errors import Location, RequestError, SourceSyntaxError, TargetUnsupported
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.returned import PLAIN, classes, is_made_of_its_parts, leaves, parts, tensors_of
from mtmc_lsp.core.workload import Capture, CapturedArgument, Environment, Target, Workload

EAGER_LIMIT_ELEMENTS = 1 << 23
"""Above this many input elements the CPU does not run the target in capture: verification runs it, on reduced sizes."""


def capture(request: dict[str, Any]) -> dict[str, Any]:
    """``{"workload": ..., "variables": {line: name}, "source": text}`` to a :class:`Capture`.

    The text is the file's without what an earlier run put in.
    """
    workload = from_json(Workload, request["workload"])
    variables = {int(line): name for line, name in request["variables"].items()}
    module = _load(workload.target, request.get("source"))
    text = (request.get("source") or Path(workload.target.path).read_text("utf-8")).splitlines()
    while True:
        try:
            result = _captured(module, workload, variables, text)
        except KeepsTensors as found:
            workload = replace(workload, kept=(*workload.kept, *found.kept))
        else:
            data: dict[str, Any] = to_json(result)
            return data


def _captured(module: Any, workload: Workload, variables: Mapping[int, str], text: Sequence[str]) -> Capture:
    """The capture.

    Raises:
        KeepsTensors: the target keeps more than the workload says.
    """
    device = "cuda" if workload.device == "cuda" and torch.cuda.is_available() else "cpu"
    call = _build(module, workload, device)
    inputs = _inputs(call, workload)
    _check_inputs(inputs, workload.target)
    elements = sum(item.value.numel() for item in inputs)
    returned: list[Layout] = []
    named = partial(class_name, file=module)
    if device == "cuda" or elements <= EAGER_LIMIT_ELEMENTS:
        returned = _run_eagerly(module, call, inputs, workload.target)
    before = held_tensors(call.instance)
    with kept_whole(), watching_attributes(call.instance, workload.target.path) as watched:
        flat = _flat_function(call, inputs)
        try:
            graph, notes = export_graph(flat, inputs, workload.target, variables, named, text, call.own)
        finally:
            refuse_unknown(before, watched.writes.keys() - call.accesses, device)
        graph = laid_out_as(graph, returned)
        graph = without_dead_nodes(with_masks_in_place(graph))
        refuse_unknown_sizes(graph, workload.target)
        asked = (*sizes_above_one(flat, graph, device), *more_than_one_value(graph))
        graph = replace(graph, conditions=(*graph.conditions, *asked))
        flops, given_back = _traced(call, inputs, workload.target, named)
    watched.refuse_writes(workload.target, {item.access for item in workload.kept})
    refuse_random(graph, workload.target)
    refuse_unseen_changes(graph, workload.target)
    notes += _gradient_notes(workload)
    constants = _constants(call, without_idle_modes(call.instance, watched.reads), workload.target)
    graph = replace(graph, constants=constants, kept=tuple(item.access for item in workload.kept))
    graph = replace(graph, fp32_matmul=_fp32_matmul(), fp32_convolution=_fp32_convolution())
    graph = without_unused_inputs(without_dead_nodes(returning(graph, given_back)))
    _check_graph(graph, workload.target)
    if device == "cuda":
        seen = convolution_modes(lambda: _flat_function(call, inputs)(*(item.value.clone() for item in inputs)), graph)
        graph = replace(graph, convolutions_seen=seen)
    held = (item.access for item in graph.inputs if item.access.startswith("self."))
    read = (*held, *watched.reads, *graph.kept)
    modules = used_modules(call.instance, module, watched.called, read)
    used = {*(item.access for item in modules), *(item.access for item in graph.inputs)}
    graph = replace(graph, modules=modules, same=shared_parts(call.instance, used))
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


def _build(module: Any, workload: Workload, device: str) -> Call:
    try:
        return build_call(module, workload, device, workload.sizes, stand_in=True)
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
    kept = {item.name: item.access for item in workload.kept}
    result: list[InputTensor] = []
    for name, value in zip(call.names, call.values, strict=True):
        if isinstance(value, torch.Tensor):
            spec = specs.get(name)
            names = tuple(str(s) if s.is_symbol else "" for s in spec.shape) if spec else ()
            result.append(InputTensor(name, kept.get(name, name), InputKind.ARGUMENT, value.detach(), names))
    taken = {item.name for item in result}
    if call.instance is not None:
        tensors = [(n, p, InputKind.PARAMETER) for n, p in call.instance.named_parameters()]
        tensors += [(n, b, InputKind.BUFFER) for n, b in _buffers(call)]
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


def _buffers(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the call's module that are no arguments of it."""
    named = call.instance.named_buffers() if call.instance is not None else iter(())
    return ((name, buffer) for name, buffer in named if access_of(name) not in call.accesses)


def _check_inputs(inputs: list[InputTensor], target: Target) -> None:
    where = Location(target.path, target.start_line)
    if not inputs:
        raise TargetUnsupported(
            f"{target.qualname} takes no tensor", where=where, remedy="Choose a function of tensors."
        )
    for item in inputs:
        if str(item.value.dtype).removeprefix("torch.") not in ITEMSIZE:
            raise TargetUnsupported(f"{item.access} has dtype {item.value.dtype}, which is not supported", where=where)


def _values(call: Call, inputs: list[InputTensor], tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    by_name = {
        item.name: tensor for item, tensor in zip(inputs, tensors, strict=True) if item.kind is InputKind.ARGUMENT
    }
    return [by_name.get(name, value) for name, value in zip(call.names, call.values, strict=True)]


class _Bound(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Gives functional_call a ``forward`` that is the target's method."""

    def __init__(self, instance: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.instance = instance
        self.__dict__["call"] = call

    def forward(self, values: list[Any]) -> Any:
        return self.__dict__["call"].run(values)


def _flat_function(call: Call, inputs: list[InputTensor]) -> Any:
    """The target as a function of the input tensors alone, parameters included."""
    parameters = [item for item in inputs if item.kind is not InputKind.ARGUMENT]
    names = []
    if call.instance is not None:
        names = [n for n, _ in call.instance.named_parameters()] + [n for n, _ in _buffers(call)]

    def flat(*tensors: torch.Tensor) -> Any:
        values = _values(call, inputs, tensors)
        if call.instance is None or not parameters:
            return call.run(values)
        given = tensors[len(inputs) - len(parameters) :]
        replaced = {f"instance.{name}": tensor for name, tensor in zip(names, given, strict=True)}
        return torch.func.functional_call(_Bound(call.instance, call), replaced, (values,))

    return flat


def _gradient_notes(workload: Workload) -> tuple[str, ...]:
    names = [spec.name for spec in workload.arguments if spec.tensor is not None and spec.tensor.requires_grad]
    if not names:
        return ()
    return (
        f"gradients are asked for {', '.join(names)}: the Triton version is forward only; calls that record gradients "
        "keep running the original code, so training is as before and only calls under torch.no_grad() get faster",
    )


def _run_eagerly(module: ModuleType, call: Call, inputs: list[InputTensor], target: Target) -> list[Layout]:
    """Run the target twice: it must not raise, and must do the same again.

    Returns:
        The shape and strides of each tensor that it returns.
    """
    runs: list[list[Any]] = []
    before, held = None, dict[str, torch.Tensor]()
    try:
        for _ in range(2):
            # What the first call alone changes is a cache, as a table of positions is.
            before, held = Snapshot(module, call.instance) if runs else None, held_tensors(call.instance)
            torch.manual_seed(0)
            tensors = tuple(item.value.clone(memory_format=torch.preserve_format) for item in inputs)
            with torch.no_grad():
                value = _flat_function(call, inputs)(*tensors)
            _check_returned(call.own(value), target, partial(class_name, file=module))
            changed = [not torch.equal(t, item.value) for t, item in zip(tensors, inputs, strict=True)]
            written = [t if is_other else None for t, is_other in zip(tensors, changed, strict=True)]
            runs.append([*leaves(value), *written])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        raise user_error(error, target, "on the workload's inputs") from error
    now = held_tensors(call.instance)
    anew = {access for access in held if now.get(access) is not held[access]}
    refuse_unknown(held, anew, inputs[0].value.device.type)
    first, second = runs
    for a, b in zip(first, second, strict=True):
        if not _nearly_same(a, b):
            raise TargetUnsupported(
                f"{target.qualname} gives different results for the same inputs and seed, so nothing can be verified",
                where=Location(target.path, target.start_line),
                remedy="Draw random numbers from torch's generator, and keep no state between calls.",
            )
    assert before is not None
    before.refuse_changes(target)
    return [(tuple(t.shape), t.stride()) for t in tensors_of(value)]


def _nearly_same(a: Any, b: Any) -> bool:
    """Equal but for the reordering of atomic sums."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return repr(a) == repr(b)
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    difference = torch.linalg.vector_norm(torch.nan_to_num(a.double() - b.double()))
    return bool(difference <= 1e-3 * torch.linalg.vector_norm(torch.nan_to_num(a.double())) + 1e-30)


def _check_returned(value: Any, target: Target, named: Callable[[type], str]) -> None:
    """Refuse results that cannot be put together again.

    Raises:
        TargetUnsupported: there is one; says which.
    """
    items = leaves(value)
    other = [type(item).__name__ for item in items if not isinstance(item, (torch.Tensor, *PLAIN))]
    unnamed = [kind.__name__ for kind in classes(value) if not named(kind).replace(".", "").isidentifier()]
    remedy = "Return tensors and plain values, or tuples, lists, dictionaries, named tuples and dataclasses of these."
    if other:
        kind = f"a {type(value).__name__}{f' with a {other[0]} in it' if parts(value) is not None else ''}"
    elif not all(type(key) in (str, int, bool) for key in _keys(value)):
        kind = "a dict with keys that are no strings or integers"
    elif unnamed:
        kind, remedy = f"a {unnamed[0]}, which has no name in its file", f"Import {unnamed[0]} at the top of the file."
    elif not is_made_of_its_parts(value):
        kind, remedy = "a dataclass that is more than its fields", "Return a plain dataclass, or a dictionary."
    else:
        return
    raise TargetUnsupported(
        f"{target.qualname} returns {kind}, which cannot be verified",
        where=Location(target.path, target.start_line),
        remedy=remedy,
    )


def _traced(
    call: Call, inputs: list[InputTensor], target: Target, named: Callable[[type], str]
) -> tuple[float, list[str]]:
    """What a call shows on tensors without data, for targets that were not run.

    Returns:
        The work of the call, and for each tensor that it returns the input that it is, if it is one.
    """
    if call.instance is not None and any(item.value.numel() == 0 for item in inputs):
        return 0.0, []
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils.flop_counter import FlopCounterMode

    # What a mask picks has no size that is known.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    counter = FlopCounterMode(display=False)
    with mode, torch.no_grad():
        given = tuple(mode.from_tensor(item.value, static_shapes=True) for item in inputs)
        try:
            with counter:
                value = _flat_function(call, inputs)(*given)
        except Exception as error:
            raise export_error(error, target) from error
    _check_returned(call.own(value), target, named)
    own = {id(tensor): item.name for tensor, item in zip(given, inputs, strict=True)}
    return float(counter.get_total_flops()), [own.get(id(result), "") for result in tensors_of(value)]


def _keys(value: Any) -> Iterator[Any]:
    """Those of all dictionaries among the results."""
    for key, item in (parts(value) or {}).items():
        if isinstance(value, dict):
            yield key
        yield from _keys(item)


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
        keyword, is_kept = name in call.keyword, name in call.kept
        if name in tensors and isinstance(value, torch.Tensor):
            low = high = None
            if not value.is_floating_point() and value.dtype is not torch.bool and value.numel():
                low, high = float(value.min()), float(value.max())
            elif value.is_floating_point() and value.numel():
                # Only the sign is of use, which stand-ins share: sums of what is never negative cancel nothing.
                comparable = value.detach().float() if value.itemsize == 1 else value.detach()
                low = 0.0 if bool(comparable.amin() >= 0) else None
            arguments.append(CapturedArgument(name, name, None, keyword, low, high, is_kept))
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
    return float(sum(kind.numel.value(graph.sizes) * ITEMSIZE[kind.dtype] for kind in types))


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
