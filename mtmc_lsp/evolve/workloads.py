"""The workloads that a version is scored on: the captured one, and further sizes at which its kernels run.

Further sizes come from recorded calls. If there are none, a free size is halved and doubled. Calls with other dtypes, ranks or
constants are no part of them: the guard sends these to the user's code, so no version changes their time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.capture.recorded_calls import RecordedCall, RecordedTarget
from mtmc_lsp.core.graph import Graph, TensorType
from mtmc_lsp.core.workload import Capture, TensorSpec, leaves_of
from mtmc_lsp.verify.sizes.case_sizes import conditions_allow
from mtmc_lsp.verify.sizes.interpreter_limits import product_work

MOST_WORKLOADS = 4
LEAST_SIZE = 2
"""Free sizes are not halved below this."""
LARGEST = 1 << 29
"""Elements of all inputs and values above which a doubled workload is left out: its timing would take most of the time."""


@dataclass(frozen=True)
class Workloads:
    """The workloads by name, with the values of the named sizes."""

    points: tuple[tuple[str, dict[str, int]], ...]
    notes: tuple[str, ...] = ()
    """Which recorded calls are left out and why."""

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return [name for name, _ in self.points]


def workloads_of(capture: Capture, record: RecordedTarget | None = None) -> Workloads:
    """The workloads of a capture.

    Args:
        record: the recorded calls of the target, if there are any.
    """
    graph, base = capture.graph, dict(capture.graph.sizes)
    sizes, notes = [base], list[str]()
    others = 0
    for call in record.calls if record is not None else ():
        values = _sizes_of(capture, call)
        if values is None:
            others += call.count
        elif values not in sizes and conditions_allow(graph, values):
            sizes.append(values)
    if others:
        calls = "call has" if others == 1 else "calls have"
        notes.append(
            f"{others} recorded {calls} other dtypes, ranks, constants or fixed sizes: the guard sends them to your code, so "
            "they are no part of the scores"
        )
    if len(sizes) == 1:
        sizes += [values for factor in (0.5, 2.0) if (values := _scaled(capture, factor)) is not None]
    return Workloads(tuple((_name(capture, values), values) for values in sizes[:MOST_WORKLOADS]), tuple(notes))


def at_sizes(capture: Capture, sizes: Mapping[str, int]) -> Capture:
    """The capture of a call with other values of the named sizes."""
    before, graph = capture.graph, replace(capture.graph, sizes=dict(sizes))
    known = {name: sizes.get(name, value) for name, value in capture.workload.sizes.items()}
    work, moved = product_work(before, before.sizes), _elements(before)
    flops = capture.flops * product_work(graph, graph.sizes) / work if work else capture.flops
    traffic = capture.bytes * _elements(graph) / moved if moved else capture.bytes
    workload = replace(capture.workload, sizes=known)
    return replace(capture, graph=graph, workload=workload, flops=flops, bytes=traffic)


def _sizes_of(capture: Capture, call: RecordedCall) -> dict[str, int] | None:
    """The values of the named sizes in a recorded call; ``None`` if the kernels would not run for it."""
    if _constants_differ(capture, call):
        return None
    types: dict[str, TensorType] = {}
    inputs = {item.name: item.type for item in capture.graph.inputs}
    for leaf in capture.leaves:
        if leaf.input is not None and leaf.input in inputs:
            types[leaf.name] = inputs[leaf.input]
    specs = {leaf.name: leaf.tensor for leaf in leaves_of(call.arguments) if leaf.tensor is not None}
    values = dict(capture.graph.sizes)
    solved: dict[str, int] = {}
    for name, kind in types.items():
        spec = specs.get(name)
        if spec is None or spec.dtype != kind.dtype or len(spec.shape) != len(kind.shape):
            return None
        if (spec.stride is None) != kind.is_contiguous:
            return None
        for size, symbol in zip(_shape(spec), kind.shape, strict=True):
            text = str(symbol)
            if text in values and text in capture.variable_sizes:
                if solved.setdefault(text, size) != size:
                    return None
            elif symbol.value({**values, **solved}) != size:
                return None
    return {**values, **solved}


def _constants_differ(capture: Capture, call: RecordedCall) -> bool:
    """Whether plain values of a recorded call, or its constructor's arguments, are others than the captured ones."""
    free = {number.access for number in capture.graph.numbers}
    captured = {leaf.name: leaf.constant for leaf in capture.leaves if leaf.input is None and leaf.name not in free}
    recorded = {leaf.name: leaf.constant for leaf in leaves_of(call.arguments) if leaf.tensor is None}
    if any(name in recorded and recorded[name] != value for name, value in captured.items()):
        return True
    init = {leaf.name: leaf.constant for leaf in leaves_of(capture.workload.init_arguments) if leaf.tensor is None}
    built = {leaf.name: leaf.constant for leaf in leaves_of(call.init_arguments) if leaf.tensor is None}
    return any(name in init and init[name] != value for name, value in built.items())


def _shape(spec: TensorSpec) -> list[int]:
    return [size.value({}) for size in spec.shape]


def _scaled(capture: Capture, factor: float) -> dict[str, int] | None:
    """The largest free size times a factor; ``None`` if the kernels would not run there."""
    graph, base = capture.graph, dict(capture.graph.sizes)
    free: Sequence[str] = [name for name in capture.variable_sizes if name in base]
    for name in sorted(free, key=lambda name: (-base[name], name)):
        values = {**base, name: int(base[name] * factor)}
        is_usable = values[name] >= LEAST_SIZE and values[name] != base[name] and conditions_allow(graph, values)
        if is_usable and (factor < 1 or _elements(replace(graph, sizes=values)) <= LARGEST):
            return values
    return None


def _elements(graph: Graph) -> int:
    """Elements of all inputs and values."""
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    return sum(kind.numel.value(graph.sizes) for kind in kinds)


def _name(capture: Capture, sizes: Mapping[str, int]) -> str:
    """The free sizes as text: ``B=8, S=2048``; ``as captured`` if none is free."""
    names = [name for name in sizes if name in capture.variable_sizes]
    return ", ".join(f"{name}={sizes[name]}" for name in names) or "as captured"
