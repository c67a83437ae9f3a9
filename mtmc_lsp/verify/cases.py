"""Which inputs a candidate is verified on: sizes, distributions, seeds, and calls that its guard must refuse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, RECURRENT_GATES, Graph, InputKind
from mtmc_lsp.core.sizes import Size, conditions_hold, names_in, product
from mtmc_lsp.core.workload import Capture, WorkloadSource

INTERPRETER_ELEMENTS = 60_000
"""Elements of all inputs that one interpreted run may have, about a second of it."""
INTERPRETER_PRODUCT = 2.0e6
"""Multiply-adds that one interpreted run may have."""
FIXED_SLACK = 30.0
"""How many times that an interpreted run may have where sizes cannot be reduced further."""
FIXED_PRODUCT_SLACK = 100.0
"""The same of multiply-adds: large tiles make few programs of them."""
LEAST_ROWS = 32
"""Rows of a product below which some kernels leave it to the user's own code."""
VALUES_ELEMENTS = 1 << 24
"""Elements of a graph's tensors above which a GPU tries distributions of values on smaller sizes."""
LEAST_PART = 130
"""Down to which sizes are then made smaller: more than one block of any kernel."""
LARGER_BYTES = 8.0e9
"""Workloads that move more than this are not verified on larger sizes as well: they may not fit."""
CPU_WORK = 2.0e11
"""Most operations for which the user's code is also run on the CPU, to see that the guard sends it there."""

VALUES = "values"
"""The kernel's own ground: the guard should hold."""
FLOAT64 = "float64"
"""The same call in double precision: outside most guards, so the user's own code should run."""
AUTOGRAD = "autograd"
"""The same call with gradients asked for: they must be those of the user's own code."""
ON_CPU = "cpu"
"""The same call on CPU tensors while a GPU is there."""


UNITS = 16
"""No multiple of this is a size that no tile divides; half of it is 16 bytes of elements of two."""


@dataclass(frozen=True)
class Case:
    """One set of inputs."""

    sizes: Mapping[str, int]
    distribution: str
    """``normal``, ``uniform``, ``large``, ``tiny``, ``mixed``, ``constant``, or ``given`` (by ``get_inputs``); for a pair
    also those of :mod:`~mtmc_lsp.verify.pair_cases`."""
    seed: int
    kind: str = VALUES
    """One of :data:`VALUES`, :data:`FLOAT64`, :data:`AUTOGRAD`, :data:`ON_CPU`."""
    layout: str = ""
    """Empty for the workload's own, ``strided`` for arguments that are not contiguous, ``aliased`` for one tensor twice."""

    @property
    def is_kernels_ground(self) -> bool:
        """Whether a kernel should run: not outside the guard, and not without elements."""
        return self.kind == VALUES and all(self.sizes.values())

    @property
    def label(self) -> str:
        """The case in words."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        kind = "".join(f"{word}, " for word in (self.kind, self.layout) if word and word != VALUES)
        return f"{sizes + ', ' if sizes else ''}{kind}{self.distribution}, seed {self.seed}"


def verification_cases(capture: Capture, *, interpreted: bool, seed: int, part: float = 1.0) -> tuple[Case, ...]:
    """The cases for a capture; the interpreter gets sizes that it can run.

    The first is the workload (reduced for the interpreter). Then sizes that no tile divides, small ones with 1
    and 0 among them, larger ones; the distributions go round. Last come calls for the guard to refuse or get right. Values are
    tried at multiples of eight, which kernels ask for whose tiles the hardware moves: at odd ones your own code would run.
    """
    graph = capture.graph
    base = reduced_sizes(capture, part=part) if interpreted else dict(graph.sizes)
    variable = [name for name in capture.variable_sizes if name in base]
    given = capture.workload.source is WorkloadSource.GET_INPUTS and not interpreted
    plans: list[tuple[dict[str, int], str]] = [(base, "given")] if given else []
    if not variable:
        plans += [(base, d) for d in ("normal", "normal", "uniform", "large", "tiny", "mixed", "constant")]
        last = base
    else:
        odd = _with_rows(graph, base, {name: _odd(base[name], i) for i, name in enumerate(variable)})
        # Each size is 1 in one of the two.
        small = {**base, **{name: (1, 2, 1, 3)[i % 4] for i, name in enumerate(variable)}}
        other = {**base, **{name: (2, 1, 3, 1)[i % 4] for i, name in enumerate(variable)}}
        small, other = (_raised(graph, sizes, variable) for sizes in (small, other))
        empty = {**other, variable[0]: 0}
        more = {name: base[name] + base[name] // 4 for name in variable}
        larger = _first_allowed(
            graph, ({**base, **{name: turn(size, 1) for name, size in more.items()}} for turn in (_uneven, _odd))
        )
        huge = capture.bytes > LARGER_BYTES and not interpreted
        # A workload that takes this long to make is verified twice at about its own size, not three times.
        plans += [] if given and huge else [(base, "normal")]
        plans += [(odd, "normal"), (small, "normal"), (other, "mixed")]
        # What values do does not hang on the size, so they are tried on small ones.
        less = {name: -(-base[name] // 2) for name in variable} if interpreted else _smaller(graph, base, variable)
        middle = _first_allowed(
            graph,
            (
                _with_rows(graph, base, {name: turn(less[name], i) for i, name in enumerate(variable)})
                for turn in (_uneven, _odd)
            ),
        )
        plans += [(middle, d) for d in ("uniform", "tiny", "mixed", "constant", "large")] + [(empty, "normal")]
        if not (_too_large(graph, larger, 2.0) if interpreted else huge):
            plans.append((larger, "normal"))
        last = small
    cases = [Case(sizes, distribution, seed + i) for i, (sizes, distribution) in enumerate(plans)]
    cases += _outside_the_guard(capture, last, interpreted, seed + len(plans))
    return tuple(case for case in cases if _allowed(graph, case.sizes))


def _outside_the_guard(capture: Capture, sizes: Mapping[str, int], interpreted: bool, seed: int) -> list[Case]:
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    floats = {item.type.dtype for item in arguments if is_float(item.type.dtype)}
    cases = []
    if floats and "float64" not in floats:
        cases.append(Case(sizes, "normal", seed, FLOAT64))
    if floats:
        cases.append(Case(sizes, "normal", seed + 1, AUTOGRAD))
    elements = sum(kind.numel.value(sizes) for node in capture.graph.nodes for kind in node.outputs)
    work = max(capture.flops, 2 * product_work(capture.graph, sizes))
    if not interpreted and work < CPU_WORK and elements < CPU_WORK / 1000:
        cases.append(Case(sizes, "normal", seed + 2, ON_CPU))
    return cases


def _odd(value: int, position: int) -> int:
    """A size that is no multiple of 16, a little below or above the base: other tiles, other tails."""
    wanted = value + (5 if position % 2 else -3)
    return wanted | 1 if wanted > 2 else 3


def _uneven(value: int, position: int) -> int:
    """A size that no tile divides, and a multiple of eight: a guard that asks for whole units leaves it to the kernel."""
    if value < 2 * UNITS:
        return _odd(value, position)
    return value // UNITS * UNITS + (UNITS // 2 if position % 2 else -UNITS // 2)


MOST_RAISED = 256
"""Steps after which no smallest sizes are looked for any longer."""


def _raised(graph: Graph, sizes: Mapping[str, int], variable: Sequence[str]) -> dict[str, int]:
    """Sizes made larger one by one until the graph's conditions hold: the smallest of their kind that kernels are for."""
    raised = dict(sizes)
    for _ in range(MOST_RAISED):
        failing = next((text for text in graph.conditions if not conditions_hold([text], raised)), None)
        if failing is None:
            return raised
        raised |= {name: raised[name] + 1 for name in names_in(failing) & set(variable)}
    return dict(sizes)


def _first_allowed(graph: Graph, choices: Iterable[dict[str, int]]) -> dict[str, int]:
    """The first sizes that the graph's own conditions allow; the last ones where none do."""
    sizes: dict[str, int] = {}
    for sizes in choices:
        if _allowed(graph, sizes):
            break
    return sizes


def _allowed(graph: Graph, sizes: Mapping[str, int]) -> bool:
    return conditions_hold(graph.conditions, sizes)


def _smaller(graph: Graph, base: Mapping[str, int], variable: Sequence[str]) -> dict[str, int]:
    """Variable sizes halved, the largest first, until a GPU needs no time for copying; never below two tiles."""
    sizes = dict(base)
    while _elements(graph, sizes) > VALUES_ELEMENTS:
        largest = max(variable, key=lambda name: sizes[name])
        if sizes[largest] <= LEAST_PART:
            break
        sizes[largest] = max(LEAST_PART, math.ceil(sizes[largest] / 2))
    return sizes


def _elements(graph: Graph, sizes: Mapping[str, int]) -> int:
    kinds = [item.type for item in graph.inputs] + [kind for node in graph.nodes for kind in node.outputs]
    return sum(kind.numel.value(sizes) for kind in kinds)


def reduced_sizes(capture: Capture, *, least: int = 4, part: float = 1.0) -> dict[str, int]:
    """The workload's sizes, variable ones halved, the largest first, until the interpreter can run them.

    Products keep rows enough for the kernels that ask for some (:data:`LEAST_ROWS`).

    Args:
        capture: what is run.
        least: none is made smaller than this.
        part: of the interpreter's limits that may be used.
    """
    graph = capture.graph
    sizes = dict(graph.sizes)
    rows = _product_rows(graph, sizes)
    left = set(capture.variable_sizes)
    while left and _too_large(graph, sizes, part):
        largest = max(sorted(left), key=lambda name: sizes[name])
        smaller = {**sizes, largest: max(least, math.ceil(sizes[largest] / 2))}
        kept = zip(rows, _product_rows(graph, smaller), strict=True)
        if sizes[largest] > least and all(now >= min(before, LEAST_ROWS) for before, now in kept):
            sizes = smaller
        else:
            left.remove(largest)
    return sizes


def _with_rows(graph: Graph, base: Mapping[str, int], changed: Mapping[str, int]) -> dict[str, int]:
    """``base`` with some sizes changed, then enlarged until products have rows for their kernels again."""
    sizes = {**base, **changed}
    wanted = [min(rows, LEAST_ROWS) for rows in _product_rows(graph, base)]
    for name in changed:
        while True:
            larger = {**sizes, name: 2 * sizes[name] + 1}
            now, then = _product_rows(graph, sizes), _product_rows(graph, larger)
            # Products that lack rows which another size gives them are left to that one.
            if not any(own < least and own < more for own, more, least in zip(now, then, wanted, strict=True)):
                break
            sizes = larger
    return sizes


def _product_rows(graph: Graph, sizes: Mapping[str, int]) -> list[int]:
    """How many rows each product of the graph has, all dimensions before the last taken together."""
    shapes = [node.type.shape for node in graph.nodes if node.op.split(".")[1] in MATRIX_PRODUCTS and node.outputs]
    return [math.prod(size.value(sizes) for size in shape[:-1]) for shape in shapes]


def is_interpretable(capture: Capture) -> bool:
    """Whether the interpreter can run the target in reasonable time once its variable sizes are reduced."""
    sizes = reduced_sizes(capture)
    return not _too_large(capture.graph, sizes, FIXED_SLACK, FIXED_PRODUCT_SLACK)


def _too_large(graph: Graph, sizes: Mapping[str, int], slack: float = 1.0, product_slack: float = 0.0) -> bool:
    variable = set(sizes)
    elements = sum(
        item.type.numel.value(sizes)
        for item in graph.inputs
        if item.kind is InputKind.ARGUMENT or set(_names(item.type.shape)) & variable
    )
    made = sum(kind.numel.value(sizes) for node in graph.nodes for kind in node.outputs)
    too_many = elements + made / 4 > slack * INTERPRETER_ELEMENTS
    return too_many or product_work(graph, sizes) > (product_slack or slack) * INTERPRETER_PRODUCT


def _names(shape: tuple[Size, ...]) -> list[str]:
    return [name for size in shape for name in size.symbols()]


def product_work(graph: Graph, sizes: Mapping[str, int]) -> float:
    """Multiply-adds of the graph's matrix products."""
    total = 0.0
    for node in graph.nodes:
        name = node.op.split(".")[1]
        operands = [graph.type_of(ref) for ref in node.inputs()]
        made = float(node.type.numel.value(sizes)) if node.outputs else 0.0
        if name in MATRIX_PRODUCTS:
            total += made * operands[MATRIX_PRODUCTS[name]].shape[-1].value(sizes)
        elif name == "scaled_dot_product_attention":
            # Two products, each of the length of the keys.
            total += 2 * made * operands[1].shape[-2].value(sizes)
        elif name in RECURRENT_GATES and len(node.outputs) > 1:
            # At each step every row of the batch meets every weight.
            rows = product(operands[0].shape[:2]).value(sizes)
            total += rows * sum(kind.numel.value(sizes) for kind in operands if len(kind.shape) == 2)
    return total
