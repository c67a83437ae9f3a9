"""Export a call as a functional ATen graph with named sizes and source lines, as our own plain value."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx.proxy
from torch.export import Dim, export

from mtmc_lsp.capture.result_structure import PLAIN, SIZES, form, is_tensor, leaves
from mtmc_lsp.capture.worker.export_speedups import hasten_export
from mtmc_lsp.capture.worker.graph_reader import LINE_MARK, InputTensor, Reader, decides_by_values, line_of, written_in
from mtmc_lsp.capture.worker.passes.decompositions import expansions
from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import AwkwardSize, Watch
from mtmc_lsp.capture.worker.size_conditions import Question, noting_questions
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.workload import Target

Place = tuple[int, int]
"""A dimension of an input: the input's number and its own."""
ATTEMPTS = 6
"""Whole exports tried while sizes that divisions speak of are made constant."""


class _Flat(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The target as a module without parts: an export takes modules alone, and puts back what they assign to themselves."""

    def __init__(self, function: _Returning) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


class _Returning:
    """The target as a function of tensors alone, which gives tensors and numbers that follow from the sizes."""

    def __init__(self, function: Any, named: Callable[[type], str], own: Callable[[Any], Any]) -> None:
        self._function, self._named, self._own = function, named, own
        self.returns = ""
        """The form of what it returned last, in which such a number is ``sizes[0]``: by its place among these."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        value = self._function(*tensors)
        found = leaves(value)
        numbers = [item for item in found if isinstance(item, torch.SymInt)]
        places = iter(range(len(numbers)))

        def written(leaf: Any) -> str:
            if not isinstance(leaf, (torch.SymInt, *PLAIN)):
                # Without free sizes it is a plain value.
                raise TypeError(f"a result follows from the sizes, as {leaf}")
            return f"{SIZES}[{next(places)}]" if isinstance(leaf, torch.SymInt) else repr(leaf)

        self.returns = form(self._own(value), self._named, written)
        return (*(item for item in found if is_tensor(item)), *numbers)


@contextlib.contextmanager
def _recording_lines(path: str, watch: Watch | None = None) -> Iterator[None]:
    """While exporting, every node remembers the innermost line of the user's file that made it, and is watched.

    Export's own stack traces keep only frames called ``forward``; a node's ``stack_trace`` survives decomposition, so the
    line travels in it.
    """
    original = torch.fx.proxy.TracerBase.create_node

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, *args, **kwargs)
        if watch is not None:
            watch.look(node)
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == path:
                node.meta["stack_trace"] = f"{LINE_MARK}{frame.f_lineno}"
                break
            frame = frame.f_back
        return node

    torch.fx.proxy.TracerBase.create_node = create_node
    try:
        yield
    finally:
        torch.fx.proxy.TracerBase.create_node = original


def export_graph(
    function: Any,
    inputs: Sequence[InputTensor],
    target: Target,
    variables: Mapping[int, str],
    named: Callable[[type], str],
    text: Sequence[str],
    own: Callable[[Any], Any] = lambda value: value,
) -> tuple[Graph, tuple[str, ...]]:
    """The graph of ``function`` over ``inputs``, and notes on what was fixed.

    Args:
        function: takes the input tensors in order.
        variables: line to the user's variable assigned there.
        named: Python for the class of a result.
        text: the lines of the target's file.
        own: what the target itself returned, of what ``function`` gives; what it keeps comes behind that.

    Raises:
        TargetUnsupported: it cannot be exported; names file and line where that is known.
    """
    flat = _Returning(function, named, own)
    fixed: set[Place] = set()
    lines: dict[Place, int] = {}
    held = {i for i, item in enumerate(inputs) if item.kind is not InputKind.ARGUMENT}
    attempts = 0
    while attempts < ATTEMPTS:
        watch = Watch([item.value for item in inputs], held, fixed)
        try:
            program, questions = _export(flat, inputs, fixed, target, watch)
        except AwkwardSize:
            fixed |= _alike(inputs, watch.found)
            lines |= {place: line_of(node) for place, node in watch.found.items()}
            continue
        except TargetUnsupported:
            # What cannot be traced for any size, as where a condition on sizes has no solution, may be for the given ones.
            break
        attempts, written = attempts + 1, written_in(program)
        reader = Reader(program, inputs, variables, target, flat.returns, written, questions)
        awkward = reader.awkward_symbols()
        numbers = _alike(inputs, (place for place, symbols in reader.symbols_at.items() if not symbols))
        if any(reader.symbols_at[place] for place in numbers):
            # Torch has made it constant at one place, as where a loop runs over it.
            fixed |= numbers
            continue
        if not awkward:
            # Taking operations apart takes longer than the export: it is only done with sizes that may stay.
            reader = Reader(_expanded(program, target), inputs, variables, target, flat.returns, written, questions)
            awkward = reader.awkward_symbols()
        if not awkward:
            return reader.read(), tuple(_told(inputs, reader, lines, text))
        for place, symbols in reader.symbols_at.items():
            for symbol in symbols & awkward.keys():
                fixed |= _alike(inputs, [place])
                lines[place] = awkward[symbol]
    fixed = {(i, d) for i, item in enumerate(inputs) for d in range(item.value.dim())}
    program, questions = _export(flat, inputs, fixed, target)
    written, program = written_in(program), _expanded(program, target)
    return Reader(program, inputs, variables, target, flat.returns, written, questions).read(), (
        "the graph holds for the workload's sizes alone",
    )


def _alike(inputs: Sequence[InputTensor], places: Iterable[Place]) -> set[Place]:
    """These places and all that the workload gives the same name: what is constant at one would else be a size at the other."""
    found = set(places)
    names = {_name(inputs, place) for place in found} - {""}
    return found | {(i, d) for i, item in enumerate(inputs) for d, name in enumerate(item.size_names) if name in names}


def _told(
    inputs: Sequence[InputTensor], reader: Reader, lines: Mapping[Place, int], text: Sequence[str]
) -> Iterator[str]:
    """What to say of sizes that the workload names and the graph has as numbers; one of 0 or 1 is no other size's case."""
    told: set[str] = set()
    for i, item in enumerate(inputs):
        for d, name in enumerate(item.size_names):
            value = int(item.value.shape[d])
            if not name or name in told or reader.symbols_at[i, d] or value < 2:
                continue
            told.add(name)
            line = next((lines[place] for place in lines if _name(inputs, place) == name and lines[place]), 0)
            why = (
                f"of line {line}: `{text[line - 1].strip()}`"
                if 0 < line <= len(text)
                else "torch's trace holds for it alone"
            )
            yield f"{name} is fixed at {value}, because {why}"


def _name(inputs: Sequence[InputTensor], place: Place) -> str:
    names = inputs[place[0]].size_names
    return names[place[1]] if place[1] < len(names) else ""


def _expanded(program: Any, target: Target) -> Any:
    """An exported program as functions without side effects, with some operations as the smaller ones they are made of."""
    hasten_export()
    with _recording_lines(target.path), torch.no_grad():
        try:
            return program.run_decompositions(expansions())
        except Exception as error:
            raise export_error(error, target) from error


def _export(
    flat: _Returning,
    inputs: Sequence[InputTensor],
    fixed: set[Place],
    target: Target,
    watch: Watch | None = None,
) -> tuple[Any, list[Question]]:
    """The target's program, as torch exports it, and what was asked of sizes on the way.

    Raises:
        AwkwardSize: the watch ended it.
        TargetUnsupported: it cannot be traced with these sizes fixed and all others free.
    """
    # On a GPU a module's own sizes are constants of its kernels. The interpreter needs smaller ones than that.
    free_parameters = all(item.value.device.type == "cpu" for item in inputs)
    named = any(name for item in inputs for name in item.size_names)

    def is_static(i: int, d: int) -> bool:
        item = inputs[i]
        # Where the workload names some sizes, those that it gives as numbers are constants.
        literal = named and d < len(item.size_names) and not item.size_names[d]
        return (item.kind is not InputKind.ARGUMENT and not free_parameters) or literal or (i, d) in fixed

    shapes = tuple(
        {d: Dim.STATIC if is_static(i, d) else Dim.AUTO for d in range(item.value.dim())}
        for i, item in enumerate(inputs)
    )
    tensors = tuple(item.value for item in inputs)
    with _recording_lines(target.path, watch), noting_questions(target.path) as questions, torch.no_grad():
        try:
            return export(_Flat(flat), tensors, dynamic_shapes=(shapes,), strict=False), questions
        except Exception as error:
            if watch is not None and watch.found:
                # Torch may have put an error of its own around it.
                raise AwkwardSize from error
            raise export_error(error, target) from error


def export_error(error: Exception, target: Target) -> TargetUnsupported:
    """What stopped a target from being traced, at the user's line."""
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == target.path]
    line = frames[-1].lineno if frames and frames[-1].lineno else target.start_line
    text = f"{type(error).__name__}: {error}"
    where = Location(target.path, line)
    if any(word in text for word in ("data-dependent", "DataDependent", "_local_scalar_dense", "DynamicOutputShape")):
        return decides_by_values(target, line)
    lines = str(error).strip().splitlines()
    # torch adds requests to report the error to its developers, which do not help the user.
    first = re.sub(r"\s*Please (file|report|open)\b.*", "", lines[0]).strip() if lines else ""
    return TargetUnsupported(
        f"{target.qualname} cannot be exported as a graph: torch.export stops at this line"
        f" with {type(error).__name__}{': ' + first if first else ''}",
        where=where,
        remedy="Move this line into a separate function, and optimize a function or module that does not contain it.",
    )
