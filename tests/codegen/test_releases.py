"""Launchers drop large tensors after their last use, if that lowers the peak."""

from __future__ import annotations

import pytest

from mtmc_lsp.codegen.module.launchers.releases import with_releases
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.memory import peak_bytes
from mtmc_lsp.verify.cases import FORWARD, Case
from tests.codegen.checker import Checker, start, with_kernel

MB = 1 << 20


class Memory:
    """Counts the bytes of values that Python keeps."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def new(self, size: int, *operands: object) -> Value:
        """A value of ``size`` MB that is computed from operands."""
        assert all(operand is not None for operand in operands)
        return Value(self, size * MB)

    def run(self, lines: list[str], returned: list[str]) -> int:
        """The peak while a function with these statements runs."""
        body = [f"    {line}" for line in [*lines, f"return {', '.join(returned)},"]]
        names = {"new": self.new, "view": View}
        exec("\n".join(["def f(x):", *body]), names)
        names["f"](self.new(1))  # type: ignore[operator]
        return self.peak // MB


class Value:
    """A value that counts as memory while it exists."""

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.now += size
        memory.peak = max(memory.peak, memory.now)

    def __del__(self) -> None:
        self.memory.now -= self.size


class View:
    """A view keeps the value on which it is based."""

    def __init__(self, base: object) -> None:
        self.base = base


CHAIN = ["a = new(8, x)", "b = new(8, a)", "c = new(8, b)", "d = new(8, c)"]
VIEWS = ["a = new(8, x)", "v = view(a)", "b = new(8, v)", "c = new(8, b)", "d = new(8, c)"]
SEVERAL_LINES = [
    "a = new(",
    "    8,",
    "    x,",
    ")",
    "b = new(8, a)",
    "for i in range(2):",
    "    c = new(8, b)",
    "d = new(8, b)",
]
FLAG = ["a = new(8, x)", "# a is not needed later.", "b = new(8, a)", "if x is None:", "    return a", "c = new(8, b)"]


@pytest.mark.parametrize(
    ("lines", "bases", "returned", "before", "after"),
    [
        (CHAIN, {}, ["d"], 33, 17),
        (CHAIN, {}, ["b", "d"], 33, 25),
        (VIEWS, {"v": "a"}, ["d"], 33, 17),
        # A view is returned, so its tensor stays.
        (VIEWS, {"v": "a"}, ["v", "d"], 33, 25),
        (SEVERAL_LINES, {}, ["d"], 33, 25),
        (FLAG, {}, ["c"], 25, 17),
    ],
)
def test_dropping_lowers_the_peak_and_nothing_is_used_later(
    lines: list[str], bases: dict[str, str], returned: list[str], before: int, after: int
) -> None:
    sizes = dict.fromkeys("abcd", 8.0 * MB)
    changed = with_releases(lines, sizes, bases, returned)
    assert Memory().run(lines, returned) == before
    assert Memory().run(changed, returned) == after
    assert [line for line in changed if not line.startswith("del ")] == lines


def test_small_tensors_and_those_without_a_later_allocation_stay() -> None:
    small = dict.fromkeys("abcd", 1000.0)
    assert with_releases(CHAIN, small, {}, ["d"]) == CHAIN
    # Only the first could be dropped, and it is a hundredth of the whole.
    sizes = {"a": 1.0 * MB, "b": 100.0 * MB, "c": 8.0 * MB, "d": 4.0 * MB}
    assert with_releases(CHAIN, sizes, {}, ["b", "c", "d"]) == CHAIN


LAYERS = """import torch
import torch.nn.functional as F


# mtmc: x=f32[B,512] a=f32[512,512] b=f32[512,512] c=f32[512,512] B=1024{grad}
def f(x, a, b, c):
    y = F.relu(x @ a)
    y = F.gelu(y @ b)
    return torch.sigmoid(y @ c)
"""


def fused(capture: Capture) -> Candidate:
    """A version with a kernel for each operation of the forward pass that is no product."""
    candidate = start(capture)
    for node in lower(capture.graph).graph.nodes:
        if node.word not in ("mm", "t", "permute"):
            try:
                candidate = with_kernel(capture, candidate, [node.name])
            except CannotCode:
                continue
    return candidate


def test_a_chain_of_layers_needs_memory_for_two_of_its_values(checker: Checker) -> None:
    capture = checker.capture(LAYERS.format(grad=""))
    candidate = fused(capture)
    assert candidate.source.count("del ") == 4
    assert checker.first_failure(capture, candidate, [Case(dict(capture.graph.sizes), "normal", 1)]) == ""
    schedule = from_json(Schedule, candidate.schedule)
    # Six values of 2 MB; two of them exist at once.
    assert peak_bytes(capture.graph, schedule) == 2 * 2 * MB
    assert "del " not in fused(checker.capture(LAYERS.format(grad="").replace("B=1024", "B=64"))).source


def test_both_passes_drop_tensors_and_give_the_same_gradients(checker: Checker) -> None:
    capture = checker.capture(LAYERS.format(grad=" grad=x,a,b,c"))
    candidate = fused(capture)
    backward = candidate.source.partition("def f_backward(")[2]
    assert "    del " in backward
    sizes = dict(capture.graph.sizes)
    every = [Case(sizes, "normal", 1), Case({"B": 1}, "normal", 2), Case(sizes, "normal", 3, FORWARD)]
    assert checker.first_failure(capture, candidate, every) == ""
