"""What the kernels of all loops share: the rows that iterations read and write, the number of the iteration, and results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, SUM, TRITON_DTYPES, Code, literal
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import Node, Ref, TensorType
from mtmc_lsp.core.loop import LoopInput, Position
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.loops.form import LoopForm, row_type
from mtmc_lsp.ir.primitives import KernelIR

COPY = re.compile(r"[A-Za-z_]\w* = [A-Za-z_]\w*")
Move = tuple[str, Position, Size]
"""A pointer that moves from row to row, with the stride of the rows."""


def row_buffers(form: LoopForm, types: Sequence[TensorType]) -> dict[str, TensorType]:
    """The inputs of the body in memory: rows of the node's arguments, or all of them.

    Args:
        types: of the node's arguments.
    """
    return {
        form.prim(item): row_type(types[item.argument], item.position.dim) if item.position else types[item.argument]
        for item in form.loop.inputs
        if item.argument is not None
    }


def of_graph(kernel: Kernel, form: LoopForm, sources: Sequence[str]) -> Kernel:
    """A kernel of the body as one of the graph, where ``sources`` are the primitives of the loop's arguments."""
    arguments = {form.prim(item): item.argument for item in form.loop.inputs if item.argument is not None}
    return replace(
        kernel,
        tensors=tuple((pointer, sources[arguments[prim]]) for pointer, prim in kernel.tensors),
        outputs=tuple((pointer, form.results[ref.index]) for pointer, ref in kernel.outputs),
    )


def sources_of(ir: KernelIR, node: Node) -> list[str]:
    """The primitives that a loop's kernels read. Views in a region may cancel, so these need not be the region's inputs."""
    return [ir.of(ref).name for ref in node.args if isinstance(ref, Ref)]


def count_text(form: LoopForm, parameters: Parameters) -> str:
    """The number of iterations as a parameter."""
    count = form.loop.count
    parameters.name_size(count, str(count) if count.is_symbol else "n_steps")
    return parameters.size(count).text


def stride_text(parameters: Parameters, stride: Size, step: int) -> str:
    """The elements between the rows of two iterations. They may exceed 32 bits: the launcher computes products."""
    text = parameters.divisor(stride if step == 1 else stride * abs(step))
    return text if step > 0 else f"-{text}"


def index_code(parameters: Parameters, step: str, at: Position) -> Code:
    """The number of the iteration as the body sees it.

    Args:
        step: the variable that counts iterations.
    """
    text = f"tl.cast({step}, tl.int64){'' if at.step == 1 else f' * {at.step}'}"
    if not at.first.terms:
        return Code(text, "int64", precedence=PRODUCT)
    return Code(f"{text} + {parameters.size(at.first).at(SUM)}", "int64", precedence=SUM)


def axes_from(form: LoopForm, item: LoopInput) -> str:
    """The primitive whose axes an input has: its value after the iteration if the body does not read it."""
    prim = form.prim(item)
    return prim if prim in form.region.inputs or item.next is None else form.ir.of(item.next).name


def initial_text(number: float, dtype: str, shape: str) -> str:
    """A state that has the same number in all elements before the first iteration."""
    value = float(number) if is_float(dtype) else bool(number) if dtype == "bool" else int(number)
    return f"tl.full({shape}, {literal(value)}, {TRITON_DTYPES[dtype]})"


def loop_lines(
    parameters: Parameters, moves: Sequence[Move], step: str, count: str, stages: int, inside: Sequence[str]
) -> list[str]:
    """The loop over iterations, and before it the statements that move pointers to the rows of the first one."""
    inside = with_states_in_place(inside)
    starts = [(pointer, start) for pointer, at, stride in moves if (start := at.first * stride).terms]
    ahead = f", num_stages={stages}" if stages > 1 else ""
    return [
        *(f"{pointer} += {parameters.divisor(start)}" for pointer, start in starts),
        f"for {step} in tl.range(0, {count}{ahead}):",
        *(f"    {line}" for line in inside),
    ]


def with_states_in_place(lines: Sequence[str]) -> list[str]:
    """The statements of an iteration, without copies into states that no later statement reads.

    ``h_2 = a * h`` and at the end ``h = h_2`` become ``h = a * h``.
    """
    lines = [*lines]
    for copy in [line for line in lines if COPY.fullmatch(line)]:
        state, _, following = copy.partition(" = ")
        first = next((i for i, line in enumerate(lines) if line.startswith(f"{following} = ")), None)
        last = lines.index(copy)
        if first is None or first > last:
            continue
        names = [re.findall(r"\w+", line) for line in lines]
        is_read_later = any(state in words for words in [*names[first + 1 : last], *names[last + 1 :]])
        is_set_again = sum(words[:1] in ([following], [state]) for words in names) > 2
        if is_read_later or is_set_again:
            continue
        del lines[last]
        # Neither an attribute, as in tl.where, nor the name of an argument, as in mask=...
        variable = rf"(?<![\w.]){following}\b(?!=[^=])"
        lines = [re.sub(variable, state, line) for line in lines]
    return lines


def row_strides(kind: TensorType, position: Position, rank: int) -> tuple[Size, ...]:
    """The strides of a row with ``rank`` dimensions in a result of type ``kind``."""
    if rank == len(kind.stride):
        return kind.stride
    return (*kind.stride[: position.dim], *kind.stride[position.dim + 1 :])


def result_name(form: LoopForm, number: int) -> str:
    """The pointer to a result: named like the value in the body, unless the node has a name."""
    output, node = form.loop.outputs[number], form.node
    name = node.variable if len(node.outputs) == 1 else ""
    if not name:
        value = form.ir.graph.named.get(output.value.name)
        name = value.variable if value is not None and value.variable else "out"
        name = f"last_{name}" if output.position is None else name
    return f"{name}_ptr"


def result_pointer(form: LoopForm, parameters: Parameters, number: int) -> str:
    """The parameter for a result of the loop."""
    return parameters.output(Ref(form.node.name, number), result_name(form, number))
