"""Cases at the edges of a foreign candidate: sizes next to the numbers in its text, other layouts, and telling values.

A kernel that is wrong beyond some size has that size, or a block size, in its text.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mtmc_lsp.capture.index_bounds import index_bounds
from mtmc_lsp.core.dtypes import is_float, itemsize
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, InputKind, Node
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import (
    AT_BLOCKS,
    EXPANDED,
    EXPANDED_COLUMNS,
    NEAR,
    PACKED,
    PEAKS,
    PEAKS_DOWN,
    PEAKS_EVERYWHERE,
    RARE_LARGE,
    SLICED,
    STEPPED,
    TRANSPOSED,
    UNALIGNED,
    VALUES,
    WITHIN,
    Case,
    argument_elements,
)
from mtmc_lsp.verify.sizes.case_sizes import conditions_allow, is_small_enough, raised_sizes, reduced_sizes
from mtmc_lsp.verify.sizes.interpreter_limits import product_work

MOST_SIZES = 24
"""Limit for the cases with sizes from the text."""
FILLING = frozenset(("where", "load", "full", "masked_fill"))
"""Functions that replace values by a number."""
MOST_SMALL = 3
"""Limit for the thresholds below which all values are in one case."""
MOST_THRESHOLDS, LARGEST_VALUE = 12, 1e6
"""Limits for the thresholds that a case uses: their number, and the largest one."""
MOST_VALUES = 8
"""Limit for the values of one name or expression; the largest count."""
LONG_ROW = 8195
"""A length of rows that is tried whatever the text: numbers of 8 bits, or float16 and bfloat16, cannot count to it."""
LIMITING = frozenset(("min", "max", "minimum", "maximum", "clamp"))
"""Functions whose arguments are limits."""
LEAST, LARGEST = 4, 1 << 17
"""Smaller numbers in the text are sizes that are tried anyway, and larger ones take too long."""
LEAST_LONG, LARGEST_LONG, MOST_LONG = 1 << 14, 1 << 23, 2
"""Numbers from the first to the second become the length of one dimension; at most two numbers do."""
MOST_PEAKS, LONG_COLUMN = 10, 1025
"""Limits for the cases with peaks, and for the length of dimensions other than the last in them."""
FEW_LINES = 4
"""The other sizes, where each line has its extremes elsewhere."""
MOST_BLOCKS, LARGEST_BLOCK = 4, 1 << 14
"""Limits for the numbers in the text that may be sizes of blocks: their count, and the largest one."""
ATTENTION = "scaled_dot_product_attention"
REDUCING = frozenset(
    "sum mean amax amin aminmax max min argmax argmin prod var std var_mean std_mean norm linalg_vector_norm logsumexp softmax "
    "log_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort topk kthvalue median mode any all count_nonzero "
    "native_layer_norm layer_norm native_group_norm group_norm rms_norm instance_norm dot mv scaled_dot_product_attention "
    "nll_loss cross_entropy_loss mse_loss l1_loss smooth_l1_loss kl_div binary_cross_entropy cosine_similarity".split()
)
"""ATen operations by which one element depends on many."""
EXTREMES = frozenset(
    "amax amin aminmax max min argmax argmin cummax cummin sort argsort topk kthvalue median mode".split()
)
"""Operations whose result depends on one element: a kernel that leaves out another element gives the same result."""
MOST_POSITIONS = 1024
"""Limit for the positions of extremes in a line that are tried."""
SMALL_SIZE = 3
"""The other sizes of a case, where all cannot be as large as the number in the text."""
DISTRIBUTIONS = ("offset", "low", "ties", "zero rows", "extreme", "negative")
"""A mean far above the spread, and far below 0; many equal values, rows of zeros, large values, and negative values only."""
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}
"""How constant expressions are computed."""


def edge_cases(capture: Capture, text: str, model: Case, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
    """Further cases for a foreign candidate.

    Args:
        text: the candidate's file.
        model: a case of small sizes, for layouts and values.
        interpreted: whether Triton's interpreter runs the kernels.
        seed: of the first case.
    """
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    cases = [
        replace(model, sizes=sizes, distribution="normal", may_be_refused=exceeds_workload(capture, sizes))
        for sizes in _sizes(capture, text, interpreted=interpreted)
    ]
    indices = index_bounds(capture.graph)
    if any(item.type.dtype != "bool" and item.name not in indices for item in arguments):
        cases += _reduction_cases(capture, text, model, interpreted=interpreted)
    if any(is_float(item.type.dtype) for item in arguments):
        cases += [replace(model, distribution=name) for name in DISTRIBUTIONS]
        if thresholds := thresholds_in(text):
            cases.append(replace(model, distribution=NEAR + ", ".join(map(repr, thresholds))))
            small = [number for number in thresholds if number < 1][-MOST_SMALL:]
            cases += [replace(model, distribution=f"{WITHIN}{number!r}") for number in small]
    # Elements that share memory cannot be written.
    written = {mutation.input for mutation in capture.graph.mutations} & {item.name for item in arguments}
    cases += [
        replace(model, distribution="normal", layout=name)
        for name in (SLICED, PACKED, TRANSPOSED, STEPPED, UNALIGNED, *(() if written else (EXPANDED, EXPANDED_COLUMNS)))
    ]
    return tuple(replace(case, kind=VALUES, seed=seed + i) for i, case in enumerate(cases))


def reduces(capture: Capture) -> bool:
    """Whether elements of the reference's results depend on many elements of its arguments."""
    return bool(_reducing_nodes(capture))


def _reducing_nodes(capture: Capture) -> list[Node]:
    """Float32 products are left out: there an element that is missing shows with any values."""
    names = {*REDUCING, *(MATRIX_PRODUCTS if _has_16_bits(capture) else ())}
    return [node for node in capture.graph.nodes if _operation(node) in names and node.outputs]


def _reduced_names(capture: Capture, nodes: Iterable[Node]) -> list[str]:
    """The variable sizes that are lengths of reductions or scans."""
    names = set[str]()
    for node in nodes:
        shapes = [shape for ref in node.inputs() if (shape := capture.graph.type_of(ref).shape)]
        if not shapes:
            continue
        dropped = {name for shape in shapes for size in shape for name in size.symbols()}
        dropped -= {name for kind in node.outputs for size in kind.shape for name in size.symbols()}
        if _operation(node) == ATTENTION:
            # The length of the keys may have the same name as that of the queries.
            dropped |= set(shapes[1][-2].symbols())
        rank = len(shapes[0])
        dim = next((arg for arg in node.args[1:2] if isinstance(arg, int) and -rank <= arg < rank), -1)
        names |= dropped or set(shapes[0][dim].symbols())
    return [name for name in capture.variable_sizes if name in names and name in capture.graph.sizes]


def _operation(node: Node) -> str:
    return node.op.split(".")[1].strip("_")


def with_blocks(distribution: str, text: str) -> str:
    """A distribution with peaks also around the blocks of the sizes that the text names."""
    blocks = [number for number in numbers_in(text) if number <= LARGEST_BLOCK]
    return distribution + AT_BLOCKS + ", ".join(map(str, blocks[:MOST_BLOCKS])) if blocks else distribution


def _has_16_bits(capture: Capture) -> bool:
    kinds = (item.type.dtype for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT)
    return any(is_float(kind) and itemsize(kind) == 2 for kind in kinds)


def _reduction_cases(capture: Capture, text: str, model: Case, *, interpreted: bool) -> list[Case]:
    """Cases in which each element counts that a reduction or scan adds up, compares or sorts.

    Their lengths are the workload's, :data:`LONG_ROW`, and those from the text.
    """
    if not reduces(capture):
        return []
    graph, nodes = capture.graph, _reducing_nodes(capture)
    names, products = _reduced_names(capture, nodes), [node for node in nodes if _operation(node) in MATRIX_PRODUCTS]
    rows = {*_row_lengths(capture), *_reduced_names(capture, products)}
    # Another long dimension may need a program for each element.
    full = [(name, graph.sizes[name] if name in rows else min(graph.sizes[name], LONG_COLUMN)) for name in names]
    full += [(name, LONG_ROW) for name in names if name in rows and graph.sizes[name] < LONG_ROW // 2]
    numbers = [*compared_numbers_in(text)[:1], *numbers_in(text)[:MOST_BLOCKS]]
    edges = [(name, edge) for number in numbers for edge in (number + 1, 2 * number + 1) for name in names[-1:]]
    up, down = (with_blocks(name, text) for name in (PEAKS, PEAKS_DOWN))
    few = [RARE_LARGE] if _has_16_bits(capture) else []
    chosen = [(length, name) for length in full for name in (up, down, *few)]
    chosen += [(length, (up, down)[i % 2]) for i, length in enumerate(dict.fromkeys(edges)) if length not in full]
    cases = [
        replace(model, sizes=sizes, distribution=name, may_be_refused=exceeds_workload(capture, sizes))
        for length, name in chosen[: MOST_PEAKS + len(few)]
        if is_small_enough(graph, sizes := _with_long(capture, *length, FEW_LINES), interpreted=interpreted)
    ]
    cases = cases or [replace(model, distribution=name) for name in (up, down, *few)]
    if any(_operation(node) in EXTREMES for node in nodes):
        cases += _cases_with_peaks_everywhere(capture, model, names)
    return cases


def _cases_with_peaks_everywhere(capture: Capture, model: Case, names: Iterable[str]) -> list[Case]:
    """Cases with as many lines as a line has elements, each with its extremes elsewhere."""
    graph = capture.graph
    variable = [name for name in capture.variable_sizes if name in graph.sizes]
    cases = []
    for name in names:
        length, others = min(graph.sizes[name], MOST_POSITIONS), [other for other in variable if other != name][-1:]
        few = {**graph.sizes, **dict.fromkeys(variable, 1), **dict.fromkeys(others, length), name: length}
        sizes = raised_sizes(graph, few, variable)
        is_quick = argument_elements(capture, sizes) <= MOST_POSITIONS**2 and not product_work(graph, sizes)
        if is_quick and conditions_allow(graph, sizes):
            is_larger = exceeds_workload(capture, sizes)
            cases.append(replace(model, sizes=sizes, distribution=PEAKS_EVERYWHERE, may_be_refused=is_larger))
    return cases


def _with_long(capture: Capture, name: str, length: int, others: int) -> dict[str, int]:
    """The workload's fixed sizes, one long dimension, and few elements in the others."""
    graph = capture.graph
    variable = [name for name in capture.variable_sizes if name in graph.sizes]
    return raised_sizes(graph, {**graph.sizes, **dict.fromkeys(variable, others), name: length}, variable)


def numbers_in(text: str) -> list[int]:
    """The whole numbers in a text of Python that may be sizes, the largest first.

    Also the values of ``1 << 10``, ``4 * 256`` and ``4 * BLOCK``, if ``BLOCK`` is an argument or a variable with a constant.
    """
    return _sorted(_numbers(text, compared=False))


def compared_numbers_in(text: str) -> list[int]:
    """Those of them that the text compares with something, or takes a remainder, minimum or maximum with."""
    return _sorted(_numbers(text, compared=True))


def thresholds_in(text: str) -> list[float]:
    """The numbers that values are compared with or replaced by, the largest first: a candidate may be wrong beyond them."""
    expressions = _expressions(text)
    nodes = [part for node in expressions if _compares(node) or _name(node) in FILLING for part in ast.walk(node)]
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    numbers = {float(value) for value in values if isinstance(value, (int, float))}
    return sorted((number for number in numbers if 0 < number <= LARGEST_VALUE), reverse=True)[:MOST_THRESHOLDS]


def _sorted(values: set[int]) -> list[int]:
    return sorted((value for value in values if LEAST <= value <= LARGEST), reverse=True)


def long_sizes(capture: Capture, text: str) -> list[dict[str, int]]:
    """Sizes just above the largest numbers that the text compares, in one dimension, while the others are 1.

    They are for calls of which the interpreter runs a sample of the programs.
    """
    graph = capture.graph
    variable = [name for name in capture.variable_sizes if name in graph.sizes]
    numbers = sorted((n for n in _numbers(text, compared=True) if LEAST_LONG <= n <= LARGEST_LONG), reverse=True)
    short = {**graph.sizes, **dict.fromkeys(variable, 1)}
    return [
        raised_sizes(graph, {**short, name: number + 1}, variable)
        for number in numbers[:MOST_LONG]
        for name in dict.fromkeys((*variable[-1:], *variable[:1]))
    ]


def _numbers(text: str, *, compared: bool) -> set[int]:
    constants, nodes = _constants(_tree(text)), _expressions(text)
    if compared:
        nodes = [part for node in nodes if _compares(node) for part in ast.walk(node) if isinstance(part, ast.expr)]
    return {value for node in nodes for value in _values(node, constants)}


@functools.lru_cache(maxsize=1)
def _tree(text: str) -> ast.Module:
    """The syntax tree of a text; an empty one if it does not parse."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def _expressions(text: str) -> list[ast.expr]:
    return [node for node in ast.walk(_tree(text)) if isinstance(node, ast.expr)]


def _name(node: ast.expr) -> str:
    """The name of the function that an expression calls; empty if it calls none."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else str(getattr(node.func, "id", ""))


def _compares(node: ast.expr) -> bool:
    if _name(node) in LIMITING:
        return True
    return isinstance(node, ast.Compare) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod))


def _constants(tree: ast.Module) -> dict[str, set[int]]:
    """The numbers that each name stands for: of assignments, defaults and arguments by name."""
    found: dict[str, set[int]] = {}

    def add(name: str, value: ast.expr | None) -> None:
        if isinstance(value, ast.Constant) and type(value.value) is int:
            found.setdefault(name, set()).add(value.value)

    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            add(node.arg, node.value)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    add(target.id, node.value)
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            for argument, default in zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True):
                add(argument.arg, default)
            for argument, value in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                add(argument.arg, value)
    return {name: set(sorted(values)[-MOST_VALUES:]) for name, values in found.items()}


def _values(node: ast.expr, constants: Mapping[str, set[int]]) -> set[int]:
    """The values of an expression of whole numbers and names of such numbers."""
    if isinstance(node, ast.Constant):
        return {node.value} if type(node.value) is int else set()
    if isinstance(node, ast.Name):
        return constants.get(node.id, set())
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        return set()
    is_power = isinstance(node.op, (ast.LShift, ast.Pow))
    # This also bounds what powers and shifts can compute.
    most = LARGEST.bit_length() if is_power else LARGEST
    pairs = [(a, b) for a in _values(node.left, constants) for b in _values(node.right, constants)]
    values = {OPERATORS[type(node.op)](a, b) for a, b in pairs if 0 < a <= LARGEST and 0 < b <= most}
    return set(sorted(values)[-MOST_VALUES:])


def exceeds_workload(capture: Capture, sizes: Mapping[str, int]) -> bool:
    """Whether a size is larger than the workload's."""
    return any(sizes[name] > capture.graph.sizes[name] for name in sizes if name in capture.graph.sizes)


def _row_lengths(capture: Capture) -> list[str]:
    """The variable sizes that are the last dimension of an argument, but no other dimension."""
    shapes = [item.type.shape for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT and item.type.shape]
    last = {name for *_, size in shapes for name in size.symbols()}
    others = {name for *rest, _ in shapes for size in rest for name in size.symbols()}
    return [name for name in capture.variable_sizes if name in last - others]


def _sizes(capture: Capture, text: str, *, interpreted: bool) -> list[dict[str, int]]:
    """Sizes next to each number in the text: one above it, one below, the number, and one above its double.

    Numbers that the text compares come first.
    """
    graph, numbers = capture.graph, numbers_in(text)
    variable = [name for name in capture.variable_sizes if name in graph.sizes]
    edges = [edge for n in compared_numbers_in(text) for edge in (n + 1, n, n - 1)]
    edges += [*(n + 1 for n in numbers), *(n - 1 for n in numbers), *numbers, *(2 * n + 1 for n in numbers)]
    chosen: list[dict[str, int]] = []
    for edge in dict.fromkeys(edges) if variable else ():
        whole = raised_sizes(graph, {**graph.sizes, **dict.fromkeys(variable, edge)}, variable)
        single = [_with_long(capture, name, edge, SMALL_SIZE) for name in variable]
        # One case for all sizes, or else one for each while the others are small.
        choices = [whole] if is_small_enough(graph, whole, interpreted=interpreted) else single
        chosen += [
            sizes for sizes in choices if sizes not in chosen and is_small_enough(graph, sizes, interpreted=interpreted)
        ]
    rows = [_with_long(capture, name, LONG_ROW, SMALL_SIZE) for name in _row_lengths(capture)]
    chosen = [*(sizes for sizes in rows if is_small_enough(graph, sizes, interpreted=interpreted)), *chosen]
    # Each size is 1 while the others are not small.
    reduced = reduced_sizes(capture)
    flat = [raised_sizes(graph, {**reduced, name: 1}, variable) for name in variable]
    flat = [sizes for sizes in flat if is_small_enough(graph, sizes, interpreted=interpreted)]
    return [*(flat if len(variable) > 1 else ()), *chosen][:MOST_SIZES]
