"""The work of a call under Triton's interpreter, and its limits."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.graph import MATRIX_PRODUCTS, RECURRENT_GATES, Graph, InputKind, Ref
from mtmc_lsp.core.sizes import Size, product

INTERPRETER_ELEMENTS = 60_000
"""Limit for the elements of all inputs of an interpreted call, which takes about one second."""
INTERPRETER_PRODUCT = 2.0e6
"""Limit for the multiply-adds of an interpreted call."""
VIEWS = frozenset(
    "expand view permute transpose t unsqueeze squeeze select slice alias detach _unsafe_view split unsafe_split chunk "
    "split_with_sizes unbind unfold as_strided".split()
)
"""Operations that return views."""
LOOKUPS = frozenset("embedding index _unsafe_index index_select gather".split())
"""Operations that read their first argument at indices."""
TABLE_PART = 1 / 32
"""Work for an element of a table: it gets a random value, and no kernel loads it."""


def too_large(graph: Graph, sizes: Mapping[str, int], slack: float = 1.0, product_slack: float = 0.0) -> bool:
    """Whether a call of these sizes takes too long in the interpreter.

    Args:
        slack: factor on the limit of elements.
        product_slack: factor on the limit of multiply-adds; by default ``slack``.
    """
    too_many = sum(interpreted_elements(graph, sizes).values()) > slack * INTERPRETER_ELEMENTS
    return too_many or product_work(graph, sizes) > (product_slack or slack) * INTERPRETER_PRODUCT


def interpreted_elements(graph: Graph, sizes: Mapping[str, int]) -> dict[str, float]:
    """How many elements each input and each result adds to the work of an interpreted call, by name.

    Views are computed by no kernel. Of a table, kernels read the rows that indices choose, so the table is only to be created.
    """
    variable = set(sizes)
    elements = {
        item.name: item.type.numel.value(sizes) * (TABLE_PART if _is_table(graph, item.name) else 1.0)
        for item in graph.inputs
        if item.kind is InputKind.ARGUMENT or set(_names(item.type.shape)) & variable
    }
    for node in graph.nodes:
        if node.op.split(".")[1] not in VIEWS:
            elements[node.name] = sum(kind.numel.value(sizes) for kind in node.outputs) / 4
    return elements


def _is_table(graph: Graph, name: str) -> bool:
    """Whether an input is only read at indices."""
    readers = graph.readers(name)
    is_written = any(mutation.input == name for mutation in graph.mutations)
    return (
        bool(readers)
        and not is_written
        and all(node.op.split(".")[1] in LOOKUPS and node.args[0] == Ref(name) for node in readers)
    )


def product_work(graph: Graph, sizes: Mapping[str, int]) -> float:
    """The multiply-adds of the graph's matrix products."""
    total = 0.0
    for node in graph.nodes:
        name = node.op.split(".")[1]
        operands = [graph.type_of(ref) for ref in node.inputs()]
        computed = float(node.type.numel.value(sizes)) if node.outputs else 0.0
        if name in MATRIX_PRODUCTS:
            total += computed * operands[MATRIX_PRODUCTS[name]].shape[-1].value(sizes)
        elif name == "scaled_dot_product_attention":
            # Two products, each over the length of the keys.
            total += 2 * computed * operands[1].shape[-2].value(sizes)
        elif name in RECURRENT_GATES and len(node.outputs) > 1:
            # At each step every row of the batch is multiplied by every weight.
            rows = product(operands[0].shape[:2]).value(sizes)
            total += rows * sum(kind.numel.value(sizes) for kind in operands if len(kind.shape) == 2)
    return total


def _names(shape: tuple[Size, ...]) -> list[str]:
    return [name for size in shape for name in size.symbols()]
