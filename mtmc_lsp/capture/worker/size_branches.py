"""Whether a target does something else where sizes are 1: the export holds for sizes from 2 on and does not say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name

from mtmc_lsp.capture.result_structure import leaves
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size, conditions_hold, greater_than, names_in, product


class _Calls(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Notes the functions of torch that Python code calls, with their flags, as ``is_causal``."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[object, ...]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        flags = tuple(value for value in values if value is None or isinstance(value, (bool, torch.dtype)))
        self.made.append((resolve_name(function) or str(function), flags))
        return function(*args, **(kwargs or {}))


def sizes_above_one(function: Callable[..., Any], graph: Graph, device: str) -> tuple[str, ...]:
    """Conditions ``T >= 2`` for the sizes that decide, where they are 1, what ``function`` calls or how its results lie.

    Args:
        function: takes the tensors of ``graph.inputs``.
        graph: its graph.
        device: of the tensors.
    """

    def differs(name: str) -> bool:
        sizes = {**graph.sizes, name: 1}
        single = _run(function, graph, sizes, device)
        if usual is None or single is None:
            return single is not None
        return single.calls != usual.calls or (follows and single.steps != _steps_in(graph, sizes))

    def is_said(name: str) -> bool:
        alone = (text for text in graph.conditions if names_in(text) == {name})
        return not conditions_hold(alone, {name: 1})

    usual = _run(function, graph, graph.sizes, device)
    follows = usual is not None and usual.steps == _steps_in(graph, graph.sizes)
    return tuple(f"{name} >= 2" for name in graph.sizes if not is_said(name) and differs(name))


Steps = tuple[tuple[int, ...], ...]
"""Of each result the strides of its dimensions, those of a single element left out: no index steps over it."""


@dataclass(frozen=True)
class _Run:
    """What is seen of one call."""

    calls: list[tuple[str, tuple[object, ...]]]
    steps: Steps


def _run(function: Callable[..., Any], graph: Graph, sizes: Mapping[str, int], device: str) -> _Run | None:
    """A call on tensors of these sizes, none of which has data; None where the target does not take them.

    Then its sizes hang together, as those of a look-up and its indices do.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = [
            torch.empty_strided(
                [size.value(sizes) for size in item.type.shape],
                [size.value(sizes) for size in item.type.stride],
                dtype=getattr(torch, item.type.dtype),
                device=device,
            )
            for item in graph.inputs
        ]
        try:
            with _Calls() as calls:
                results = leaves(function(*tensors))
        except Exception:
            return None
    made: list[tuple[str, tuple[object, ...]]] = calls.made
    return _Run(made, tuple(_steps(own.shape, own.stride()) for own in results if isinstance(own, torch.Tensor)))


def _steps_in(graph: Graph, sizes: Mapping[str, int]) -> Steps:
    """How the graph says that its results lie."""
    kinds = [graph.type_of(ref) for ref in graph.outputs if ref is not None]
    return tuple(
        _steps([size.value(sizes) for size in kind.shape], [step.value(sizes) for step in kind.stride])
        for kind in kinds
    )


def _steps(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    return tuple(step for size, step in zip(shape, stride, strict=True) if size != 1)


def more_than_one_value(graph: Graph) -> tuple[str, ...]:
    """Conditions under which norms have more than one value for each statistic: PyTorch's own raise an error for one."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        values = _values_of_a_statistic(node)
        if values is not None and not _is_above(1, values):
            found[f"{values} > 1"] = None
    return tuple(found)


def never_empty(graph: Graph) -> tuple[str, ...]:
    """Conditions under which no value on the way is empty, as ``x[1:] - x[:-1]`` is of one row: kernels are for what is there."""
    sizes = (size for node in graph.nodes for kind in node.outputs for size in kind.shape if not size.is_constant)
    may_be = (_without_shared_factors(size) for size in dict.fromkeys(sizes) if not _is_above(0, size))
    return tuple(dict.fromkeys(f"{size} > 0" for size in may_be))


def rolled_within(graph: Graph) -> tuple[str, ...]:
    """Conditions under which rolled dimensions are longer than they are rolled: what is past the end begins at the front."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.op.split(".")[1] == "roll":
            source, shifts, *dims = node.args
            assert isinstance(source, Ref)
            shape = graph.type_of(source).shape
            along = [shape[dim] for dim in _each(dims[0]) if isinstance(dim, int)] if dims else []
            for size, shift in zip(along or [product(shape)], _each(shifts), strict=True):
                if isinstance(shift, int) and shift and not size.is_constant and size.value(graph.sizes) > abs(shift):
                    found[greater_than(size, abs(shift))] = None
    return tuple(found)


def _each(value: Argument) -> tuple[Argument, ...]:
    return value if isinstance(value, tuple) else (value,)


def _without_shared_factors(size: Size) -> Size:
    """``H - 2`` of ``B*H - 2*B``, which is above 0 where that is."""
    for name in dict.fromkeys(size.terms[0][0]):
        while all(name in factors for factors, _ in size.terms):
            terms = [
                (factors[: (i := factors.index(name))] + factors[i + 1 :], factor) for factors, factor in size.terms
            ]
            size = Size(tuple(terms))
    shared = math.gcd(*(factor for _, factor in size.terms))
    return Size(tuple((factors, factor // shared) for factors, factor in size.terms))


def _is_above(least: int, size: Size) -> bool:
    """Whether any sizes, each of which is at least 1, make it more than ``least``."""
    grows = all(factor > 0 and all(name.isidentifier() for name in names) for names, factor in size.terms if names)
    return grows and size.value(dict.fromkeys(size.symbols(), 1)) > least


def _values_of_a_statistic(node: Node) -> Size | None:
    """How many values the node finds each mean and variance of, where it must not be one."""
    name, args = node.op.split(".")[1], node.args
    if name == "group_norm" and isinstance(args[1], int):
        return product(node.type.shape) // args[1]
    if name == "instance_norm":
        return product(node.type.shape[2:]) if args[5] is True else None
    if name.startswith("_native_batch_norm_legit") and any(item is True for item in args[:6]):
        return product((node.type.shape[0], *node.type.shape[2:]))
    return None
