"""Decides which Python numbers among the arguments may change from call to call, and makes them arguments of the graph's nodes.

A number is free if the target only computes with it. Three things have to agree on that: traced numbers see no use of their value
but arithmetic and calls of :data:`ARITHMETIC`; runs without data with different values make the same torch calls, apart from
the numbers; and in the exported graph the values appear only in such operations. Any other number is a constant of the graph.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mtmc_lsp.capture.result_structure import leaves
from mtmc_lsp.capture.worker.arguments.description import names_of_leaves
from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.capture.worker.eager_run import flat_function
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.capture.worker.tracing.traced_numbers import (
    ARITHMETIC,
    RecordingCalls,
    Trace,
    is_recognisable,
    is_traced,
    operation_name,
    plain,
    recorded,
)
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.graph import Argument, Graph
from mtmc_lsp.core.sizes import NumberArgument, PlainNumber
from mtmc_lsp.core.workload import Target

INTEGERS = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 131, 137, 139, 149, 151)
"""Values with which integers are traced, unless the target uses them itself. Powers with them must not become 0."""

Export = Callable[[Any], tuple[Graph, tuple[str, ...]]]
"""Exports a function of the input tensors. Returns the graph and notes."""


@dataclass(frozen=True)
class _Run:
    """What one run of the target without data did."""

    calls: list[object]
    plain_calls: list[object]
    inspected: frozenset[str]


@dataclass(frozen=True)
class _Candidate:
    """A number that may be free."""

    argument: NumberArgument
    traced_with: PlainNumber
    """A value that no constant of the target has by chance."""

    @property
    def given(self) -> PlainNumber:
        """The workload's value."""
        return self.argument.value

    @property
    def near(self) -> PlainNumber:
        """Another value close to the workload's."""
        value = self.argument.value
        return value + 1 if isinstance(value, int) else _changed(self.argument, 2)

    @property
    def opposite(self) -> PlainNumber:
        """A value with the other sign."""
        return -self.argument.value - 1

    @property
    def large(self) -> PlainNumber:
        """A value of another magnitude."""
        value = self.argument.value
        return value + 200 if isinstance(value, int) else 1000.0 * abs(value) + 1000.0


class _NotArithmetic(Exception):
    """The graph uses numbers in another way than by arithmetic; the argument is the set of their names."""


def export_with_numbers(
    export: Export, call: Call, inputs: list[InputTensor], target: Target
) -> tuple[Graph, tuple[str, ...]]:
    """Export the target. Numbers among the arguments that only arithmetic uses become :class:`Number` arguments of nodes."""
    numbers = _free_numbers(call, inputs, target)

    def traced(numbers: Sequence[_Candidate], values: Sequence[PlainNumber]) -> tuple[Graph, tuple[str, ...], Trace]:
        trace = Trace(identifies=True)
        pairs = zip(numbers, values, strict=True)
        given = {item.argument.access: trace.argument(value, item.argument.name) for item, value in pairs}
        function = flat_function(_with_values(call, given), inputs, target)
        graph, notes = export(recorded(function, RecordingCalls(trace, target.path)))
        if graph.backward is not None:
            trace.derive()
        return graph, notes, trace

    while numbers:
        try:
            graph, notes, trace = traced(numbers, [item.traced_with for item in numbers])
            inspected = frozenset(trace.inspected)
            unknown = unknown_constants(graph, trace) if graph.backward is not None and not inspected else frozenset()
            if unknown:
                # The formulas of gradients compute with numbers, too. Only constants of the code stay the same for other numbers.
                other, _, other_trace = traced(numbers, [item.near for item in numbers])
                if unknown_constants(other, other_trace) != unknown:
                    raise _NotArithmetic(frozenset(item.argument.name for item in numbers))
            if not inspected:
                return _with_numbers(graph, trace, [item.argument for item in numbers]), notes
        except _NotArithmetic as error:
            (inspected,) = error.args
        except TargetUnsupported:
            break
        numbers = [item for item in numbers if item.argument.name not in inspected]
    return export(flat_function(call, inputs, target))


def _free_numbers(call: Call, inputs: list[InputTensor], target: Target) -> list[_Candidate]:
    """The numbers among the arguments that the target only computes with, as far as runs without data tell."""
    names = names_of_leaves(call)
    pairs = zip(call.names, call.values, strict=True)
    arguments = [
        NumberArgument(names[path], path, value)
        for path, value in pairs
        if type(value) in (int, float) and names[path] != "math"
    ]
    without = _run(call, inputs, target, {}) if arguments else None
    if without is None or len(arguments) > len(INTEGERS) // 2:
        return []
    used_integers = set(_integers(without.calls))
    integers = (number for number in INTEGERS if number not in used_integers)
    candidates = [
        _Candidate(item, next(integers, item.value) if isinstance(item.value, int) else _changed(item, 1))
        for item in arguments
    ]

    def uses_of(numbers: Sequence[_Candidate]) -> frozenset[str] | None:
        """The numbers that a run inspects; ``None`` if runs with other values differ in anything but the numbers."""
        same: _Run | None = None
        # Small changes come before large ones: a loop over a large number would take long.
        for choice in ("given", "near", "traced_with"):
            values = {item.argument.access: (item.argument.name, getattr(item, choice)) for item in numbers}
            run = _run(call, inputs, target, values, identifies=choice == "traced_with")
            if run is None or run.inspected:
                return None if run is None else run.inspected
            same = same or run
            if run.calls != same.calls or same.plain_calls != without.plain_calls:
                return None
        # Compiled code, such as numpy's, compares numbers unseen. Such values may be outside the target's domain, however.
        for choice in ("opposite", "large"):
            values = {item.argument.access: (item.argument.name, getattr(item, choice)) for item in numbers}
            run = _run(call, inputs, target, values)
            if same is not None and run is not None and not run.inspected and run.calls != same.calls:
                return None
        return frozenset()

    def free(numbers: Sequence[_Candidate]) -> list[_Candidate] | None:
        while numbers:
            inspected = uses_of(numbers)
            if inspected is None:
                return None
            if not inspected:
                break
            numbers = [item for item in numbers if item.argument.name not in inspected]
        return list(numbers)

    together = free(candidates)
    if together is not None:
        return together
    return free([item for item in candidates if free([item])]) or []


def _run(
    call: Call,
    inputs: list[InputTensor],
    target: Target,
    numbers: Mapping[str, tuple[str, PlainNumber]],
    *,
    identifies: bool = False,
) -> _Run | None:
    """Run the target without data; ``None`` if it raises an exception.

    Args:
        numbers: name and value of each traced number, by path.
        identifies: whether every traced number must be recognisable by its value.
    """
    trace = Trace(identifies=identifies)
    recorder = RecordingCalls(trace, target.path)
    traced = _with_values(call, {path: trace.argument(value, name) for path, (name, value) in numbers.items()})
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    try:
        with mode, torch.no_grad():
            tensors = tuple(mode.from_tensor(item.value, static_shapes=True) for item in inputs)
            returned = leaves(recorded(flat_function(traced, inputs, target), recorder)(*tensors))
    except Exception:  # user code raises anything for other values, and where there are no data
        return None
    inspected = set(trace.inspected).union(*(item.names for item in returned if is_traced(item)))
    results = [repr(item) for item in map(plain, returned) if not isinstance(item, torch.Tensor)]
    return _Run([*recorder.calls, results], [*recorder.plain_calls, results], frozenset(inspected))


def _integers(value: object) -> Iterator[int]:
    """The integers in recorded calls, shapes included."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, str):
        yield from map(int, re.findall(r"(?<![\w.])\d+(?![\w.])", value))


def _changed(item: NumberArgument, seed: int) -> float:
    """Another float with the same sign and magnitude, so that the target's domain includes it."""
    factor = 0.85 + 0.13 * random.Random(f"{item.name} {seed}").random()
    return item.value * factor if item.value else factor


def _with_values(call: Call, values: Mapping[str, object]) -> Call:
    pairs = zip(call.names, call.values, strict=True)
    return replace(call, values=tuple(values.get(path, value) for path, value in pairs))


def unknown_constants(graph: Graph, trace: Trace) -> frozenset[float]:
    """The unusual constants in the graph that are no traced numbers."""

    def unusual(value: Argument) -> Iterator[float]:
        if isinstance(value, tuple):
            for item in value:
                yield from unusual(item)
        elif (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and is_recognisable(value)
            and value not in trace.computed
        ):
            yield value

    arguments = (value for node in graph.nodes for value in (*node.args, *node.kwargs.values()))
    return frozenset(number for value in arguments for number in unusual(value))


def _with_numbers(graph: Graph, trace: Trace, numbers: Sequence[NumberArgument]) -> Graph:
    """The graph with :class:`Number` arguments instead of the values that the numbers were traced with.

    Raises:
        _NotArithmetic: an operation takes a number in another way, or torch has replaced it by another constant.
    """
    found: set[str] = set()

    def converted(value: Argument, *, is_allowed: bool) -> Argument:
        if isinstance(value, tuple):
            return tuple(converted(item, is_allowed=False) for item in value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in trace.computed:
            return value
        number = trace.computed[value]
        if not is_allowed or number.kind != type(value).__name__:
            raise _NotArithmetic(frozenset(number.names()))
        found.add(number.text)
        return number

    nodes = []
    for node in graph.nodes:
        positions = ARITHMETIC.get(operation_name(node.op.split(".")[1]), frozenset())
        args = tuple(converted(item, is_allowed=i in positions) for i, item in enumerate(node.args))
        kwargs = {key: converted(item, is_allowed=key in positions) for key, item in node.kwargs.items()}
        nodes.append(replace(node, args=args, kwargs=kwargs))
    lost = [trace.computed[value] for value in trace.used if trace.computed[value].text not in found]
    if lost:
        raise _NotArithmetic(frozenset(name for number in lost for name in number.names()))
    originals = {item.name: item for item in numbers}
    return replace(graph, nodes=tuple(nodes), numbers=tuple(originals.values()))
