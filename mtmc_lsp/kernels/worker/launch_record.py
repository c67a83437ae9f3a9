"""Describes launches as the compiler needs them. Runs in workers."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mtmc_lsp.core.dtypes import POINTER_TYPES
from mtmc_lsp.core.run import DTYPE, KernelLaunch

OPTIONS = {"num_warps": 4, "num_stages": 3}
"""Options of a launch that are no parameters, with Triton's defaults."""


def _constant(value: Any) -> object:
    """A constant as JSON: a dtype of Triton by its name with a prefix, other objects by their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{DTYPE}{value}" if type(value).__name__ == "dtype" else str(value)


def launch_of(name: str, executor: Any, values: dict[str, Any], kwargs: dict[str, Any]) -> KernelLaunch:
    """The launch as the compiler needs it."""
    signature, constexprs, divisible = dict[str, str](), dict[str, object](), []
    for parameter in inspect.signature(executor.fn).parameters.values():
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        value = values.get(parameter.name, default)
        if parameter.name in executor.constexprs or value is None or (isinstance(value, int) and value == 1):
            constexprs[parameter.name] = _constant(getattr(value, "value", value))
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[str(value.dtype).removeprefix("torch.")]
            divisible.append(parameter.name)
        elif isinstance(value, bool):
            signature[parameter.name] = "u1"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible += [parameter.name] * (value % 16 == 0)
        else:
            signature[parameter.name] = "fp32"
    warps, stages = (int(kwargs.get(option, default)) for option, default in OPTIONS.items())
    return KernelLaunch(name, signature, constexprs, warps, stages, tuple(divisible))
