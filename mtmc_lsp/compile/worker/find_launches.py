"""How a launcher launches its kernels, found by calling it on tensors without data. Runs in the compiler's worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from mtmc_lsp.compile.messages import TensorLayout
from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.run import KernelLaunch

OPTIONS = ("num_warps", "num_stages")
TAKEN = {"grid", "warmup", *OPTIONS}
"""Keywords of a launch that are no parameters of the kernel."""


def find_launches(launcher: Any, inputs: Sequence[TensorLayout], trained: Sequence[int] = ()) -> list[KernelLaunch]:
    """The kernel launches of one call, and of its backward pass if inputs are ``trained``.

    Allocates no memory and runs no kernel.
    """
    launches: list[KernelLaunch] = []

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(_launch(kernel, args, kwargs))

    tensors = [
        torch.empty_strided(item.shape, item.stride, dtype=getattr(torch, item.dtype), device="meta") for item in inputs
    ]
    original = JITFunction.run
    JITFunction.run = run
    try:
        with torch.set_grad_enabled(bool(trained)):
            for number in trained:
                tensors[number].requires_grad_()
            returned = launcher(*tensors)
            if trained:
                returned = returned if isinstance(returned, tuple) else (returned,)
                results = [result for result in returned if result.requires_grad]
                torch.autograd.backward(results, [torch.empty_like(result) for result in results])
    finally:
        JITFunction.run = original
    return list({repr(item): item for item in launches}.values())


def _launch(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> KernelLaunch:
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name not in TAKEN}
    signature: dict[str, str] = {}
    constexprs: dict[str, object] = {}
    divisible = []
    for parameter in kernel.params:
        value = values.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None or isinstance(value, torch.dtype):
            constexprs[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[str(value.dtype).removeprefix("torch.")]
            divisible.append(parameter.name)
        elif isinstance(value, bool):
            signature[parameter.name] = "u1"
        elif isinstance(value, int) and value == 1:
            # As Triton does, unless the kernel asks it not to.
            constexprs[parameter.name] = value
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                divisible.append(parameter.name)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            raise TypeError(f"{kernel.__name__} is launched without {parameter.name}")
    warps, stages = (int(kwargs.get(name, default)) for name, default in zip(OPTIONS, (4, 3), strict=True))
    return KernelLaunch(kernel.__name__, signature, constexprs, warps, stages, tuple(divisible))
