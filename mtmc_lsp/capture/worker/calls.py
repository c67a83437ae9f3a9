"""How the target is called: resolving it in its module, building instances, making example tensors."""

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

from mtmc_lsp.capture.worker.module_state import Home, calling_with, home_of
from mtmc_lsp.capture.worker.value_signs import made_without_values
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

FURTHER: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
"""Kinds of parameters that take what no other does."""
MANY = 1 << 26
"""Elements that take a CPU a second to draw."""


@dataclass(frozen=True)
class Call:
    """A target with its arguments, ready to run."""

    function: Any
    """Bound: called with the arguments alone."""
    instance: torch.nn.Module | None
    names: tuple[str, ...]
    """Parameter names of ``values``."""
    values: tuple[Any, ...]
    keyword: frozenset[str]
    """Parameters that must be passed by name."""
    further: frozenset[str] = frozenset()
    """Those that take any number of arguments, as ``*args`` and ``**kwargs``, and take none."""
    state_homes: Mapping[str, Home] = field(default_factory=dict)
    """Where the instance holds those of ``names`` that the function does not take: see
    :mod:`mtmc_lsp.capture.worker.module_state`."""
    accesses: frozenset[str] = frozenset()
    """Python for these inside the target's body."""

    def bound(self, values: Sequence[Any] | None = None) -> Callable[[], Any]:
        """What calls the target, with other values where given, and with as little of ours between as can be."""
        function = calling_with(self.function, self.state_homes) if self.state_homes else self.function
        pairs = list(zip(self.names, self.values if values is None else values, strict=True))
        pairs = [(name, value) for name, value in pairs if name not in self.further]
        positional = [value for name, value in pairs if name not in self.keyword]
        named = {name: value for name, value in pairs if name in self.keyword}
        return lambda: function(*positional, **named)

    def run(self, values: Sequence[Any] | None = None) -> Any:
        """Call the target, with other values where given."""
        return self.bound(values)()

    def own(self, returned: Any) -> Any:
        """What the target itself returned, of what a run gave."""
        return returned[0] if self.state_homes else returned


def resolve(module: ModuleType, qualname: str) -> Any:
    """The object called ``qualname`` in the module; what ``torch.compile`` made, as it was before."""
    item: Any = module
    for part in qualname.split("."):
        item = getattr(item, part)
    while callable(getattr(item, "_torchdynamo_orig_callable", None)) and not isinstance(item, type):
        item = item._torchdynamo_orig_callable
    return item


def make_tensor(spec: TensorSpec, sizes: Mapping[str, int], device: str, seed: int) -> torch.Tensor:
    """A random tensor as the workload describes it."""
    # Made where it is used: a CPU takes seconds for what a GPU makes at once.
    generator = torch.Generator(device).manual_seed(seed)
    shape = [size.value(sizes) for size in spec.shape]
    high = spec.high if spec.high_size is None else float(spec.high_size.value(sizes))
    tensor = random_values(shape, spec.dtype, generator, spec.low, high)
    if spec.stride is not None:
        laid = torch.empty_strided(shape, [s.value(sizes) for s in spec.stride], dtype=tensor.dtype, device=device)
        tensor = laid.copy_(tensor)
    return tensor.requires_grad_(spec.requires_grad)


def random_values(
    shape: Sequence[int], dtype: str, generator: torch.Generator, low: float | None, high: float | None
) -> torch.Tensor:
    """Normal floats (uniform where a range is given), integers of the range (0 or 1 without one), random bools.

    They are made on the generator's device.
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


def constructed(kind: Any, positional: Sequence[Any], named: Mapping[str, Any], device: str) -> torch.nn.Module:
    """A new instance on the device."""
    made: torch.nn.Module = kind(*positional, **named).to(device)
    return made


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
    """The target of ``module`` with the workload's arguments, made with ``sizes``.

    Without ``values`` the tensors that the target is called with have their shapes alone: making gigabytes of random numbers
    that others replace takes longer than all else; those of a directive that ``read`` names are made all the same. With
    ``stand_in`` such gigabytes are other numbers, drawn on the device. ``construct`` makes the instance, as
    :func:`constructed` does.
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
            positional = _shapes_of(module.get_inputs, device)
        else:
            positional = (stand_in and _stand_ins(module.get_inputs, device)) or list(module.get_inputs())
        # What the module draws does not hang on what was drawn for its arguments.
        torch.manual_seed(seed)
    else:
        named = _values(workload.arguments, sizes, device, seed, None if values else read)
        init_named = _values(workload.init_arguments, sizes, device, seed + 1000)
    instance = None
    function = resolve(module, target.qualname)
    if target.kind in (TargetKind.MODULE, TargetKind.METHOD):
        instance = construct(resolve(module, target.class_name), init_positional, init_named, device)
        if not workload.as_constructed:
            instance.eval()
        function = (
            instance.forward
            if target.kind is TargetKind.MODULE
            else getattr(instance, target.qualname.rpartition(".")[2])
        )
    positional = [
        value.to(device) if isinstance(value, torch.Tensor) and value.device.type != device else value
        for value in positional
    ]
    call = _bound(function, instance, positional, named, target)
    return _with_state(call, workload.state, target, device, seed if values else None) if workload.state else call


def _with_state(call: Call, kept: Sequence[StateTensor], target: Target, device: str, seed: int | None) -> Call:
    """The call with what the instance keeps as further arguments: as constructed, or random; without a seed shapes alone."""
    assert call.instance is not None
    homes = {item.name: home_of(call.instance, item.access) for item in kept}
    values = []
    for item in kept:
        held, attribute = homes[item.name]
        if attribute not in held:
            raise TargetUnsupported(
                f"{target.qualname} assigns {item.access}, which its module does not have before a first call",
                where=Location(target.path, target.start_line),
                remedy=f"Set {item.access} in __init__, to None or to its first value.",
            )
        own = held[attribute]
        if isinstance(own, torch.Tensor) and (tuple(own.shape), own.dtype) == (item.shape, getattr(torch, item.dtype)):
            values.append(own.detach().to(device))
        elif seed is None:
            values.append(_shape_alone(item.shape, getattr(torch, item.dtype), device))
        else:
            generator = torch.Generator(device).manual_seed(seed)
            values.append(random_values(item.shape, item.dtype, generator, None, None))
    return replace(
        call,
        names=(*call.names, *homes),
        values=(*call.values, *values),
        keyword=call.keyword | frozenset(homes),
        state_homes=homes,
        accesses=frozenset(item.access for item in kept),
    )


def _shapes_of(make: Callable[[], Any], device: str) -> list[Any]:
    """What ``make`` gives, each tensor as a single zero that has its shape; all of it where that cannot be known without."""
    made = made_without_values(make)
    if made is None:
        return list(make())
    return [_shape_alone(item.shape, item.dtype, device) if isinstance(item, FakeTensor) else item for item in made[0]]


def _shape_alone(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _stand_ins(make: Callable[[], Any], device: str) -> list[Any]:
    """What ``make`` gives with other floats in the place of its own; empty where that would save nothing.

    They lie between -1 and 1, and between 0 and 1 where the user's own are known to have no negative element. Integers are left
    as they are made: they may be indices.
    """
    made, signs = (made_without_values(make) if device != "cpu" else None) or ([], [])
    tensors = [item for item in made if isinstance(item, FakeTensor)]
    if sum(t.numel() for t in tensors) < MANY or not all(t.is_floating_point() for t in tensors):
        return []
    return [
        torch.empty_strided(item.shape, item.stride(), dtype=torch.float32, device=device)
        .uniform_(0.0 if known else -1.0, 1.0)
        .to(item.dtype)
        if isinstance(item, FakeTensor)
        else item
        for item, known in zip(made, signs, strict=True)
    ]


def init_arguments(module: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """What the file's ``get_init_inputs`` gives, by position and by name; ``None`` where it has none."""
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
    """Every argument's value, by name; of tensors that ``read`` does not name the shape alone, where it is given."""

    def value(number: int, spec: ArgumentSpec) -> Any:
        if spec.tensor is None:
            return spec.constant
        if read is None or spec.name in read:
            return make_tensor(spec.tensor, sizes, device, seed + number)
        return _shape_alone(
            [size.value(sizes) for size in spec.tensor.shape], getattr(torch, spec.tensor.dtype), device
        )

    return {spec.name: value(i, spec) for i, spec in enumerate(arguments)}


def _bound(
    function: Any, instance: torch.nn.Module | None, positional: list[Any], named: dict[str, Any], target: Target
) -> Call:
    """Fill in defaults, so every value that the graph is built from is known by name."""
    signature = inspect.signature(function)
    bound = signature.bind(*positional, **named)
    bound.apply_defaults()
    names = tuple(bound.arguments)
    kinds = {name: signature.parameters[name].kind for name in names}
    further = frozenset(name for name, kind in kinds.items() if kind in FURTHER)
    for name in sorted(further):
        if bound.arguments[name]:
            raise TargetUnsupported(
                f"{target.qualname} takes any number of arguments, as {FURTHER[kinds[name]]}{name}, and is given some",
                where=Location(target.path, target.start_line),
                remedy="Name each of these in its definition, or leave them out of the workload.",
            )
    keyword = frozenset(name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY)
    return Call(function, instance, names, tuple(bound.arguments.values()), keyword, further)


def user_error(error: BaseException, target: Target, doing: str) -> MtmcError:
    """What the user's own code raised, placed at the last line of their file that was running."""
    if isinstance(error, MtmcError):
        return error
    kind = classify(error)
    if kind.is_out_of_memory:
        return OutOfMemory(
            f"{target.qualname} does not fit in memory on this workload",
            where=Location(target.path, target.start_line),
            remedy="Make the sizes in the workload smaller.",
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
    remedy = "Check the workload's shapes, dtypes and constants against what the code expects."
    if isinstance(error, ModuleNotFoundError):
        remedy = f"Install it for {sys.executable}, or name the interpreter that has it with --python."
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
