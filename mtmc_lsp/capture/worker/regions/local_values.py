"""The local variables of a target at each of its statements, from calls on the workload.

The inputs of a region are values in the middle of a call, so only a call shows their shapes, dtypes and ranges. Further calls
with another seed and with other sizes show which dimensions vary.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch

from mtmc_lsp.capture.messages import LocalValue, LocalValues
from mtmc_lsp.capture.recorded_calls import argument_spec
from mtmc_lsp.capture.recorder.arguments import argument_record, update_range
from mtmc_lsp.capture.regions.statements import Statements, suites_of
from mtmc_lsp.capture.worker.autocast.regions import current_dtype
from mtmc_lsp.capture.worker.calls import build_call, user_error
from mtmc_lsp.capture.worker.regions.region_function import definition_of
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ArgumentSpec, Workload

Records = dict[str, dict[str, Any]]
"""The record of each local variable, by name."""


def local_values(module: Any, workload: Workload, device: str) -> LocalValues:
    """Call the target, and describe its local variables where each statement runs for the first time.

    Raises:
        MtmcError: the target raises on its workload.
    """
    try:
        first = _observed(module, workload, device, workload.sizes, 0)
    except Exception as error:
        raise user_error(error, workload.target, "on the workload's inputs") from error
    further: list[tuple[Mapping[str, int], dict[int, Records]]] = []
    if workload.sizes:
        further = [*_attempt(module, workload, device, workload.sizes, 1)]
        for name in workload.sizes:
            for size in (workload.sizes[name] // 2, workload.sizes[name] * 2):
                other = [*_attempt(module, workload, device, {**workload.sizes, name: size}, 0)] if size > 1 else []
                further += other
                if other:
                    break
    symbols = _Symbols(workload.sizes, [sizes for sizes, _ in further])
    statements = {}
    for number, records in first.items():
        values = []
        for name, record in records.items():
            others = [seen.get(number, {}).get(name) for _, seen in further]
            kind = _unknown(record)
            spec = None if kind else symbols.applied(argument_spec(record), record, others)
            values.append(LocalValue(name, spec, kind))
        statements[number] = tuple(values)
    return LocalValues(statements, symbols.sizes)


def _attempt(
    module: Any, workload: Workload, device: str, sizes: Mapping[str, int], seed: int
) -> Iterator[tuple[Mapping[str, int], dict[int, Records]]]:
    """The sizes and the records of a call with them; nothing if the target does not accept them."""
    try:
        yield sizes, _observed(module, workload, device, sizes, seed)
    except Exception:
        return


def _observed(module: Any, workload: Workload, device: str, sizes: Mapping[str, int], seed: int) -> dict[int, Records]:
    """The records of the local variables, by number of the statement that runs next."""
    call = build_call(module, workload, device, sizes, seed)
    function = getattr(call.function, "__func__", call.function)
    definition, lines = definition_of(function)
    numbers = _numbers_of_lines(Statements(definition, lines))
    code: CodeType = function.__code__
    seen: dict[int, Records] = {}

    def trace_call(frame: FrameType, event: str, argument: object) -> Any:
        return trace_line if frame.f_code is code else None

    def trace_line(frame: FrameType, event: str, argument: object) -> Any:
        number = numbers.get(frame.f_lineno)
        # A region of the code runs in the mode of the call.
        is_in_mode = current_dtype() == workload.autocast
        if event == "line" and number is not None and number not in seen and is_in_mode:
            sys.settrace(None)
            seen[number] = {name: _record(name, value) for name, value in frame.f_locals.items()}
            sys.settrace(trace_call)
        return trace_line

    torch.manual_seed(seed)
    before = sys.gettrace()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), call.in_mode():
        # A decorator may convert the arguments, and turn autocast on.
        called = call.decorated if call.decorated is not None else call.function
        positional, named = call.passed(call.values)
        sys.settrace(trace_call)
        try:
            called(*positional, **named)
        finally:
            sys.settrace(before)
    return seen


def _numbers_of_lines(statements: Statements) -> dict[int, int]:
    """The number of the innermost statement on each line; for a compound statement the lines of its header."""
    numbers: dict[int, int] = {}
    for number, statement in enumerate(statements.all):
        starts = [suite[0].lineno for suite in suites_of(statement)]
        end = min(starts) - 1 if starts else statement.end_lineno or statement.lineno
        numbers |= dict.fromkeys(range(statement.lineno, max(end, statement.lineno) + 1), number)
    return numbers


def _record(name: str, value: Any) -> dict[str, Any]:
    # The target may change a list later.
    record: dict[str, Any] = copy.deepcopy(argument_record(name, value, torch))
    if not _unknown(record):
        update_range(record, value, torch)
    return record


def _unknown(record: Mapping[str, Any]) -> str:
    """The class of a value, or of an item, that cannot be created again; empty if there is none."""
    for item in record.get("items", ()):
        if kind := _unknown(item):
            return kind
    return str(record.get("other", ""))


class _Symbols:
    """Names for the dimensions that differ between calls."""

    def __init__(self, sizes: Mapping[str, int], further: list[Mapping[str, int]]) -> None:
        self.sizes = dict(sizes)
        self._names = {(sizes[name], *(other[name] for other in further)): name for name in sizes}
        self._varies = bool(sizes)

    def applied(
        self, spec: ArgumentSpec, record: Mapping[str, Any], others: Sequence[Mapping[str, Any] | None]
    ) -> ArgumentSpec:
        """The spec with a named size for each dimension that varies."""
        if spec.items:
            parts = zip(spec.items, record["items"], strict=True)
            inner = [[_item(other, i) for other in others] for i in range(len(spec.items))]
            items = (self.applied(item, part, rest) for (item, part), rest in zip(parts, inner, strict=True))
            return replace(spec, items=tuple(items))
        if spec.tensor is None or not self._varies:
            return spec
        runs = [
            record["tensor"],
            *(other["tensor"] if other and "tensor" in other else record["tensor"] for other in others),
        ]
        rank = len(record["tensor"]["shape"])
        runs = [run if len(run["shape"]) == rank else runs[0] for run in runs]
        shape = tuple(self._size(spec.name, i, tuple(run["shape"][i] for run in runs)) for i in range(rank))
        stride = _strides(shape, runs) if spec.tensor.stride is not None else None
        return replace(spec, tensor=replace(spec.tensor, shape=shape, stride=stride))

    def _size(self, name: str, dimension: int, values: tuple[int, ...]) -> Size:
        if len(set(values)) == 1:
            return Size.of(values[0])
        if values not in self._names:
            identifier = "".join(c if c.isalnum() else "_" for c in name).strip("_")
            symbol = f"{identifier}_{dimension}"
            while symbol in self.sizes:
                symbol += "_"
            self._names[values] = symbol
            self.sizes[symbol] = values[0]
        return Size.symbol(self._names[values])


def _strides(shape: Sequence[Size], runs: Sequence[Mapping[str, Any]]) -> tuple[Size, ...]:
    """The strides of a tensor in terms of its sizes, from its shapes and strides in several calls.

    A stride that varies is a multiple of the extent of the next inner dimension; else it stays as in the first call.
    """
    strides = [Size.of(step) for step in runs[0]["stride"]]
    extent, extents = Size.of(1), [1] * len(runs)
    for i in sorted(range(len(shape)), key=lambda i: int(runs[0]["stride"][i])):
        values = [run["stride"][i] for run in runs]
        factors = {divmod(value, max(inner, 1)) for value, inner in zip(values, extents, strict=True)}
        if len(set(values)) > 1 and len(factors) == 1 and (factor := factors.pop())[1] == 0:
            strides[i] = extent * Size.of(factor[0])
        extent = strides[i] * shape[i]
        extents = [value * run["shape"][i] for value, run in zip(values, runs, strict=True)]
    return tuple(strides)


def _item(record: Mapping[str, Any] | None, index: int) -> Mapping[str, Any] | None:
    items = record.get("items", ()) if record else ()
    found: Mapping[str, Any] | None = items[index] if index < len(items) else None
    return found
