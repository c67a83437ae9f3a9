"""Tensors for a verification case, and modules that hold them. Runs in workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.capture.accesses import dotted
from mtmc_lsp.capture.index_bounds import IndexBounds, index_bounds
from mtmc_lsp.capture.worker.arguments.strided_tensors import filled, laid_out
from mtmc_lsp.capture.worker.arguments.values import random_values
from mtmc_lsp.capture.worker.calls import Call, build_call
from mtmc_lsp.capture.worker.module_state import AttributeSlot
from mtmc_lsp.capture.worker.modules.attribute_tensors import attribute_tensors, slot_at
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.graph import GraphInput, InputKind
from mtmc_lsp.core.workload import Capture, WorkloadSource
from mtmc_lsp.verify.cases import (
    NEAR,
    PEAKS,
    PEAKS_IN_PART,
    RARE_LARGE,
    WITHIN,
)
from mtmc_lsp.verify.foreign.value_mix import VARIED, ValueMix
from mtmc_lsp.verify.worker.comparison.batched_reads import computable
from mtmc_lsp.verify.worker.instances import SharedInstance, instance_of
from mtmc_lsp.verify.worker.values.parameters import observe, varied
from mtmc_lsp.verify.worker.values.peaks import with_peaks, with_peaks_in_range, with_rare_large

SCALES = {"large": 1e3, "tiny": 1e-3}
EXACT = {"integers": (-4, 5), "bits": (0, 2)}
"""Distributions of whole numbers with their bounds: sums and products of them are exact in every float dtype."""
SPECIAL = {"infinite": (float("inf"), float("-inf")), "nan": (float("nan"),)}
SPECIAL_PART = 0.02
"""The part of the elements that are infinite or NaN; at least one of each tensor."""
FEWEST_WITH_OTHERS, OTHER_PART = 8, 0.1
"""The fewest labels of which some are ignored, and the part of them."""
OFFSET, EXTREME = 100.0, 30.0
"""The mean of ``offset`` values, minus that of ``low`` ones; their spread is about 1. The scale of ``extreme`` values."""
ZERO_PART = 0.5
"""The part of the rows that are 0 in ``zero rows``."""
MAGNITUDES = 3.0
"""``mixed`` values range over ten to the power of minus and plus this."""


NEAR_SPREAD = 0.1
"""The relative spread of values that are near a number."""


def make_inputs(
    capture: Capture, call: Call, sizes: Mapping[str, int], distribution: str, seed: int, device: str
) -> dict[str, torch.Tensor]:
    """Every graph input's value for a case, by name.

    Args:
        call: the workload's call; parameters are varied versions of its parameters.
    """
    # Created on their device: a GPU is much faster than a CPU.
    generator = torch.Generator(device).manual_seed(seed)
    leaves = [leaf for leaf in capture.leaves if leaf.input]
    ranges = {leaf.input: (leaf.low, leaf.high) for leaf in leaves}
    paths = {leaf.input: leaf.name for leaf in leaves}
    specs = capture.workload.tensors
    by_path = dict(zip(call.names, call.values, strict=True))
    bounds = index_bounds(capture.graph)
    result: dict[str, torch.Tensor] = {}
    usual = "uniform" if distribution == RARE_LARGE else distribution
    tensors = {
        item.name: read_tensor(call.instance, item.access)
        for item in capture.graph.inputs
        if item.kind is not InputKind.ARGUMENT
    }
    observe(tensors.values())
    for item in capture.graph.inputs:
        if item.kind is not InputKind.ARGUMENT:
            shape = [size.value(sizes) for size in item.type.shape]
            held = tensors[item.name]
            if distribution in EXACT and held.is_floating_point():
                result[item.name] = _whole(shape, distribution, generator).to(held.dtype)
            else:
                result[item.name] = varied(held, shape, generator)
            continue
        if distribution == "given" and capture.workload.source is WorkloadSource.GET_INPUTS:
            given = by_path[paths[item.name]].detach()
            result[item.name] = laid_out(given, given.stride())
            continue
        spec = specs.get(paths.get(item.name, ""))
        low, high = ranges.get(item.name, (None, None))
        if spec is not None and spec.low is not None:
            low, high = spec.low, spec.high
            if spec.high_size is not None:
                high = float(spec.high_size.value({**capture.workload.sizes, **sizes}))
        if item.name in bounds:
            has_range = spec is None or spec.low is not None
            result[item.name] = _indices(item, bounds[item.name], sizes, generator, (low, high) if has_range else None)
        else:
            result[item.name] = _values(item, sizes, distribution, generator, low, high)
            if is_float(item.type.dtype) and low is None:
                # Products of two large values would hide all others.
                distribution = usual
    return result


def _indices(
    item: GraphInput,
    bounds: IndexBounds,
    sizes: Mapping[str, int],
    generator: torch.Generator,
    stated: tuple[float | None, float | None] | None,
) -> torch.Tensor:
    """Valid indices, within the range that the workload states; some have a value that the code treats specially.

    A stated range that goes down to such a value, as ``-100..9`` does, stands for that value and the indices above.

    Raises:
        RequestError: no index is valid.
    """
    first, last = bounds.range_of(sizes)
    if last < 0 < item.type.numel.value(sizes):
        raise RequestError(f"{item.access} would index a dimension without elements")
    low, high = (
        (0, last) if stated is None else (int(stated[0] or 0), int(stated[1] if stated[1] is not None else last))
    )
    others = [
        value for value in bounds.others if not first <= value <= last and (stated is None or low <= value <= high)
    ]
    if any(low <= value < 0 for value in others):
        low = 0
    low, high = (min(max(value, first), last) for value in (low, high))

    def values(shape: Sequence[int]) -> torch.Tensor:
        value = random_values(shape, item.type.dtype, generator, low, high)
        for other in others if value.numel() >= FEWEST_WITH_OTHERS else ():
            chosen = torch.rand(tuple(shape), generator=generator, device=generator.device) < OTHER_PART
            value = value.masked_fill(chosen, other)
        return value

    return filled([size.value(sizes) for size in item.type.shape], [s.value(sizes) for s in item.type.stride], values)


def _values(
    item: GraphInput,
    sizes: Mapping[str, int],
    distribution: str,
    generator: torch.Generator,
    low: float | None,
    high: float | None,
) -> torch.Tensor:
    def values(shape: Sequence[int]) -> torch.Tensor:
        value = random_values(shape, item.type.dtype, generator, low, high)
        if value.is_floating_point() and low is None:
            return _distributed(value, distribution, generator)
        if low is not None and high is not None and distribution.startswith((PEAKS, PEAKS_IN_PART)):
            return with_peaks_in_range(value, distribution, generator, low, high)
        return value

    return filled([size.value(sizes) for size in item.type.shape], [s.value(sizes) for s in item.type.stride], values)


def _distributed(value: torch.Tensor, distribution: str, generator: torch.Generator) -> torch.Tensor:
    """Normally distributed floats, changed to another distribution."""
    shape = value.shape
    if distribution == "uniform":
        return torch.rand(shape, generator=generator, device=generator.device).to(value.dtype)
    if distribution == "constant":
        return torch.full_like(value, 0.5 + torch.rand((), generator=generator, device=generator.device).item())
    if distribution in EXACT:
        return _whole(shape, distribution, generator).to(value.dtype)
    if distribution == "denormal":
        least = torch.finfo(value.dtype).tiny
        below = torch.rand(shape, generator=generator, device=generator.device) < 0.25
        return torch.where(below, (value.double() * least / 16).to(value.dtype), value)
    if distribution in SPECIAL:
        return _with_special(value, SPECIAL[distribution], generator)
    if distribution == "offset":
        return (computable(value) + OFFSET).to(value.dtype)
    if distribution == "low":
        return (computable(value) - OFFSET).to(value.dtype)
    if distribution == "negative":
        return -computable(value).abs().to(value.dtype)
    if distribution == "ties":
        return ((2.0 * computable(value)).round() / 2.0).to(value.dtype)
    if distribution == "zero rows":
        rows = torch.rand((*shape[:-1], 1), generator=generator, device=generator.device) < ZERO_PART
        return torch.where(rows, torch.zeros_like(value), value)
    if distribution == "extreme":
        return (computable(value) * EXTREME).to(value.dtype)
    if distribution.startswith((PEAKS, PEAKS_IN_PART)):
        return with_peaks(value, distribution, generator)
    if distribution == RARE_LARGE:
        return with_rare_large(value, generator)
    if distribution.startswith(VARIED):
        return _varied_values(computable(value), ValueMix.of(distribution), generator).to(value.dtype)
    if distribution.startswith(WITHIN):
        return (computable(value) * (float(distribution.removeprefix(WITHIN)) / 2)).to(value.dtype)
    if distribution.startswith(NEAR):
        return _near(value, [float(number) for number in distribution.removeprefix(NEAR).split(", ")], generator)
    if distribution == "mixed":
        exponents = MAGNITUDES * (2.0 * torch.rand(shape, generator=generator, device=generator.device) - 1.0)
        return (computable(value) * torch.pow(10.0, exponents)).to(value.dtype)
    return (computable(value) * SCALES.get(distribution, 1.0)).to(value.dtype)


def _varied_values(value: torch.Tensor, mix: ValueMix, generator: torch.Generator) -> torch.Tensor:
    def chance(shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(tuple(shape), generator=generator, device=generator.device)

    rows = torch.pow(10.0, mix.rows * (2.0 * chance((*value.shape[:-1], 1)) - 1.0)) if mix.rows else 1.0
    varied = mix.scale * rows * (value + mix.mean)
    varied = torch.where(chance(value.shape) < mix.large, EXTREME * varied, varied)
    return torch.where(chance(value.shape) < mix.zeros, torch.zeros_like(varied), varied)


def _near(value: torch.Tensor, numbers: Sequence[float], generator: torch.Generator) -> torch.Tensor:
    """Values around the numbers: each row has such values on both sides of some numbers, or only values beyond one of them."""
    device, wide = generator.device, computable(value)
    choices = torch.tensor([sign * number for number in numbers for sign in (1, -1)], device=device, dtype=wide.dtype)

    def chosen(shape: Sequence[int]) -> torch.Tensor:
        return choices[torch.randint(len(choices), tuple(shape), generator=generator, device=device)]

    is_near, is_beyond = (
        torch.rand(shape, generator=generator, device=device) < 0.5 for shape in (value.shape, (*value.shape[:-1], 1))
    )
    around = torch.where(is_near, chosen(value.shape) * (1 + NEAR_SPREAD * wide), wide)
    beyond = wide + 2 * chosen((*value.shape[:-1], 1))
    return torch.where(is_beyond, beyond, around).to(value.dtype)


def _whole(shape: Sequence[int], distribution: str, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(*EXACT[distribution], tuple(shape), generator=generator, device=generator.device)


def _with_special(value: torch.Tensor, kinds: tuple[float, ...], generator: torch.Generator) -> torch.Tensor:
    flat = value.flatten()
    if flat.numel():
        count = max(1, int(SPECIAL_PART * flat.numel()))
        for kind in kinds:
            flat[torch.randint(0, flat.numel(), (count,), generator=generator, device=flat.device)] = kind
    return flat.view(value.shape)


def read_tensor(instance: Any, access: str) -> torch.Tensor:
    """The tensor of a module that an expression such as ``self.norm.weight`` names."""
    value = slot_at(instance, access).value
    assert isinstance(value, torch.Tensor)
    return value


def prepared_call(
    module: Any,
    capture: Capture,
    inputs: Mapping[str, torch.Tensor],
    device: str,
    *,
    shared: SharedInstance | None = None,
) -> tuple[Call, list[Any]]:
    """The target of ``module`` with the case's parameters, and the arguments of its call.

    With ``shared``, all calls use that instance; otherwise each uses a new one.
    """
    sizes = _call_sizes(capture, inputs)
    input_of = {leaf.name: leaf.input for leaf in capture.leaves if leaf.input and leaf.input in inputs}
    # Arguments that the graph does not use are passed as in the workload: the code may depend on their memory layout.
    unread = {item.access for item in capture.graph.unread_inputs if item.kind is InputKind.ARGUMENT}
    read = (capture.workload.tensors.keys() | unread) - input_of.keys()
    construct = shared or reusing(capture)
    call = build_call(module, capture.workload, device, sizes, values=False, read=read, construct=construct)
    if call.instance is not None and (shared is None or shared.needs_parameters()):
        floats = [t for t in inputs.values() if t.is_floating_point()]
        held = [item for item in capture.graph.inputs if item.kind is not InputKind.ARGUMENT]
        # The element size reveals float64; under the oracle's mode, dtype is the user's.
        if any(t.element_size() == 8 for t in floats):
            convert_to_float64(call.instance, {id(read_tensor(call.instance, item.access)) for item in held})
        slots = slots_of(call.instance)
        for item in held:
            replace_tensor(slots[id(read_tensor(call.instance, item.access))], inputs[item.name])
    numbers = {item.access: item.value for item in capture.graph.numbers}
    pairs = zip(call.names, call.values, strict=True)
    values = [inputs[input_of[path]] if path in input_of else numbers.get(path, value) for path, value in pairs]
    return call, values


def convert_to_float64(instance: torch.nn.Module, replaced: Collection[int]) -> None:
    """As ``instance.double()``, except for tensors that the caller replaces, given by their ``id``: each would be copied first.

    A module that does more when its tensors are converted, as recurrent layers do, is converted by itself.
    """
    if any(type(part)._apply is not torch.nn.Module._apply for part in instance.modules()):
        instance.double()
        return
    for part in instance.modules():
        for parameter in part._parameters.values():
            if parameter is not None and id(parameter) not in replaced and parameter.is_floating_point():
                parameter.data = parameter.data.double()
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in replaced and buffer.is_floating_point():
                part._buffers[name] = buffer.double()


def reusing(capture: Capture) -> Callable[..., torch.nn.Module]:
    """A constructor of instances whose captured parameters and buffers are only read, or replaced."""
    held = [item.access for item in capture.graph.inputs if item.kind is not InputKind.ARGUMENT]
    return functools.partial(instance_of, replaced=[dotted(access) for access in held])


def slots_of(instance: torch.nn.Module) -> dict[int, list[AttributeSlot]]:
    """The attributes that hold each tensor of a module, by its ``id``; several if weights are tied or buffers are shared."""
    slots: dict[int, list[AttributeSlot]] = {}
    for module in instance.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append((held, name))
    for slot in attribute_tensors(instance):
        slots.setdefault(id(slot.value), []).append((slot.holder, slot.key))
    return slots


def replace_tensor(slots: Sequence[AttributeSlot], value: torch.Tensor) -> None:
    """Assign a tensor to all attributes that held another one."""
    parameter: torch.nn.Parameter | None = None
    for held, name in slots:
        if isinstance(held[name], torch.nn.Parameter):
            if parameter is None:
                needs = held[name].requires_grad and value.is_floating_point()
                parameter = torch.nn.Parameter(value, requires_grad=needs)
            held[name] = parameter
        else:
            held[name] = value


def relocated(instance: Any, capture: Capture, inputs: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Parameters that a call moved to other memory, with their inputs: cuDNN's recurrent layers gather theirs in one buffer.

    Args:
        instance: the module that was called; ``None`` for a function.
        inputs: the tensors that were assigned to it.
    """
    moved = []
    for item in capture.graph.inputs if instance is not None else ():
        if item.kind is not InputKind.ARGUMENT:
            with contextlib.suppress(AttributeError, LookupError):
                tensor, assigned = read_tensor(instance, item.access).detach(), inputs[item.name]
                if tensor.shape == assigned.shape and tensor.data_ptr() != assigned.data_ptr():
                    moved.append((item.name, tensor))
    return moved


def _call_sizes(capture: Capture, inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Sizes of the temporary arguments with which a call is built; the case's arguments replace them.

    Arguments that the graph does not use are not replaced. If there are any, they get the case's sizes, or the workload's sizes
    if the graph may be specialised to them.
    """
    sizes = {name: min(value, 4) for name, value in capture.workload.sizes.items()}
    specs = capture.workload.tensors
    tensors = {leaf.name: inputs[leaf.input] for leaf in capture.leaves if leaf.input and leaf.input in inputs}
    if specs.keys() <= tensors.keys():
        return sizes
    unread_sizes = [size for item in capture.graph.unread_inputs for size in item.type.shape]
    free = {*capture.graph.sizes, *(name for size in unread_sizes for name in size.symbols())}
    sizes |= {name: value for name, value in capture.workload.sizes.items() if name not in free}
    for path in specs.keys() & tensors.keys():
        for size, length in zip(specs[path].shape, tensors[path].shape, strict=True):
            if size.is_symbol:
                sizes[str(size)] = length
    return sizes
