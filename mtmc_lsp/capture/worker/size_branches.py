"""Derives conditions on sizes that the export does not state: where size 1 changes the behaviour, and where kernels are valid."""

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

CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"


class _CallRecorder(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Records the torch functions that Python code calls, with flags such as ``is_causal``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        flags = tuple(value for value in values if value is None or isinstance(value, (bool, torch.dtype)))
        self.calls.append((resolve_name(function) or str(function), flags))
        return function(*args, **(kwargs or {}))


def sizes_above_one(function: Callable[..., Any], graph: Graph, device: str) -> tuple[str, ...]:
    """Conditions ``T >= 2`` for sizes whose value 1 changes the calls of ``function`` or the strides of its results.

    Args:
        function: takes the tensors of ``graph.inputs``.
    """

    def differs(name: str) -> bool:
        sizes = {**graph.sizes, name: 1}
        single = _run(function, graph, sizes, device)
        if reference is None or single is None:
            return single is not None
        return single.calls != reference.calls or (
            has_reference_strides and single.strides != _graph_strides(graph, sizes)
        )

    def is_excluded(name: str) -> bool:
        conditions = (text for text in graph.conditions if names_in(text) == {name})
        return not conditions_hold(conditions, {name: 1})

    reference = _run(function, graph, graph.sizes, device)
    has_reference_strides = reference is not None and reference.strides == _graph_strides(graph, graph.sizes)
    return tuple(f"{name} >= 2" for name in graph.sizes if not is_excluded(name) and differs(name))


Strides = tuple[tuple[int, ...], ...]
"""Strides of each result, without those of dimensions of size 1, which no index uses."""


@dataclass(frozen=True)
class _Run:
    """Observations of one call."""

    calls: list[tuple[str, tuple[object, ...]]]
    strides: Strides


def _run(function: Callable[..., Any], graph: Graph, sizes: Mapping[str, int], device: str) -> _Run | None:
    """Call ``function`` with tensors of these sizes without data; ``None`` if it raises an error.

    An error means that the sizes depend on each other, for example those of a table and its indices.
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
            with _CallRecorder() as calls:
                results = leaves(function(*tensors))
        except Exception:
            return None
    recorded: list[tuple[str, tuple[object, ...]]] = calls.calls
    return _Run(
        recorded, tuple(_used_strides(item.shape, item.stride()) for item in results if isinstance(item, torch.Tensor))
    )


def _graph_strides(graph: Graph, sizes: Mapping[str, int]) -> Strides:
    """The strides of the results according to the graph."""
    kinds = [graph.type_of(ref) for ref in graph.outputs if ref is not None]
    return tuple(
        _used_strides([size.value(sizes) for size in kind.shape], [step.value(sizes) for step in kind.stride])
        for kind in kinds
    )


def _used_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    return tuple(step for size, step in zip(shape, stride, strict=True) if size != 1)


def more_than_one_value(graph: Graph) -> tuple[str, ...]:
    """Conditions under which each statistic of a norm has more than one value. PyTorch raises an error for a single value."""
    conditions: dict[str, None] = {}
    for node in graph.nodes:
        values = _values_per_statistic(node)
        if values is not None and not _is_above(1, values):
            conditions[f"{values} > 1"] = None
    return tuple(conditions)


def never_empty(graph: Graph) -> tuple[str, ...]:
    """Conditions under which no intermediate tensor is empty, as ``x[1:] - x[:-1]`` is for one row. Kernels need elements."""
    sizes = (size for node in graph.nodes for kind in node.outputs for size in kind.shape if not size.is_constant)
    may_be = (_without_shared_factors(size) for size in dict.fromkeys(sizes) if not _is_above(0, size))
    return tuple(dict.fromkeys(f"{size} > 0" for size in may_be))


def long_enough_for_cudnn(graph: Graph) -> tuple[str, ...]:
    """Conditions under which cuDNN's attention runs. A graph with gradients fixes PyTorch's choice of a backend. For one query or
    one key PyTorch does not choose cuDNN (``check_cudnn_tensor_shapes`` in ATen's ``sdp_utils.cpp``), which crashes there.
    """
    conditions: dict[str, None] = {}
    for node in graph.nodes:
        if node.op.split(".")[1] == CUDNN_ATTENTION:
            for operand in node.args[:2]:
                assert isinstance(operand, Ref)
                length = graph.type_of(operand).shape[-2]
                if not length.is_constant:
                    conditions[greater_than(length, 1)] = None
    return tuple(conditions)


def rolled_within(graph: Graph) -> tuple[str, ...]:
    """Conditions under which dimensions are longer than the shift of ``roll``, so that the index wraps at most once."""
    conditions: dict[str, None] = {}
    for node in graph.nodes:
        if node.op.split(".")[1] == "roll":
            source, shifts, *dims = node.args
            assert isinstance(source, Ref)
            shape = graph.type_of(source).shape
            rolled_sizes = [shape[dim] for dim in _each(dims[0]) if isinstance(dim, int)] if dims else []
            for size, shift in zip(rolled_sizes or [product(shape)], _each(shifts), strict=True):
                if isinstance(shift, int) and shift and not size.is_constant and size.value(graph.sizes) > abs(shift):
                    conditions[greater_than(size, abs(shift))] = None
    return tuple(conditions)


def _each(value: Argument) -> tuple[Argument, ...]:
    return value if isinstance(value, tuple) else (value,)


def _without_shared_factors(size: Size) -> Size:
    """Divide by common factors: ``B*H - 2*B`` becomes ``H - 2``, which is positive under the same condition."""
    for name in dict.fromkeys(size.terms[0][0]):
        while all(name in factors for factors, _ in size.terms):
            terms = [
                (factors[: (i := factors.index(name))] + factors[i + 1 :], factor) for factors, factor in size.terms
            ]
            size = Size(tuple(terms))
    shared = math.gcd(*(factor for _, factor in size.terms))
    return Size(tuple((factors, factor // shared) for factors, factor in size.terms))


def _is_above(least: int, size: Size) -> bool:
    """Whether the expression is above ``least`` for all sizes of at least 1."""
    is_increasing = all(
        factor > 0 and all(name.isidentifier() for name in names) for names, factor in size.terms if names
    )
    return is_increasing and size.value(dict.fromkeys(size.symbols(), 1)) > least


def _values_per_statistic(node: Node) -> Size | None:
    """Number of values per mean and variance of a norm, if it must not be one; otherwise ``None``."""
    name, args = node.op.split(".")[1], node.args
    if name == "group_norm" and isinstance(args[1], int):
        return product(node.type.shape) // args[1]
    if name == "instance_norm":
        return product(node.type.shape[2:]) if args[5] is True else None
    if name.startswith("_native_batch_norm_legit") and any(item is True for item in args[:6]):
        return product((node.type.shape[0], *node.type.shape[2:]))
    return None
