"""Builds the call of a target: resolves it in its module, constructs its module, creates example tensors."""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mtmc_lsp.capture.worker.arguments.containers import (
    FurtherArguments,
    FurtherKeywords,
    is_structured,
    leaves_with_paths,
    rebuilt,
    with_leaves,
)
from mtmc_lsp.capture.worker.arguments.strided_tensors import on_device
from mtmc_lsp.capture.worker.arguments.values import (
    Blank,
    argument_values,
    random_values,
    resolve,
    seed_torch,
    uninitialised,
    without_memory,
)
from mtmc_lsp.capture.worker.autocast.regions import caller_mode
from mtmc_lsp.capture.worker.module_state import AttributeSlot, attribute_slot, with_explicit_state
from mtmc_lsp.capture.worker.regions.region_function import region_function
from mtmc_lsp.capture.worker.tracing.target_body import body_of
from mtmc_lsp.core.errors import (
    EnvironmentNotAble,
    FailureKind,
    Location,
    MtmcError,
    OutOfMemory,
    TargetRaises,
)
from mtmc_lsp.core.workload import StateTensor, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.process.worker.failures import classify
from mtmc_lsp.process.worker.threads import few_threads

VARIADIC: Mapping[Any, type] = {
    inspect.Parameter.VAR_POSITIONAL: FurtherArguments,
    inspect.Parameter.VAR_KEYWORD: FurtherKeywords,
}
"""Kinds of parameters that take any number of arguments."""
MANY_ELEMENTS = 1 << 26
"""Number of random elements that a CPU generates in about a second."""


@dataclass(frozen=True)
class Call:
    """A target with its arguments."""

    function: Any
    """Bound method or function; it takes only the arguments."""
    instance: torch.nn.Module | None
    names: tuple[str, ...]
    """Paths of ``values``, in the same order: parameter names, ``position_embeddings[0]``."""
    values: tuple[Any, ...]
    """The arguments, with each container of tensors replaced by its leaves."""
    keyword: frozenset[str]
    """Parameters that must be passed by keyword."""
    containers: Mapping[str, Any] = field(default_factory=dict)
    """The arguments that are containers of tensors, by parameter name."""
    parameters: tuple[str, ...] = ()
    """Names of all parameters in order; may be left out if there are no containers."""
    state_homes: Mapping[str, AttributeSlot] = field(default_factory=dict)
    """Names of state tensors, which the function does not take as arguments, to the attributes that hold them. See
    :mod:`mtmc_lsp.capture.worker.module_state`."""
    decorated: Any = None
    """The function with its decorators; ``None`` if there are none."""
    accesses: frozenset[str] = frozenset()
    """Python expressions for the state tensors inside the target's body."""
    mode: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """Creates the context of each call: the caller's autocast. ``None`` if there is none."""

    def bound(self, values: Sequence[Any] | None = None) -> Callable[[], Any]:
        """A function that calls the target with ``values`` or the example values, with as little overhead as possible."""
        function, mode = self.with_state, self.mode
        positional, named = self.passed(self.values if values is None else values)
        if mode is None:
            return lambda: function(*positional, **named)

        def run() -> Any:
            with mode():
                return function(*positional, **named)

        return run

    def in_mode(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a call."""
        return self.mode() if self.mode is not None else contextlib.nullcontext()

    @property
    def with_state(self) -> Callable[..., Any]:
        """The function, which takes the state tensors as further arguments and returns them as further results."""
        return with_explicit_state(self.function, self.state_homes) if self.state_homes else self.function

    def passed(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments of a call with ``values``, in which containers are new."""
        leaves = iter(values)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for name in self.parameters or self.names:
            value = rebuilt(self.containers[name], leaves) if name in self.containers else next(leaves)
            if isinstance(value, FurtherArguments):
                positional += value
            elif isinstance(value, FurtherKeywords):
                named.update(value)
            elif name in self.keyword:
                named[name] = value
            else:
                positional.append(value)
        return positional, named

    def run(self, values: Sequence[Any] | None = None) -> Any:
        """Call the target with ``values`` or the example values."""
        return self.bound(values)()

    def target_result(self, returned: Any) -> Any:
        """The return value of the target, from the return value of :meth:`run`."""
        return returned[0] if self.state_homes else returned


def constructed(
    kind: Any,
    positional: Sequence[Any],
    named: Mapping[str, Any],
    device: str,
    dtype: str,
    *,
    as_program: bool = False,
) -> torch.nn.Module:
    """Construct a module on the device; its floating-point tensors get the dtype, unless that is empty.

    Args:
        as_program: whether the constructor must see what it sees in a program: torch's usual number of threads.
    """
    # On a GPU, the other processes of the run construct it at the same time.
    is_shared = device != "cpu" and not as_program
    with few_threads() if is_shared else contextlib.nullcontext():
        instance: torch.nn.Module = kind(*positional, **named).to(device, getattr(torch, dtype) if dtype else None)
    return instance


def set_mode(instance: torch.nn.Module, workload: Workload) -> None:
    """Set training or evaluation mode as in the workload."""
    if not workload.as_constructed:
        instance.train(bool(workload.module.training))


def build_call(
    module: ModuleType,
    workload: Workload,
    device: str,
    sizes: Mapping[str, int],
    seed: int = 0,
    *,
    values: bool = True,
    read: Collection[str] = (),
    blank: Blank = without_memory,
    construct: Callable[..., torch.nn.Module] = constructed,
) -> Call:
    """Build the call of the workload's target with arguments of the given sizes.

    Args:
        seed: of the random values.
        values: without it, tensor arguments have shapes but no values, which saves the time to generate gigabytes.
        read: names of arguments that get values even without ``values``; those of ``get_inputs`` get memory.
        blank: creates the tensors without values.
    """
    target = workload.target
    seed_torch(seed)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    init_positional: list[Any] = []
    init_named: dict[str, Any] = {}
    if workload.source is WorkloadSource.GET_INPUTS:
        init_positional, init_named = init_arguments(module) or ([], {})
        if target.region is not None:
            named = argument_values(module, workload.arguments, sizes, device, seed, None if values else read, blank)
        elif not values:
            # The code may ask for the memory layout of tensors that the caller does not replace.
            positional = _shaped_like(module.get_inputs, device, uninitialised if read else blank)
        else:
            positional = _generated(module.get_inputs, device)
        # The module's random values must not depend on those of its arguments.
        seed_torch(seed)
    else:
        named = argument_values(module, workload.arguments, sizes, device, seed, None if values else read, blank)
        init_named = argument_values(module, workload.init_arguments, sizes, device, seed + 1000)
    instance = None
    function = resolve(module, target.qualname)
    if target.kind in (TargetKind.MODULE, TargetKind.METHOD):
        instance = construct(
            resolve(module, target.class_name), init_positional, init_named, device, workload.module.dtype
        )
        set_mode(instance, workload)
        function = (
            instance.forward
            if target.kind is TargetKind.MODULE
            else getattr(instance, target.qualname.rpartition(".")[2])
        )
    positional = [with_leaves(value, lambda leaf: _on_device(leaf, device)) for value in positional]
    body = body_of(function, target)
    if target.region is not None:
        # The decorators apply to the whole target. What they change of its arguments shows in the values of the inputs.
        function = body = region_function(body, target.region)
    call = _bound(body, instance, positional, named, target)
    if workload.device == "cuda" and (workload.autocast or device == "cpu"):
        call = replace(call, mode=caller_mode(workload.autocast, device))
    if body is not function:
        call = replace(call, decorated=function)
    if not workload.state:
        return call
    return _with_state(call, workload.state, target, device, seed if values else None, blank)


def _with_state(
    call: Call, state: Sequence[StateTensor], target: Target, device: str, seed: int | None, blank: Blank
) -> Call:
    """Add the module's state tensors as arguments: their initial values, else random values; without a seed only shapes."""
    assert call.instance is not None
    homes_by_name = {item.name: attribute_slot(call.instance, item.access) for item in state}
    values = []
    for item in state:
        attributes, attribute = homes_by_name[item.name]
        # The first call may create the attribute.
        initial = attributes.get(attribute)
        if isinstance(initial, torch.Tensor) and (tuple(initial.shape), initial.dtype) == (
            item.shape,
            getattr(torch, item.dtype),
        ):
            values.append(initial.detach().to(device))
        elif seed is None:
            values.append(blank(item.shape, None, getattr(torch, item.dtype), device))
        else:
            generator = torch.Generator(device).manual_seed(seed)
            values.append(random_values(item.shape, item.dtype, generator, None, None))
    return replace(
        call,
        names=(*call.names, *homes_by_name),
        values=(*call.values, *values),
        keyword=call.keyword | frozenset(homes_by_name),
        parameters=(*call.parameters, *homes_by_name),
        state_homes=homes_by_name,
        accesses=frozenset(item.access for item in state),
    )


def _shaped_like(make: Callable[[], Any], device: str, blank: Blank) -> list[Any]:
    """The result of ``make`` with tensors without values. If the shapes cannot be determined, the actual result."""
    traced = _run_without_values(make)
    if traced is None:
        return list(make())

    def bare(leaf: Any) -> Any:
        return blank(leaf.shape, leaf.stride(), leaf.dtype, device) if isinstance(leaf, FakeTensor) else leaf

    return [with_leaves(item, bare) for item in traced]


def _generated(make: Callable[[], Any], device: str) -> list[Any]:
    """The result of ``make``; large tensors are created on the device, unless ``make`` cannot run there.

    For 2^28 random numbers, a CPU takes about 4 s, and an H100 takes 0.5 ms.
    """
    traced = _run_without_values(make) if device != "cpu" else None
    leaves = [leaf for item in traced or () for _, leaf in leaves_with_paths("", item)]
    if sum(leaf.numel() for leaf in leaves if isinstance(leaf, FakeTensor)) < MANY_ELEMENTS:
        return list(make())
    try:
        with torch.device(device):
            return list(make())
    except Exception:  # user code may require the CPU, for example for NumPy
        return list(make())


def _run_without_values(make: Callable[[], Any]) -> list[Any] | None:
    """The result of ``make`` with fake tensors; ``None`` if ``make`` reads values of tensors."""
    try:
        with FakeTensorMode():
            return list(make())
    except Exception:  # user code raises anything where there are no values
        return None


def init_arguments(module: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Positional and keyword arguments from the file's ``get_init_inputs``; ``None`` if it has none."""
    if not hasattr(module, "get_init_inputs"):
        return None
    init = module.get_init_inputs()
    if len(init) == 2 and isinstance(init[0], (list, tuple)) and isinstance(init[1], dict):
        return list(init[0]), dict(init[1])
    return list(init), {}


def _on_device(value: Any, device: str) -> Any:
    return on_device(value, device) if isinstance(value, torch.Tensor) else value


def _bound(
    function: Any, instance: torch.nn.Module | None, positional: list[Any], named: dict[str, Any], target: Target
) -> Call:
    """Bind the arguments and fill in defaults, so that all values in the graph are known by name."""
    signature = inspect.signature(function)
    # A workload names `*args` and `**kwargs` like other parameters.
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    by_position = [name for name in kinds if name in named and _is_passed_by_position(kinds, named, name)]
    for name in by_position:
        value = named.pop(name)
        positional += value if kinds[name] is inspect.Parameter.VAR_POSITIONAL else [value]
    for name in [name for name in named if kinds.get(name) is inspect.Parameter.VAR_KEYWORD]:
        named |= named.pop(name)
    bound = signature.bind(*positional, **named)
    bound.apply_defaults()
    arguments = {
        name: VARIADIC[kinds[name]](value) if kinds[name] in VARIADIC else value
        for name, value in bound.arguments.items()
    }
    leaves = [leaf for name, value in arguments.items() for leaf in leaves_with_paths(name, value)]
    return Call(
        function,
        instance,
        tuple(path for path, _ in leaves),
        tuple(value for _, value in leaves),
        frozenset(name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY),
        {name: value for name, value in arguments.items() if is_structured(value)},
        tuple(arguments),
    )


def _is_passed_by_position(kinds: Mapping[str, Any], named: Mapping[str, Any], name: str) -> bool:
    """Whether an argument must be passed by position: because of its kind, or because ``*args`` follow."""
    if kinds[name] in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
        return True
    has_further = any(kinds.get(other) is inspect.Parameter.VAR_POSITIONAL for other in named)
    return has_further and kinds[name] is inspect.Parameter.POSITIONAL_OR_KEYWORD


def user_error(error: BaseException, target: Target, doing: str) -> MtmcError:
    """The error for the user when their code raises, with the last line of their file that was running."""
    if isinstance(error, MtmcError):
        return error
    kind = classify(error)
    if kind.is_out_of_memory:
        return OutOfMemory(
            f"{target.qualname} runs out of memory on this workload",
            where=Location(target.path, target.start_line),
            remedy="Use smaller sizes in the workload.",
            kind=kind,
        )
    where = _user_line(error, target)
    if kind is FailureKind.NO_GPU:
        return EnvironmentNotAble(
            f"{target.qualname} uses CUDA {doing}, and this machine has no CUDA GPU",
            where=where,
            remedy="Run this on a machine with a GPU, or create tensors on the device of an argument (x.device).",
            kind=kind,
        )
    remedy = "Check that the shapes, dtypes and constants of the workload are valid arguments of the function."
    if isinstance(error, ModuleNotFoundError):
        remedy = f"Install it for {sys.executable}, or select another interpreter with --python."
    return TargetRaises(
        f"{target.qualname} raises {type(error).__name__} {doing}: {error}",
        where=where,
        remedy=remedy,
        kind=kind,
    )


def _user_line(error: BaseException, target: Target) -> Location:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == target.path]
    line = frames[-1].lineno if frames and frames[-1].lineno else target.start_line
    return Location(target.path, line)
