"""Which inputs a candidate is verified on: sizes, distributions and seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import Graph, InputKind
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture

INTERPRETER_ELEMENTS = 60_000
"""Elements of all inputs that one interpreted run may have, about a second of it."""

INTERPRETER_PRODUCT = 2.0e6
"""Multiply-adds that one interpreted run may have."""


@dataclass(frozen=True)
class Case:
    """One set of inputs."""

    sizes: Mapping[str, int]
    distribution: str
    """``normal``, ``uniform``, ``large``, ``tiny``, ``constant``, or ``given`` (the file's own ``get_inputs``)."""
    seed: int

    @property
    def label(self) -> str:
        """The case in words."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        return f"{sizes + ', ' if sizes else ''}{self.distribution}, seed {self.seed}"


def verification_cases(capture: Capture, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
    """The cases for a capture; the interpreter gets sizes that it can run.

    The sizes are the workload's own, ones that no tile divides, and small ones, 1 included; the distributions go round.
    """
    graph = capture.graph
    base = dict(graph.sizes)
    if interpreted:
        base = reduced_sizes(capture)
    variable = [name for name in capture.variable_sizes if name in base]
    odd = {**base, **{name: _odd(base[name], i) for i, name in enumerate(variable)}}
    small = {**base, **{name: 1 + i % 3 for i, name in enumerate(variable)}}
    plans = [
        (base, "normal"),
        (odd, "normal"),
        (small, "normal"),
        (odd, "uniform"),
        (base, "large"),
        (odd, "tiny"),
        (odd, "constant"),
    ]
    if not variable:
        plans = [(base, d) for d in ("normal", "normal", "uniform", "large", "tiny", "constant")]
    cases = [Case(sizes, distribution, seed + i) for i, (sizes, distribution) in enumerate(plans)]
    return tuple(case for case in cases if _allowed(graph, case.sizes))


def _odd(value: int, position: int) -> int:
    """A size that is no multiple of 16, a little below or above the base: other tiles, other tails."""
    wanted = value + (5 if position % 2 else -3)
    return wanted | 1 if wanted > 2 else 3


def _allowed(graph: Graph, sizes: Mapping[str, int]) -> bool:
    return all(bool(eval(text, {"__builtins__": {}}, dict(sizes))) for text in graph.conditions)


def reduced_sizes(capture: Capture) -> dict[str, int]:
    """The workload's sizes, variable ones halved until the interpreter can run them; they stay odd multiples of nothing."""
    graph = capture.graph
    sizes = dict(graph.sizes)
    while _too_large(graph, sizes):
        largest = max(capture.variable_sizes, key=lambda name: sizes[name], default=None)
        if largest is None or sizes[largest] <= 4:
            break
        sizes[largest] = max(4, math.ceil(sizes[largest] / 2))
    return sizes


def is_interpretable(capture: Capture) -> bool:
    """Whether the interpreter can run the target in reasonable time once its variable sizes are reduced."""
    sizes = reduced_sizes(capture)
    return not _too_large(capture.graph, sizes, slack=30.0)


def _too_large(graph: Graph, sizes: Mapping[str, int], slack: float = 1.0) -> bool:
    variable = set(sizes)
    elements = sum(
        item.type.numel.value(sizes)
        for item in graph.inputs
        if item.kind is InputKind.ARGUMENT or set(_names(item.type.shape)) & variable
    )
    made = sum(kind.numel.value(sizes) for node in graph.nodes for kind in node.outputs)
    too_many = elements + made / 4 > slack * INTERPRETER_ELEMENTS
    return too_many or product_work(graph, sizes) > slack * INTERPRETER_PRODUCT


def _names(shape: tuple[Size, ...]) -> list[str]:
    return [name for size in shape for name in size.symbols()]


def product_work(graph: Graph, sizes: Mapping[str, int]) -> float:
    """Multiply-adds of the graph's matrix products."""
    total = 0.0
    for node in graph.nodes:
        if node.op.split(".")[1] in (
            "mm",
            "bmm",
            "matmul",
            "linear",
            "addmm",
            "baddbmm",
            "scaled_dot_product_attention",
        ):
            operands = [graph.type_of(ref) for ref in node.inputs()]
            depth = max((kind.shape[-1].value(sizes) for kind in operands if kind.shape), default=1)
            total += float(node.type.numel.value(sizes)) * depth
    return total
