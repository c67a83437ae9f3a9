"""Scatter-add: one kernel gathers an edge's inputs and adds its message to the target row."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mtmc_lsp.ir.lower import lower
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, verified
from tests.codegen.test_guard import loaded
from tests.planning.situations import fully_fused, start

TEXT = """
import torch


# mtmc: x=f32[N,D] src=i64[E]@0..N-1 dst=i64[E]@0..N-1 w=f32[E] N=9 D=20 E=50
def messages(x, src, dst, w):
    return torch.zeros_like(x).index_add_(0, dst, x[src] * w[:, None])


# mtmc: x=f32[N,D] src=i64[E]@0..N-1 dst=i64[E]@0..N-1 N=9 D=20 E=50
def mean_of_neighbours(x, src, dst):
    out = torch.zeros_like(x)
    out.index_add_(0, dst, x[src])
    degree = torch.zeros(x.shape[0], device=x.device).scatter_add_(0, dst, torch.ones_like(dst, dtype=x.dtype))
    return out / degree.clamp(min=1)[:, None]


# mtmc: base=f32[N,D] x=f32[E,D] i=i64[E]@0..N-1 N=9 D=20 E=50
def into_what_is_there(base, x, i):
    return base.index_add(0, i, x, alpha=2), x * 2


# mtmc: base=f32[B,N] x=f32[B,E] i=i64[B,E]@0..N-1 B=3 N=9 E=50
def of_each_row(base, x, i):
    return (base + 1).scatter_add(1, i, x.exp()) * 2


# mtmc: base=f32[B,N] x=f32[B,E] i=i64[B,E]@0..N-1 m=f32[N,K] B=3 N=9 E=50 K=5
def through_an_identity_view(base, x, i, m):
    return (base + 1).scatter_add(1, i, x.exp()).permute(0, 1).reshape(base.shape) @ m


# mtmc: base=f32[N,D] x=f32[E,D] i=i64[E]@0..N-1 N=9 D=20 E=50
def in_place(base, x, i):
    base.index_add_(0, i, x)
    return base.sum()


# mtmc: x=f32[E,D] i=i64[E]@0..N-1 N=9 D=20 E=50
def put(x, i, n=9):
    out = torch.zeros(n, x.shape[1], device=x.device)
    return out.index_put((i,), x.tanh(), accumulate=True)


# mtmc: x=i64[E] i=i64[E]@0..8 E=50
def counts(x, i):
    return torch.zeros(9, dtype=torch.int64, device=x.device).index_add(0, i, x)


# mtmc: x=f16[E,D] i=i64[E]@0..8 D=20 E=50
def half(x, i):
    return torch.zeros(9, x.shape[1], dtype=x.dtype, device=x.device).index_add(0, i, x)
"""


@pytest.mark.parametrize(
    "name", ["messages", "mean_of_neighbours", "into_what_is_there", "of_each_row", "in_place", "put", "counts"]
)
def test_rows_are_added_at_their_index(name: str, captured) -> None:
    capture = captured(TEXT, name)
    assert not lower(capture.graph).opaque
    if name not in ("mean_of_neighbours", "into_what_is_there", "of_each_row", "in_place"):
        candidate = fused(capture, TEXT)
        assert "tl.atomic_add(" in candidate.source
        assert verified(capture, candidate).reason == ""
    nodes = [
        node.name
        for node in capture.graph.nodes
        if ("add" in node.op and node.op != "aten.add.Tensor") or "put" in node.op
    ]
    alone = fused(capture, TEXT, nodes=nodes[:1])
    assert "tl.atomic_add(" in alone.source
    assert verified(capture, alone).reason == ""
    if name != "in_place":
        assert verified(capture, fully_fused(capture, start(capture, TEXT))).reason == ""


def test_the_sum_is_returned_through_a_view_that_changes_nothing(captured) -> None:
    """An einsum leaves such permutations before its product; the capture drops them."""
    capture = captured(TEXT, "through_an_identity_view")
    names = [node.name for node in capture.graph.nodes]
    first = next(i for i, node in enumerate(capture.graph.nodes) if "scatter_add" in node.op)
    assert not {"permute", "view", "reshape"} & {node.op.split(".")[1] for node in capture.graph.nodes}
    candidate = fused(capture, TEXT, nodes=names[first:-1])
    assert "tl.atomic_add(" in candidate.source
    assert verified(capture, candidate).reason == ""


def test_additions_that_a_gpu_rounds_differently_stay_torch_calls(captured) -> None:
    assert lower(captured(TEXT, "half").graph).opaque == {"index_add"}


def test_deterministic_mode_runs_the_original_code(
    checker: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = fused(checker.capture(TEXT, "messages"), TEXT)
    module = loaded(tmp_path / "messages.py", on_cpu(candidate.source, TEXT))
    arguments = (
        torch.ones(9, 20),
        torch.zeros(50, dtype=torch.int64),
        torch.zeros(50, dtype=torch.int64),
        torch.ones(50),
    )
    assert module.messages_fits(*arguments)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    compiled = torch.compile(
        lambda *values: values[0] * 2 if module.messages_fits(*values) else values[0], fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(*arguments), arguments[0] * 2), "and torch.compile sees through the question"
    torch.use_deterministic_algorithms(True)
    try:
        assert not module.messages_fits(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_in_place_update_needs_no_copy(captured) -> None:
    capture = captured(TEXT, "in_place")
    launcher = fused(capture, TEXT, nodes=["index_add"]).source.split("def in_place_launch(")[1].split("return")[0]
    assert "clone" not in launcher and "copy_" not in launcher
