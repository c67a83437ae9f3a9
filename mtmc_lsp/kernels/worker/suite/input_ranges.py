"""Which recorded inputs need the values of their test: the code may accept nothing else, or return NaN. Runs in workers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.capture.recorded_calls import argument_spec
from mtmc_lsp.capture.worker.arguments.values import argument_values, seed_torch
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.workload import ArgumentSpec
from mtmc_lsp.kernels.messages import CallInputs

DRAWS = ((1, False), (2, False), (3, True), (4, True))
"""Seeds, and whether floats without a range are uniform within ``SPREAD``: a few normal values may be valid by chance."""
SPREAD = 3.0


def classify(function: Callable[..., Any], record: dict[str, Any], is_finite: bool) -> CallInputs:
    """Decide which values describe the inputs of a recorded call, and note in the record which ranges stay.

    Normal values are preferred, as everywhere. If the function raises an exception for them, or its results become NaN or
    infinite though those of the test are finite, the range of one tensor stays, else the ranges of all.

    Args:
        is_finite: whether the results of the recorded call are finite.
    """
    tensors = [item["tensor"] for item in _tensors(record["arguments"])]
    floats = [tensor for tensor in tensors if is_float(tensor["dtype"]) and "low" in tensor]
    if _is_valid(function, record, is_finite):
        return CallInputs.NORMAL
    choices: list[list[tuple[dict[str, Any], float, float]]] = []
    for tensor in floats:
        choices += [[(tensor, *bounds)] for bounds in _bounds(tensor)]
    if len(floats) > 1:
        choices += [[(tensor, *bounds[0]) for tensor in floats for bounds in (_bounds(tensor),)]]
        choices += [[(tensor, *bounds[-1]) for tensor in floats for bounds in (_bounds(tensor),)]]
    for choice in choices:
        kept = [(tensor, dict(tensor)) for tensor, _, _ in choice]
        for tensor, low, high in choice:
            tensor.update(low=low, high=high, keeps_range=True)
        if _is_valid(function, record, is_finite):
            return CallInputs.RANGES
        for tensor, before in kept:
            tensor.clear()
            tensor.update(before)
    return CallInputs.VALUES


def _bounds(tensor: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Ranges to try for a tensor: the recorded one. A constant is first widened to include 0 to 1."""
    low, high = tensor["low"], tensor["high"]
    return [(low, high)] if low < high else [(min(0.0, low), max(1.0, high)), (low, high)]


def _tensors(arguments: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for item in arguments:
        yield from _tensors(item.get("items", ()))
        if "tensor" in item:
            yield item


def _is_valid(function: Callable[..., Any], record: Mapping[str, Any], is_finite: bool) -> bool:
    """Whether the function accepts generated inputs, and its results are as finite as those of the test."""
    try:
        specs = [argument_spec(item) for item in json.loads(json.dumps(record["arguments"]))]
        for seed, is_wide in DRAWS:
            drawn = [_widened(spec) for spec in specs] if is_wide else specs
            values = argument_values(inspect.getmodule(function) or inspect, drawn, {}, "cpu", seed)
            bound = inspect.BoundArguments(inspect.signature(function), values)
            seed_torch(seed)
            with torch.no_grad():
                result = function(*bound.args, **bound.kwargs)
            if is_finite and not has_finite_values(result):
                return False
    except Exception:  # the user's code raises anything
        return False
    return True


def _widened(spec: ArgumentSpec) -> ArgumentSpec:
    tensor = spec.tensor
    if tensor is not None and tensor.low is None and is_float(tensor.dtype):
        tensor = replace(tensor, low=-SPREAD, high=SPREAD)
    return replace(spec, tensor=tensor, items=tuple(map(_widened, spec.items)))


def has_finite_values(result: Any) -> bool:
    """Whether all floats of a result are finite."""
    tensors = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
    return all(bool(torch.isfinite(item).all()) for item in tensors if item.is_floating_point() or item.is_complex())


def literal(value: Any) -> str | None:
    """The Python expression of an argument with its values; None for a kind that has none."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            return None
        flat = value.detach().cpu()
        numbers = repr(flat.tolist()).replace("nan", "float('nan')").replace("inf", "float('inf')")
        shape = f".reshape({tuple(value.shape)})" if value.numel() == 0 else ""
        return f"torch.tensor({numbers}, dtype={value.dtype}){shape}"
    if type(value) in (list, tuple, torch.Size):
        items = [literal(item) for item in value]
        if any(item is None for item in items):
            return None
        text = ", ".join(str(item) for item in items)
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' if len(items) == 1 else ''})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return repr(value) if type(value) in (bool, int, float, str, type(None)) else None
