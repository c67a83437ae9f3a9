"""Every operation family becomes kernels whose results equal eager results on several sizes."""

from __future__ import annotations

import os
import re

import pytest

from mtmc_lsp.core.errors import TargetRaises
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, greedy, start, with_kernel
from tests.codegen.families import ATTENTION, FAMILIES, LEFT_TO_TORCH, source

LOOPED: dict[str, object] = {"rows": 2, "block": 4, "loop": True, "warps": 4, "stages": 2}
WITHOUT_LOOPS = ("products", "attention", "convolutions", "pooling", "resampling")
BFLOAT16 = (
    "pointwise: chain", "pointwise: functions", "views: rotated halves", "reductions: softmax", "reductions: variance",
    "norms: layer", "norms: batch, training", "products: linear with prologue and epilogue", "scans: log of sums",
    "losses: cross entropy, weighted", "indexing: gather", "attention: causal", "convolutions: many channels",
    "convolutions: transposed, cut", "convolutions: depthwise", "pooling: max, dilated",
)  # fmt: skip


def left_to_torch(capture: Capture, candidate: Candidate) -> set[str]:
    """Operations that no kernel computes, except views and copies that no kernel reads."""
    schedule = from_json(Schedule, candidate.schedule)
    nodes = [node for node in capture.graph.nodes if schedule.kernel_of(node.name) is None]
    launcher = candidate.source.partition("def f_launch(")[2]
    mentions = {node.name: len(re.findall(rf"(?<![.\w]){node.name}\b", launcher)) for node in nodes}
    nodes = [node for node in nodes if node.op != "aten.clone.default" or mentions[node.name] > 1]
    return {name for node in nodes if (name := node.op.split(".")[1]) not in VIEWS}


def cases(capture: Capture) -> list[Case]:
    """Cases with the workload's sizes, a single element, and a size that no tile divides."""
    sizes = dict(capture.graph.sizes)
    varied = [{**sizes, **dict.fromkeys(capture.variable_sizes, value)} for value in (1, 19)] if sizes else []
    return [Case(case_sizes, "normal", 3 + i) for i, case_sizes in enumerate([sizes, *varied])]


def check(checker: Checker, capture: Capture, candidates: list[Candidate], on: list[Case]) -> None:
    for number, case in enumerate(on):
        try:
            failures = checker.failures(capture, candidates, case)
        except TargetRaises:
            # The user's code does not support these sizes. It must support those of its workload.
            assert number
            continue
        for failure, candidate in zip(failures, candidates, strict=True):
            assert not failure, f"{failure} on {case.label}\n{candidate.source}"


HALF = tuple(FAMILIES) if os.environ.get("MTMC_PROPERTY") == "long" else tuple(FAMILIES)[::4]
"""Families that also run in float16 by default; ``MTMC_PROPERTY=long`` runs all."""


@pytest.mark.parametrize(("name", "dtype"), [*((name, "f32") for name in FAMILIES), *((name, "f16") for name in HALF)])
def test_a_family_becomes_kernels_that_equal_eager(checker: Checker, name: str, dtype: str) -> None:
    capture = checker.capture(source(FAMILIES[name], dtype))
    fused = greedy(capture, {})
    assert left_to_torch(capture, fused) == set()
    if dtype == "f16":
        # Sizes and blocks do not depend on the dtype.
        check(checker, capture, [fused], cases(capture)[:1])
        return
    looped = [] if name.startswith(WITHOUT_LOOPS) else [greedy(capture, LOOPED)]
    check(checker, capture, [fused, *looped], cases(capture))


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_stays_a_torch_call_runs_between_kernels(checker: Checker, name: str) -> None:
    text, op = LEFT_TO_TORCH[name]
    capture = checker.capture(source(text, "f32"))
    fused = greedy(capture, {})
    assert op in left_to_torch(capture, fused)
    assert fused.launches
    if not capture.uses_random:
        check(checker, capture, [fused], cases(capture))


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_kernels_compile(checker: Checker, name: str) -> None:
    """The Triton interpreter is wrong for bfloat16, so these kernels are only compiled for a GPU."""
    capture = checker.capture(source(FAMILIES[name], "bf16"))
    fused = greedy(capture, {})
    assert left_to_torch(capture, fused) == set()
    assert checker.compile_errors(capture, fused) == []


@pytest.mark.parametrize("name", [*ATTENTION])
def test_attention_is_one_kernel(checker: Checker, name: str) -> None:
    capture = checker.capture(source(ATTENTION[name], "f16"))
    nodes = [node.name for node in capture.graph.nodes]
    assert len(with_kernel(capture, start(capture), nodes).launches) == 1
