"""The guard's conditions on run-time numbers: only their types matter."""

from __future__ import annotations

from collections.abc import Iterator

from mtmc_lsp.codegen.kernel.snippets import call_text
from mtmc_lsp.codegen.module.guard_helpers import HAVE_NUMBER_TYPES
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import rename_symbols
from mtmc_lsp.ir.run_time_numbers import numbers_of


def number_conditions(graph: Graph) -> Iterator[str]:
    """Conditions under which the kernels compute with the numbers among the arguments as the target does."""
    for item in graph.numbers:
        if isinstance(item.value, int):
            # Torch raises an error for larger integers.
            yield f"type({item.access}) is int and {item.access}.bit_length() < 64"
        else:
            yield f"type({item.access}) is float"
    accesses = {item.name: item.access for item in graph.numbers}
    derived = [number for number in numbers_of(graph) if number.may_fail]
    if derived:
        # The target's own code raises the error, or computes with a number of another type.
        texts = [rename_symbols(number.text, accesses) for number in derived]
        computed = f"lambda: ({', '.join(texts)}{',' if len(texts) == 1 else ''})"
        yield call_text(HAVE_NUMBER_TYPES, [computed, *(number.kind for number in derived)], "        ")
