"""The values of arguments that a workload describes: random tensors, constants, and containers of these. Runs in workers."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from itertools import count
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.containers import made
from mtmc_lsp.capture.worker.arguments.strided_tensors import extent_of, filled
from mtmc_lsp.core.workload import ArgumentSpec, TensorSpec


def resolve(module: ModuleType, qualname: str) -> Any:
    """The object called ``qualname`` in the module. For a ``torch.compile`` wrapper, the original function."""
    item: Any = module
    for part in qualname.split("."):
        item = nested_function(_uncompiled(item), part) if hasattr(item, "__code__") else getattr(item, part)
    return _uncompiled(item)


def _uncompiled(item: Any) -> Any:
    while callable(getattr(item, "_torchdynamo_orig_callable", None)) and not isinstance(item, type):
        item = item._torchdynamo_orig_callable
    return item


def nested_function(outer: Any, name: str) -> FunctionType:
    """A new object of a function inside ``outer``, without a call of ``outer``. It must not read variables of ``outer``.

    Raises:
        AttributeError: there is no such function.
    """
    outer = inspect.unwrap(outer)
    codes = [item for item in outer.__code__.co_consts if isinstance(item, CodeType) and item.co_name == name]
    if not codes or codes[-1].co_freevars:
        raise AttributeError(f"{outer.__qualname__} defines no function {name} that can be called without it")
    code = codes[-1]
    definition = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    defaults = tuple(ast.literal_eval(value) for value in arguments.defaults)
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    function = FunctionType(code, outer.__globals__, name, defaults)
    function.__kwdefaults__ = {item.arg: ast.literal_eval(value) for item, value in by_keyword if value is not None}
    function.__qualname__ = f"{outer.__qualname__}.<locals>.{name}"
    function.__module__ = outer.__module__
    return function


def make_tensor(spec: TensorSpec, sizes: Mapping[str, int], device: str, seed: int) -> torch.Tensor:
    """Create a random tensor according to the workload."""
    # Generated on its device: a GPU is much faster than a CPU.
    generator = torch.Generator(device).manual_seed(seed)
    shape = [size.value(sizes) for size in spec.shape]
    high = spec.high if spec.high_size is None else float(spec.high_size.value(sizes))

    def values(of_shape: Sequence[int]) -> torch.Tensor:
        return random_values(of_shape, spec.dtype, generator, spec.low, high)

    if spec.stride is None:
        return values(shape).requires_grad_(spec.requires_grad)
    return filled(shape, [s.value(sizes) for s in spec.stride], values).requires_grad_(spec.requires_grad)


@functools.lru_cache(1)
def _has_accelerator() -> bool:
    kinds = (torch.cuda, torch.backends.mps, getattr(torch, "xpu", None), getattr(torch, "mtia", None))
    return any(kind is not None and kind.is_available() for kind in kinds)


def seed_torch(seed: int) -> None:
    """As ``torch.manual_seed``, which without an accelerator keeps a stack trace for each kind: 0.3 ms instead of 1 us."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


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


Blank = Callable[[Sequence[int], "Sequence[int] | None", torch.dtype, str], torch.Tensor]
"""Creates a tensor without values from shape, strides (``None`` for dense ones), dtype and device."""


def without_memory(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A tensor of this shape that takes no memory. Its strides are 0."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def uninitialised(shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of this shape and these strides in memory that nothing was written to."""
    if strides is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = torch.empty(extent_of(shape, strides), dtype=dtype, device=device)
    return memory.as_strided(tuple(shape), tuple(strides))


def argument_values(
    module: ModuleType,
    arguments: Sequence[ArgumentSpec],
    sizes: Mapping[str, int],
    device: str,
    seed: int,
    read: Container[str] | None = None,
    blank: Blank = without_memory,
) -> dict[str, Any]:
    """The value of each argument by name. With ``read``, only tensors whose paths are in it have values; others are blank."""
    numbers = count()

    def leaf(spec: ArgumentSpec) -> Any:
        number = next(numbers)
        if spec.tensor is None:
            return spec.constant
        if read is None or spec.name in read:
            return make_tensor(spec.tensor, sizes, device, seed + number)
        shape = [size.value(sizes) for size in spec.tensor.shape]
        strides = None if spec.tensor.stride is None else [size.value(sizes) for size in spec.tensor.stride]
        return blank(shape, strides, getattr(torch, spec.tensor.dtype), device)

    return {spec.name: made(spec, leaf, partial(resolve_class, module)) for spec in arguments}


def resolve_class(module: ModuleType, name: str) -> Any:
    """The class that a file calls ``name``.

    Raises:
        TypeError: the file has no such class.
    """
    try:
        kind = resolve(module, name)
    except AttributeError:
        raise TypeError(f"the file has no class {name}") from None
    if not isinstance(kind, type):
        raise TypeError(f"{name} is no class")
    return kind
