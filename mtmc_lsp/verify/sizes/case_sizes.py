"""The sizes of cases: small enough to run often, and within the graph's conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Graph, Node
from mtmc_lsp.core.sizes import Size, conditions_hold, names_in
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.sizes.interpreter_limits import (
    INTERPRETER_ELEMENTS,
    INTERPRETER_PRODUCT,
    VIEWS,
    interpreted_elements,
    product_work,
    too_large,
)

FIXED_SLACK = 30.0
"""Factor on the element limit if sizes cannot be reduced further."""
FIXED_PRODUCT_SLACK = 100.0
"""The same for multiply-adds; it is larger because matrix kernels have large tiles and few program instances."""
VERSION_SLACK, VERSION_PRODUCT_SLACK = 250.0, 1000.0
"""The same for versions of the user's file, which cannot run with smaller parameters. Programs of large tensors have large
blocks: 63 operations on 57 million elements took about 20 s of processor time a step."""
LARGE_PART = 4
"""An input with this part of all work is what makes a workload too large."""
LEAST_OTHER = 3
"""Lower limit for sizes that become smaller because others became larger."""
LEAST, FEWEST = 4, 2
"""Lower limits for a reduced size."""
EDGE_SLACK = 4.0
"""Factor on the element limit for one long dimension: the interpreter computes a row at once."""
LEAST_ROWS = 32
"""Some matrix kernels fall back to the user's code for products with fewer rows."""
VALUES_ELEMENTS = 1 << 24
"""Above this number of elements in the graph's tensors, a GPU tries distributions of values on smaller sizes."""
LARGER_ELEMENTS = 1 << 30
"""Of versions whose tensors, also intermediate ones, have more elements, one case has the workload's sizes: each takes seconds in
float64. The versions' kernels are ours, so sizes with several blocks and chunks show what larger ones do."""
LARGE_ELEMENTS = 1 << 29
"""The elements of the other cases of such workloads."""
LEAST_PART = 130
"""Lower limit for these smaller sizes: more than one block of any kernel."""
LOOP_OPERATIONS = 2000
"""Limit for the operations of all iterations of the user's loops in most cases, on a GPU too: each is a launch of about 10 us,
about three times as much in float64, and each case runs the loop three times or more."""
SLOW_LOOP = 20_000
"""Operations of the user's loops in a call, each a launch of 5 to 10 us, from which on a call is slow."""
NETWORK_OPERATIONS = 50
"""Operations from which on a graph is a network: the host bounds most of its runs, and those in float64 take several times as
long (12 layers of BERT: 250 operations, 0.04 and 0.1 s on a busy core)."""
FEWEST_LONG = 8
"""Lower limit for the other sizes where the longest stays as it is."""
MOST_RAISED = 256
"""Limit for the search of the smallest allowed sizes."""


def raised_sizes(graph: Graph, sizes: Mapping[str, int], variable: Sequence[str]) -> dict[str, int]:
    """The sizes, each enlarged in steps of one until the graph's conditions hold."""
    raised = dict(sizes)
    for _ in range(MOST_RAISED):
        failing = next((text for text in graph.conditions if not conditions_hold([text], raised)), None)
        if failing is None:
            return raised
        raised |= {name: raised[name] + 1 for name in names_in(failing) & set(variable)}
    return dict(sizes)


def first_allowed(graph: Graph, choices: Iterable[dict[str, int]]) -> dict[str, int]:
    """The first sizes that the graph's conditions allow; the last ones if none do."""
    sizes: dict[str, int] = {}
    for sizes in choices:
        if conditions_allow(graph, sizes):
            break
    return sizes


def conditions_allow(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether the graph is valid for these sizes."""
    return conditions_hold(graph.conditions, sizes)


def is_small_enough(graph: Graph, sizes: Mapping[str, int], *, interpreted: bool) -> bool:
    """Whether a case of these sizes is allowed, and is quick enough that there may be many."""
    if not conditions_allow(graph, sizes):
        return False
    return not too_large(graph, sizes, EDGE_SLACK) if interpreted else elements_of(graph, sizes) <= VALUES_ELEMENTS


def is_larger(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether each run of the user's code in float64 takes seconds and much of the GPU's memory."""
    return elements_of(graph, sizes) > LARGER_ELEMENTS


def smaller_sizes(
    graph: Graph,
    base: Mapping[str, int],
    variable: Sequence[str],
    most: int = VALUES_ELEMENTS,
    least: int = LEAST_PART,
) -> dict[str, int]:
    """Variable sizes, the largest halved repeatedly until all tensors have ``most`` elements; none below ``least``."""
    sizes = dict(base)
    while elements_of(graph, sizes) > most:
        largest = max(variable, key=lambda name: sizes[name])
        if sizes[largest] <= least:
            break
        sizes[largest] = max(least, math.ceil(sizes[largest] / 2))
    return sizes


def sizes_with_longest(graph: Graph, base: Mapping[str, int], variable: Sequence[str]) -> dict[str, int] | None:
    """Sizes for :data:`LARGE_ELEMENTS` with the longest of ``base``, as that of a vocabulary; None if there are none."""
    longest = max(variable, key=lambda name: base[name])
    others = [name for name in variable if name != longest]
    sizes = dict(base)
    for least in (LEAST_PART, FEWEST_LONG) if others else ():
        sizes = smaller_sizes(graph, sizes, others, LARGE_ELEMENTS, least)
    return sizes if elements_of(graph, sizes) <= LARGE_ELEMENTS else None


def with_short_loops(graph: Graph, base: Mapping[str, int], variable: Sequence[str]) -> dict[str, int]:
    """The sizes, those that count iterations halved until loops are short; never below two tiles."""
    sizes = dict(base)
    reducible = set(_loop_counts(graph)) & set(variable)
    while reducible and loop_operations(graph, sizes) > LOOP_OPERATIONS:
        longest = max(sorted(reducible), key=lambda name: sizes[name])
        smaller = {**sizes, longest: max(LEAST_PART, math.ceil(sizes[longest] / 2))}
        if sizes[longest] > LEAST_PART and conditions_allow(graph, smaller):
            sizes = smaller
        else:
            reducible.remove(longest)
    return sizes


def increased_sizes(graph: Graph, base: Mapping[str, int], variable: Sequence[str]) -> dict[str, int]:
    """The variable sizes, a quarter larger. Those that count the iterations of a slow loop are only larger by a few tiles."""
    counts = _loop_counts(graph) if loop_operations(graph, base) >= SLOW_LOOP else frozenset()
    return {
        name: base[name] + (min(LEAST_PART, base[name] // 4) if name in counts else base[name] // 4)
        for name in variable
    }


def _loop_counts(graph: Graph) -> frozenset[str]:
    """The sizes that count iterations."""
    return frozenset(name for node in graph.nodes if node.loop is not None for name in node.loop.count.symbols())


def loop_operations(graph: Graph, sizes: Mapping[str, int]) -> int:
    """The number of operations in all iterations of the user's loops."""
    loops = [node.loop for node in graph.nodes if node.loop is not None]
    return sum(loop.count.value(sizes) * len(loop.nodes) for loop in loops)


def iterated_work(graph: Graph, sizes: Mapping[str, int]) -> tuple[float, float]:
    """The multiply-adds and the elements of all iterations of the user's loops."""
    products = elements = 0.0
    for loop in (node.loop for node in graph.nodes if node.loop is not None):
        count = loop.count.value(sizes)
        products += count * product_work(loop.body(graph), sizes)
        elements += count * sum(kind.numel.value(sizes) for node in loop.nodes for kind in node.outputs)
    return products, elements


def iterated_bytes(graph: Graph, sizes: Mapping[str, int]) -> float:
    """The least bytes that all iterations of the user's loops move in eager mode.

    An operation writes its results, and most read as many bytes. Views move none, and a write of a part is not counted: its
    result is the whole tensor in the graph.
    """
    moved = 0.0
    for loop in (node.loop for node in graph.nodes if node.loop is not None):
        names = [(node.op.split(".")[1], node) for node in loop.nodes]
        moving = [
            node for name, node in names if name not in VIEWS and "scatter" not in name and "index_put" not in name
        ]
        kinds = [kind for node in moving for kind in node.outputs]
        moved += loop.count.value(sizes) * sum(kind.numel.value(sizes) * itemsize(kind.dtype) for kind in kinds)
    return 2.0 * moved


def has_long_loop(graph: Graph) -> bool:
    """Whether the user's loops have more operations than most cases may have; ``torch.compile`` unrolls them, for minutes."""
    return loop_operations(graph, graph.sizes) > LOOP_OPERATIONS


def has_slow_loop(graph: Graph) -> bool:
    """Whether a call at the workload's sizes is a long loop of launches."""
    return loop_operations(graph, graph.sizes) >= SLOW_LOOP


def is_network(graph: Graph) -> bool:
    """Whether the number of operations alone makes each run of the user's code slow, at any size."""
    return len(graph.nodes) >= NETWORK_OPERATIONS


def has_more_iterations(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Whether the user's loops have more operations than in the workload and than :data:`LOOP_OPERATIONS`."""
    return loop_operations(graph, sizes) > max(LOOP_OPERATIONS, loop_operations(graph, graph.sizes))


def elements_of(graph: Graph, sizes: Mapping[str, int]) -> int:
    """The number of elements of all tensors of the graph."""
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    return sum(kind.numel.value(sizes) for kind in kinds)


def reduced_sizes(capture: Capture, *, least: int = LEAST, part: float = 1.0) -> dict[str, int]:
    """The workload's sizes, the largest variable one halved repeatedly until the interpreter can run them.

    Matrix products keep at least :data:`LEAST_ROWS` rows if they have as many, since their kernels may require that. Sizes go
    below :data:`LEAST` where calls would still take minutes, for example because images have constant sizes.

    Args:
        least: lower limit for each size.
        part: share of the interpreter's limits to use.
    """
    sizes = _reduced(capture, least, part)
    if least > FEWEST and too_large(capture.graph, sizes, FIXED_SLACK):
        return _reduced(capture, FEWEST, part)
    return sizes


def _reduced(capture: Capture, least: int, part: float) -> dict[str, int]:
    graph = capture.graph
    sizes = dict(graph.sizes)
    rows = _product_rows(graph, sizes)
    reducible = set(capture.variable_sizes)
    while reducible and too_large(graph, sizes, part):
        largest = max(sorted(reducible), key=lambda name: sizes[name])
        smaller = {**sizes, largest: max(least, math.ceil(sizes[largest] / 2))}
        row_counts = zip(rows, _product_rows(graph, smaller), strict=True)
        has_rows = all(now >= LEAST_ROWS or before < LEAST_ROWS for before, now in row_counts)
        # A size that the graph depends on, as `D == 1024 - D`, stays.
        is_allowed = conditions_allow(graph, smaller) or not conditions_allow(graph, sizes)
        if sizes[largest] > least and has_rows and is_allowed:
            sizes = smaller
        else:
            reducible.remove(largest)
    return sizes


def with_rows(graph: Graph, base: Mapping[str, int], changed: Mapping[str, int]) -> dict[str, int]:
    """``base`` with some sizes changed, then enlarged until the matrix products have enough rows again.

    If that takes more elements than ``base``, the other sizes become smaller.
    """
    sizes, raised = {**base, **changed}, set[str]()
    wanted = [min(rows, LEAST_ROWS) for rows in _product_rows(graph, base)]
    for name in changed:
        while True:
            larger = {**sizes, name: 2 * sizes[name] + 1}
            now, then = _product_rows(graph, sizes), _product_rows(graph, larger)
            # Enlarging this size must help at least one product that lacks rows.
            if not any(rows < least and rows < more for rows, more, least in zip(now, then, wanted, strict=True)):
                break
            sizes = larger
            raised.add(name)
    others = [name for name in changed if name not in raised and sizes[name] > LEAST_OTHER] if raised else []
    while others and elements_of(graph, sizes) > elements_of(graph, base):
        largest = max(others, key=lambda name: sizes[name])
        smaller = {**sizes, largest: max(LEAST_OTHER, sizes[largest] // 2 | 1)}
        if smaller == sizes or _product_rows(graph, smaller) != _product_rows(graph, sizes):
            others.remove(largest)
        else:
            sizes = smaller
    return sizes


def _product_rows(graph: Graph, sizes: Mapping[str, int]) -> list[int]:
    """The number of rows of each matrix product, in each batch if both operands are batched."""
    products = [node for node in graph.nodes if node.op.split(".")[1] in MATRIX_PRODUCTS and node.outputs]
    return [math.prod(size.value(sizes) for size in _row_shape(graph, node)) for node in products]


def _row_shape(graph: Graph, product: Node) -> tuple[Size, ...]:
    is_batched = all(len(graph.type_of(ref).shape) > 2 for ref in list(product.inputs())[-2:])
    return product.type.shape[-2:-1] if is_batched else product.type.shape[:-1]


def is_interpretable(capture: Capture, *, is_version: bool = False) -> bool:
    """Whether the interpreter can run the target in reasonable time with reduced variable sizes.

    Args:
        is_version: whether a version of the user's file is verified, which cannot run with smaller parameters.
    """
    sizes = reduced_sizes(capture)
    slack = VERSION_SLACK if is_version else FIXED_SLACK
    product_slack = VERSION_PRODUCT_SLACK if is_version else FIXED_PRODUCT_SLACK
    return not too_large(capture.graph, sizes, slack, product_slack)


def why_not_interpretable(capture: Capture) -> str:
    """The reason why the smallest sizes are too large for the interpreter: ``x has 6,422,528 elements``."""
    graph, sizes = capture.graph, reduced_sizes(capture)
    elements = interpreted_elements(graph, sizes)
    products, work = product_work(graph, sizes), sum(elements.values())
    if products / (FIXED_PRODUCT_SLACK * INTERPRETER_PRODUCT) > work / (FIXED_SLACK * INTERPRETER_ELEMENTS):
        return f"its matrix products have {products:,.0f} multiply-adds"
    largest = max(graph.inputs, key=lambda item: elements.get(item.name, 0.0), default=None)
    if largest is not None and elements.get(largest.name, 0.0) >= work / LARGE_PART:
        return f"{largest.access} has {largest.type.numel.value(sizes):,} elements"
    return (
        f"its results have {sum(kind.numel.value(sizes) for node in graph.nodes for kind in node.outputs):,} elements"
    )
