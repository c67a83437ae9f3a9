"""Exports a call as a functional ATen graph with named sizes and source lines, as a :class:`Graph`."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx.config
import torch.fx.proxy
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import Dim, export
from torch.export._trace import _export as _export_with
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from mtmc_lsp.capture.result_structure import PLAIN, RESULTS, SIZES, structure_of, tensors_of
from mtmc_lsp.capture.worker.arguments.strided_tensors import is_other_view
from mtmc_lsp.capture.worker.graph_reader import (
    LINE_MARK,
    InputTensor,
    Reader,
    depends_on_values,
    line_of,
)
from mtmc_lsp.capture.worker.literal_tensors import literal_inputs
from mtmc_lsp.capture.worker.loops.folding import remove_dead_traces
from mtmc_lsp.capture.worker.loops.pairs.splitting import split_complex_values
from mtmc_lsp.capture.worker.passes.attention_operator import SingleAttention
from mtmc_lsp.capture.worker.passes.decompositions import decompositions
from mtmc_lsp.capture.worker.passes.free_sizes import FreeSizes
from mtmc_lsp.capture.worker.passes.gradients import GradientTrace, backward_decompositions
from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import CONSTANT, Cause, Dimension, NonPolynomialSize, Watch
from mtmc_lsp.capture.worker.size_conditions import Question, recording_questions
from mtmc_lsp.capture.worker.speedups.operators import speed_up_export
from mtmc_lsp.capture.worker.speedups.repeated_nodes import decomposed
from mtmc_lsp.capture.worker.tracing.local_modes import AboveAutograd
from mtmc_lsp.capture.worker.tracing.selections import UnknownSize, require_no_selection
from mtmc_lsp.capture.worker.tracing.size_forms import GradientForms
from mtmc_lsp.capture.worker.tracing.symbolic_lengths import symbolic_lengths
from mtmc_lsp.core.errors import Location, MtmcError, TargetUnsupported
from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Target
from mtmc_lsp.process.worker.failures import exception_chain

MANY_PARAMETERS = 64
"""A module with more parameters and buffers is a network, and their sizes are constants. With a symbol for each size, the export
of BERT-base (199 parameters) took 229 s of processor time, with constants 8 s (x86 virtual machine, torch 2.13)."""
ATTEMPTS = 6
"""Complete exports that are tried while sizes in divisions get units or are made constant."""
LONGEST_REASON = 200
"""Characters of torch's reason in an error message."""
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What torch raises where a trace would need the values of a tensor."""
DISTRIBUTIONS = Path(torch.distributions.__file__).parent
"""The folder of the modules whose checks of arguments read values."""
WITHOUT_CHECKS = "Construct distributions with validate_args=False: their checks read the values of a tensor."

WITHOUT_ASSERTION = "Move the assertion to the code that calls the target: it reads the values of a tensor."


class _Module(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """The target as a module without submodules: export accepts only modules, and would undo assignments to a user's module."""

    def __init__(self, function: _FlatTarget) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


class _FlatTarget:
    """The target as a function of tensors only. It returns the result tensors and the numbers that depend on input sizes."""

    def __init__(
        self,
        function: Any,
        class_name: Callable[[type], str],
        target_result: Callable[[Any], Any],
        gradients: GradientTrace | None = None,
    ) -> None:
        self._function, self._class_name, self._target_result = function, class_name, target_result
        self.gradients = gradients
        """Set if the function is traced together with its backward pass, whose gradients are then further results."""
        self.is_below_autograd = gradients is not None
        """Whether to trace below autograd's dispatch, where the backward pass and the casts of autocast are operators."""
        self.follows_selections = True
        """Whether to follow ``x[mask]`` to a sum or a mean."""
        self.equal: list[list[Dimension]] = []
        """Dimensions that the trace assumes to be equal."""
        self.returns = ""
        """Structure of the last return value. Such a number is ``sizes[0]``, indexed by its position among these numbers."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.gradients is None:
            return self._results(tensors)[0]
        leaves = self.gradients.leaves(tensors)
        with torch.enable_grad():
            returned, results = self._results(leaves)
            gradients = self.gradients.gradients(results, leaves)
        return [item.detach() if isinstance(item, torch.Tensor) else item for item in (*returned, *gradients)]

    def _results(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """The results with the numbers, and the results alone."""
        versions = [tensor._version for tensor in tensors]
        for first, *others in self.equal:
            for i, d in others:
                torch._check(tensors[i].shape[d] == tensors[first[0]].shape[first[1]])
        with symbolic_lengths():
            value = self._function(*tensors)
        numbers: list[torch.SymInt] = []

        def number_text(number: Any) -> str:
            if not isinstance(number, torch.SymInt):
                return repr(number)
            numbers.append(number)
            return f"{SIZES}[{len(numbers) - 1}]"

        def leaf_text(leaf: Any) -> str:
            if not isinstance(leaf, (torch.SymInt, *PLAIN)):
                # Happens only with symbolic sizes; with fixed sizes this is a plain value.
                raise TypeError(f"the target returns {leaf}, which depends on the input sizes")
            return number_text(leaf)

        changed = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
        results = tensors_of(value)
        require_no_selection(results)
        views = {
            i: _view_text(result, i, number_text)
            for i, result in enumerate(results)
            if any(is_other_view(result, tensor) for tensor in changed)
        }
        self.returns = structure_of(self._target_result(value), self._class_name, leaf_text, views)
        return (*results, *numbers), results


def _view_text(view: torch.Tensor, number: int, number_text: Callable[[Any], str]) -> str:
    """Python expression for a view of an input, which is result ``number``."""
    shape, stride = ("".join(f"{number_text(item)}, " for item in items) for items in (view.shape, view.stride()))
    source, offset = f"{RESULTS}[{number}]", number_text(view.storage_offset())
    return f"{source}.as_strided(({shape}), ({stride}), {source}.storage_offset(){'' if offset == '0' else f' + {offset}'})"


@contextlib.contextmanager
def _recording_lines(path: str, watch: Watch | None = None) -> Iterator[None]:
    """During an export, record for every node the innermost line of the user's file, and show the node to ``watch``.

    Export's stack traces keep only frames named ``forward``. A node's ``stack_trace`` survives decomposition, so it stores the
    line. An operation of the backward pass has the line of the operation whose gradient it computes: autograd numbers both alike.
    """
    original = torch.fx.proxy.TracerBase.create_node
    lines: dict[int, int] = {}

    def create_node(self: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, *args, **kwargs)
        if watch is not None:
            watch.check_inputs(node)
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == path:
                node.meta["stack_trace"] = f"{LINE_MARK}{frame.f_lineno}"
                lines[torch.autograd._get_sequence_nr() - 1] = frame.f_lineno
                break
            frame = frame.f_back
        differentiated = torch._C._current_autograd_node()
        if differentiated is not None and (line := lines.get(differentiated._sequence_nr())):
            node.meta["stack_trace"] = f"{LINE_MARK}{line}"
        return node

    torch.fx.proxy.TracerBase.create_node = create_node
    try:
        with _without_stacks():
            yield
    finally:
        torch.fx.proxy.TracerBase.create_node = original


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    """Keep torch from writing the whole stack into each node, where its version has a setting for that: 2.11 has none."""
    setting, settings = "do_not_emit_stack_traces", torch.fx.config
    if not hasattr(settings, setting):
        yield
        return
    before = getattr(settings, setting)
    setattr(settings, setting, True)
    try:
        yield
    finally:
        setattr(settings, setting, before)


def export_graph(
    function: Any,
    inputs: Sequence[InputTensor],
    target: Target,
    variables: Mapping[int, str],
    class_name: Callable[[type], str],
    text: Sequence[str],
    target_result: Callable[[Any], Any] = lambda value: value,
    *,
    windows_vary: bool = True,
    gradients: GradientTrace | None = None,
) -> tuple[Graph, tuple[str, ...]]:
    """Export ``function`` on ``inputs``. Returns the graph, and notes on the sizes that are fixed.

    Args:
        function: takes the input tensors in this order.
        variables: 1-based line to the user's variable that the line assigns.
        class_name: Python expression for the class of a result.
        text: the lines of the target's file.
        target_result: the return value of the target, from the value that ``function`` returns; state tensors follow it there.
        windows_vary: whether sizes of images may vary if windows or divisions of the sizes read them.
        gradients: traces the backward pass, too; None for the forward pass alone.

    Raises:
        TargetUnsupported: the target cannot be exported; names file and line if known.
    """
    speed_up_export()
    flat = _FlatTarget(function, class_name, target_result, gradients)
    sizes = FreeSizes([item.value for item in inputs], [item.size_names for item in inputs], windows_vary=windows_vary)
    module_inputs = {i for i, item in enumerate(inputs) if item.kind is not InputKind.ARGUMENT}
    if len(module_inputs) > MANY_PARAMETERS:
        sizes.fix((i, d) for i in module_inputs for d in range(inputs[i].value.dim()))
    attempts, numbers = 0, dict[int | float, int]()
    while attempts < ATTEMPTS:
        watch = Watch(sizes, module_inputs)
        try:
            program, questions = _export(flat, inputs, sizes, target, watch)
        except NonPolynomialSize:
            assert watch.node is not None
            if not flat.equal and CONSTANT in watch.factors.values() and (equal := sizes.same_names()):
                flat.equal = equal
                continue
            operation, line = str(watch.node.target), line_of(watch.node)
            sizes.divide((dimension, Cause(factor, operation, line)) for dimension, factor in watch.factors.items())
            continue
        except TargetUnsupported:
            # Tracing can fail for symbolic sizes but work for constant ones, for example if a condition on sizes has no solution.
            if not sizes.units:
                break
            sizes.fix(sizes.units)
            continue
        attempts, written = attempts + 1, literal_inputs(program)
        numbers = {item.answer: item.line for item in reversed(questions) if item.is_number and item.line} | numbers
        reader = Reader(program, inputs, variables, target, flat.returns, written, questions, sizes, gradients)
        non_polynomial = reader.non_polynomial_symbols()
        constants = sizes.with_same_name(dimension for dimension, symbols in reader.symbols_at.items() if not symbols)
        if any(reader.symbols_at[dimension] for dimension in constants):
            # Torch has made the size constant in one dimension, for example because a loop runs over it.
            sizes.fix(constants)
            continue
        if not non_polynomial:
            # Decomposition takes longer than the export, so it runs only if all remaining symbolic sizes are supported.
            # Strides of windows are compared as torch writes them where sizes of images may not vary.
            by_node = windows_vary and not flat.is_below_autograd
            expanded = _expanded(program, target, is_below_autograd=flat.is_below_autograd, by_node=by_node)
            reader = Reader(expanded, inputs, variables, target, flat.returns, written, questions, sizes, gradients)
            non_polynomial = reader.non_polynomial_symbols()
        if not non_polynomial:
            return reader.read(), tuple(_size_notes(inputs, reader, sizes, numbers, text))
        if not flat.equal and (equal := sizes.same_names()):
            # A division such as ``(B * T * V) // V`` can be a polynomial once torch knows that two tensors have the same size.
            flat.equal = equal
            continue
        sizes.divide(
            (dimension, non_polynomial[symbol])
            for dimension, symbols in reader.symbols_at.items()
            for symbol in symbols & non_polynomial.keys()
        )
    sizes.fix_all()
    program, questions = _export(flat, inputs, sizes, target)
    written, program = literal_inputs(program), _expanded(program, target, is_below_autograd=flat.is_below_autograd)
    return Reader(program, inputs, variables, target, flat.returns, written, questions, sizes, gradients).read(), (
        "the graph is valid only for the sizes of the workload",
    )


def _size_notes(
    inputs: Sequence[InputTensor],
    reader: Reader,
    sizes: FreeSizes,
    numbers: Mapping[int | float, int],
    text: Sequence[str],
) -> Iterator[str]:
    """Notes on named sizes that are restricted in the graph. Sizes of 0 or 1 get no note: they are always specialised.

    Args:
        numbers: sizes that the target made plain numbers, as ``math.sqrt(n)`` does, and the lines where it did.
    """
    reported: set[str] = set()
    for i, item in enumerate(inputs):
        for d, name in enumerate(item.size_names):
            value, unit = int(item.value.shape[d]), sizes.units.get((i, d), 1)
            if not name or name in reported or value < 2 or (reader.symbols_at[i, d] and unit == 1):
                continue
            if reader.symbols_at[i, d] and Size.parse(name).divide_exactly(unit) is not None:
                # Such as 4*B, which is always a multiple of 4.
                continue
            reported.add(name)
            lines = (sizes.causes[dimension] for dimension in sizes.causes if sizes.name(dimension) == name)
            line = next(filter(None, lines), 0) or numbers.get(value, 0)
            why = (
                f"of line {line}: `{text[line - 1].strip()}`"
                if 0 < line <= len(text)
                else "torch traced the target for this value only"
            )
            rest = f" plus {value % unit}" if value % unit else ""
            limit = f"must be a multiple of {unit}{rest}" if reader.symbols_at[i, d] else f"is fixed at {value}"
            yield f"{name} {limit}, because {why}"


def _expanded(program: Any, target: Target, *, is_below_autograd: bool, by_node: bool = False) -> Any:
    """Decompose an exported program into functional operators, and some operators into simpler ones.

    Args:
        by_node: whether large graphs may be decomposed node by node.
    """
    with _recording_lines(target.path), torch.no_grad():
        try:
            remove_dead_traces(program.graph)
            table = decompositions() | (backward_decompositions() if is_below_autograd else {})
            expanded = decomposed(program, table) if by_node else None
            expanded = expanded or program.run_decompositions(table)
            split_complex_values(expanded.graph)
            return expanded
        except Exception as error:
            raise export_error(error, target) from error


def _export(
    flat: _FlatTarget,
    inputs: Sequence[InputTensor],
    sizes: FreeSizes,
    target: Target,
    watch: Watch | None = None,
) -> tuple[Any, list[Question]]:
    """Export the target with torch. Returns the program, and the size questions that were asked during the trace.

    Raises:
        NonPolynomialSize: ``watch`` stopped the export.
        TargetUnsupported: the target cannot be traced with these sizes fixed and all others symbolic.
    """
    # On a GPU, the sizes of parameters are constants in the kernels. The interpreter needs them symbolic, to use smaller ones.
    free_parameters = all(item.value.device.type == "cpu" for item in inputs)
    has_names = any(name for item in inputs for name in item.size_names)

    def is_static(i: int, d: int) -> bool:
        item = inputs[i]
        # If the workload names some sizes, the sizes that it states as numbers are constants.
        literal = has_names and d < len(item.size_names) and not item.size_names[d]
        return (item.kind is not InputKind.ARGUMENT and not free_parameters) or literal

    shapes = tuple(
        {d: Dim.STATIC if is_static(i, d) else sizes.dim((i, d)) for d in range(item.value.dim())}
        for i, item in enumerate(inputs)
    )
    tensors = tuple(item.value for item in inputs)
    with _recording_lines(target.path, watch), recording_questions(target.path) as questions, torch.no_grad():
        try:
            return _traced(flat, tensors, shapes), questions
        except Exception as error:
            if watch is not None and watch.factors:
                # Torch may have wrapped the exception.
                raise NonPolynomialSize from error
            raise export_error(error, target) from error


def _traced(flat: _FlatTarget, tensors: tuple[torch.Tensor, ...], shapes: Any) -> Any:
    module = _Module(flat)
    if not flat.is_below_autograd:
        try:
            return export(module, tensors, dynamic_shapes=(shapes,), strict=False)
        except Exception as error:
            if not any(isinstance(cause, AboveAutograd) for cause in exception_chain(error)):
                raise
            flat.is_below_autograd = True
    forms = SingleAttention() if flat.gradients is None else GradientForms(follows_selections=flat.follows_selections)
    try:
        with forms:
            return _export_with(module, tensors, dynamic_shapes=(shapes,), strict=False, pre_dispatch=False)
    except Exception as error:
        if not any(isinstance(cause, UnknownSize) for cause in exception_chain(error)):
            raise
    flat.follows_selections = False
    return _traced(flat, tensors, shapes)


def export_error(error: Exception, target: Target) -> MtmcError:
    """The error for the user when torch cannot trace the target, with the innermost line of the user's file."""
    if isinstance(error, MtmcError):
        return error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == target.path]
    line = frames[-1].lineno if frames and frames[-1].lineno else target.start_line
    causes = list(exception_chain(error))
    if any(isinstance(cause, DATA_DEPENDENT) for cause in causes):
        every = (frame for cause in causes for frame in traceback.extract_tb(cause.__traceback__))
        is_check = any(Path(frame.filename).parent == DISTRIBUTIONS for frame in every)
        is_assertion = bool(frames) and (frames[-1].line or "").startswith("assert")
        remedy = WITHOUT_ASSERTION if is_assertion else ""
        return depends_on_values(target, line, WITHOUT_CHECKS if is_check else remedy)
    operator = next((cause.func for cause in causes if isinstance(cause, UnsupportedOperatorException)), None)
    problem = f"calls {operator}, which torch.export cannot trace" if operator else "cannot be traced by torch.export"
    reason = "" if operator else first_sentence(str(error))
    return TargetUnsupported(
        f"{target.qualname} {problem}{f': {reason}' if reason else ''}",
        where=Location(target.path, line),
        remedy="Move the code of this line into a separate function, and optimise the function without it.",
    )


def first_sentence(text: str) -> str:
    """The first sentence of an exception's message, at most ``LONGEST_REASON`` characters, without the final period.

    The rest of torch's messages is advice for PyTorch developers: where to report the error, which log to enable.
    """
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"[.!?](?= |$)", paragraph)[0]
    return sentence if len(sentence) <= LONGEST_REASON else f"{sentence[:LONGEST_REASON].rstrip()} ..."
