"""Builds the call of a target: resolves it in its module, constructs its module, creates example tensors."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mtmc_lsp.capture.worker.module_state import AttributeSlot, attribute_slot, with_explicit_state
from mtmc_lsp.capture.worker.tracing.target_body import body_of
from mtmc_lsp.capture.worker.value_signs import run_without_values
from mtmc_lsp.core.errors import (
    EnvironmentNotAble,
    FailureKind,
    Location,
    MtmcError,
    OutOfMemory,
    TargetRaises,
    TargetUnsupported,
)
from mtmc_lsp.core.workload import ArgumentSpec, StateTensor, Target, TargetKind, TensorSpec, Workload, WorkloadSource
from mtmc_lsp.process.worker.failures import classify

VARIADIC: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
"""Kinds of parameters that take any number of arguments, and their prefix."""
MANY_ELEMENTS = 1 << 26
"""Number of random elements that a CPU generates in about a second."""


@dataclass(frozen=True)
class Call:
    """A target with its arguments."""

    function: Any
    """Bound method or function; it takes only the arguments."""
    instance: torch.nn.Module | None
    names: tuple[str, ...]
    """Parameter names of ``values``, in the same order."""
    values: tuple[Any, ...]
    keyword: frozenset[str]
    """Parameters that must be passed by keyword."""
    variadic: frozenset[str] = frozenset()
    """``*args`` and ``**kwargs`` parameters, which are empty."""
    state_homes: Mapping[str, AttributeSlot] = field(default_factory=dict)
    """Names of state tensors, which the function does not take as arguments, to the attributes that hold them. See
    :mod:`mtmc_lsp.capture.worker.module_state`."""
    decorated: Any = None
    """The function with its decorators; ``None`` if there are none."""
    accesses: frozenset[str] = frozenset()
    """Python expressions for the state tensors inside the target's body."""

    def bound(self, values: Sequence[Any] | None = None) -> Callable[[], Any]:
        """A function that calls the target with ``values`` or the example values, with as little overhead as possible."""
        function = with_explicit_state(self.function, self.state_homes) if self.state_homes else self.function
        pairs = list(zip(self.names, self.values if values is None else values, strict=True))
        pairs = [(name, value) for name, value in pairs if name not in self.variadic]
        positional = [value for name, value in pairs if name not in self.keyword]
        named = {name: value for name, value in pairs if name in self.keyword}
        return lambda: function(*positional, **named)

    def run(self, values: Sequence[Any] | None = None) -> Any:
        """Call the target with ``values`` or the example values."""
        return self.bound(values)()

    def target_result(self, returned: Any) -> Any:
        """The return value of the target, from the return value of :meth:`run`."""
        return returned[0] if self.state_homes else returned


def resolve(module: ModuleType, qualname: str) -> Any:
    """The object called ``qualname`` in the module. For a ``torch.compile`` wrapper, the original function."""
    item: Any = module
    for part in qualname.split("."):
        item = getattr(item, part)
    while callable(getattr(item, "_torchdynamo_orig_callable", None)) and not isinstance(item, type):
        item = item._torchdynamo_orig_callable
    return item


def make_tensor(spec: TensorSpec, sizes: Mapping[str, int], device: str, seed: int) -> torch.Tensor:
    """Create a random tensor according to the workload."""
    # Generated on its device: a GPU is much faster than a CPU.
    generator = torch.Generator(device).manual_seed(seed)
    shape = [size.value(sizes) for size in spec.shape]
    high = spec.high if spec.high_size is None else float(spec.high_size.value(sizes))
    tensor = random_values(shape, spec.dtype, generator, spec.low, high)
    if spec.stride is not None:
        strided = torch.empty_strided(shape, [s.value(sizes) for s in spec.stride], dtype=tensor.dtype, device=device)
        tensor = strided.copy_(tensor)
    return tensor.requires_grad_(spec.requires_grad)


def random_values(
    shape: Sequence[int], dtype: str, generator: torch.Generator, low: float | None, high: float | None
) -> torch.Tensor:
    """Random floats (normal, or uniform in a given range), integers in the range (0 or 1 by default), or bools.

    They are generated on the generator's device.
    """
    kind, device = getattr(torch, dtype), generator.device
    if kind.is_floating_point:
        if low is not None and high is not None:
            return (torch.rand(shape, generator=generator, device=device) * (high - low) + low).to(kind)
        return torch.randn(shape, generator=generator, device=device).to(kind)
    if kind is torch.bool:
        return torch.rand(shape, generator=generator, device=device) < 0.5
    first, last = int(low or 0), int(high if high is not None else 1)
    return torch.randint(first, last + 1, shape, generator=generator, device=device).to(kind)


def constructed(
    kind: Any, positional: Sequence[Any], named: Mapping[str, Any], device: str, dtype: str
) -> torch.nn.Module:
    """Construct a module on the device; its floating-point tensors get the dtype, unless that is empty."""
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
    read: Container[str] = (),
    stand_in: bool = False,
    construct: Callable[..., torch.nn.Module] = constructed,
) -> Call:
    """Build the call of the workload's target with arguments of the given sizes.

    Args:
        seed: of the random values.
        values: without it, tensor arguments have shapes but no values, which saves the time to generate gigabytes.
        read: names of arguments that get values even without ``values``.
        stand_in: whether large float inputs of ``get_inputs`` may be replaced by random values generated on the device.
    """
    target = workload.target
    torch.manual_seed(seed)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    init_positional: list[Any] = []
    init_named: dict[str, Any] = {}
    if workload.source is WorkloadSource.GET_INPUTS:
        init_positional, init_named = init_arguments(module) or ([], {})
        if not values:
            positional = _shaped_like(module.get_inputs, device)
        else:
            positional = (stand_in and _stand_ins(module.get_inputs, device)) or list(module.get_inputs())
        # The module's random values must not depend on those of its arguments.
        torch.manual_seed(seed)
    else:
        named = _values(workload.arguments, sizes, device, seed, None if values else read)
        init_named = _values(workload.init_arguments, sizes, device, seed + 1000)
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
    positional = [
        value.to(device) if isinstance(value, torch.Tensor) and value.device.type != device else value
        for value in positional
    ]
    body = body_of(function, target)
    call = _bound(body, instance, positional, named, target)
    if body is not function:
        call = replace(call, decorated=function)
    return _with_state(call, workload.state, target, device, seed if values else None) if workload.state else call


def _with_state(call: Call, state: Sequence[StateTensor], target: Target, device: str, seed: int | None) -> Call:
    """Add the module's state tensors as arguments: their initial values, else random values; without a seed only shapes."""
    assert call.instance is not None
    homes_by_name = {item.name: attribute_slot(call.instance, item.access) for item in state}
    values = []
    for item in state:
        attributes, attribute = homes_by_name[item.name]
        if attribute not in attributes:
            raise TargetUnsupported(
                f"{target.qualname} assigns {item.access}, which its module does not have before the first call",
                where=Location(target.path, target.start_line),
                remedy=f"Set {item.access} in __init__, to None or to its initial value.",
            )
        initial = attributes[attribute]
        if isinstance(initial, torch.Tensor) and (tuple(initial.shape), initial.dtype) == (
            item.shape,
            getattr(torch, item.dtype),
        ):
            values.append(initial.detach().to(device))
        elif seed is None:
            values.append(_without_values(item.shape, getattr(torch, item.dtype), device))
        else:
            generator = torch.Generator(device).manual_seed(seed)
            values.append(random_values(item.shape, item.dtype, generator, None, None))
    return replace(
        call,
        names=(*call.names, *homes_by_name),
        values=(*call.values, *values),
        keyword=call.keyword | frozenset(homes_by_name),
        state_homes=homes_by_name,
        accesses=frozenset(item.access for item in state),
    )


def _shaped_like(make: Callable[[], Any], device: str) -> list[Any]:
    """The result of ``make`` with tensors without values. If the shapes cannot be determined, the actual result."""
    traced = run_without_values(make)
    if traced is None:
        return list(make())
    return [
        _without_values(item.shape, item.dtype, device) if isinstance(item, FakeTensor) else item for item in traced[0]
    ]


def _without_values(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _stand_ins(make: Callable[[], Any], device: str) -> list[Any]:
    """The result of ``make`` with random floats generated on the device; empty if that would not be faster.

    The values are in [-1, 1), or in [0, 1) if no element of the user's tensor is negative. Integers may be indices, so results
    with integer tensors are not replaced.
    """
    traced, signs = (run_without_values(make) if device != "cpu" else None) or ([], [])
    tensors = [item for item in traced if isinstance(item, FakeTensor)]
    if sum(t.numel() for t in tensors) < MANY_ELEMENTS or not all(t.is_floating_point() for t in tensors):
        return []
    return [
        torch.empty_strided(item.shape, item.stride(), dtype=torch.float32, device=device)
        .uniform_(0.0 if is_nonnegative else -1.0, 1.0)
        .to(item.dtype)
        if isinstance(item, FakeTensor)
        else item
        for item, is_nonnegative in zip(traced, signs, strict=True)
    ]


def init_arguments(module: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Positional and keyword arguments from the file's ``get_init_inputs``; ``None`` if it has none."""
    if not hasattr(module, "get_init_inputs"):
        return None
    init = module.get_init_inputs()
    if len(init) == 2 and isinstance(init[0], (list, tuple)) and isinstance(init[1], dict):
        return list(init[0]), dict(init[1])
    return list(init), {}


def _values(
    arguments: Sequence[ArgumentSpec],
    sizes: Mapping[str, int],
    device: str,
    seed: int,
    read: Container[str] | None = None,
) -> dict[str, Any]:
    """The value of each argument by name. With ``read``, only the tensors named there have values."""

    def value(number: int, spec: ArgumentSpec) -> Any:
        if spec.tensor is None:
            return spec.constant
        if read is None or spec.name in read:
            return make_tensor(spec.tensor, sizes, device, seed + number)
        return _without_values(
            [size.value(sizes) for size in spec.tensor.shape], getattr(torch, spec.tensor.dtype), device
        )

    return {spec.name: value(i, spec) for i, spec in enumerate(arguments)}


def _bound(
    function: Any, instance: torch.nn.Module | None, positional: list[Any], named: dict[str, Any], target: Target
) -> Call:
    """Bind the arguments and fill in defaults, so that all values in the graph are known by name."""
    signature = inspect.signature(function)
    bound = signature.bind(*positional, **named)
    bound.apply_defaults()
    names = tuple(bound.arguments)
    kinds = {name: signature.parameters[name].kind for name in names}
    variadic = frozenset(name for name, kind in kinds.items() if kind in VARIADIC)
    for name in sorted(variadic):
        if bound.arguments[name]:
            raise TargetUnsupported(
                f"{target.qualname} gets several arguments through {VARIADIC[kinds[name]]}{name}, which is not supported",
                where=Location(target.path, target.start_line),
                remedy="Give each of these arguments a parameter, or remove them from the workload.",
            )
    keyword = frozenset(name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY)
    return Call(function, instance, names, tuple(bound.arguments.values()), keyword, variadic)


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
