"""Logits whose last row is dropped after the product: the operand is sliced instead, so that chunks of rows are possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.actions.base import Situation
from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.rewrites.chunked_rows.early_slices import with_early_slices
from mtmc_lsp.rewrites.saved_values import computing_again
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.checker import Checker
from tests.training.linear_losses import few_cases, in_chunks, product_of
from tests.training.targets import HEAD

ARGUMENTS = "x=f32[B,S,D] w=f32[V,D] labels=i64[B,S]@0..V-1 B=3 S=9 D=32 V=200 grad=x,w"
SLICED = {
    "language model": f"""# mtmc: {ARGUMENTS}
def f(x, w, labels):
    logits = (x @ w.T).float()
    shift = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shift.view(-1, w.shape[0]), labels[..., 1:].contiguous().view(-1))
""",
    "soft cap": f"""# mtmc: {ARGUMENTS}
def f(x, w, labels):
    logits = 3.0 * torch.tanh(F.linear(x, w) / 3.0)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
""",
    "slice after the softmax": f"""# mtmc: {ARGUMENTS}
def f(x, w, labels):
    logp = torch.log_softmax(F.linear(x, w), -1)[:, :-1]
    return -logp.gather(-1, labels[:, 1:, None]).squeeze(-1).mean()
""",
    "bias, first row dropped": """# mtmc: x=f32[N,D] w=f32[V,D] bias=f32[V] labels=i64[N]@0..V-1 N=23 D=32 V=200 grad=x,w,bias
def f(x, w, bias, labels):
    return F.cross_entropy(F.linear(x, w, bias)[1:], labels[:-1], label_smoothing=0.1)
""",
    "one temperature a token": """# mtmc: x=f32[B,S,D] w=f32[V,D] labels=i64[B,S]@0..V-1 scale=f32[B,S] mask=f32[B,S]@0.1..1
# mtmc: B=3 S=9 D=32 V=200 grad=x,w,scale
def f(x, w, labels, scale, mask):
    logits = F.linear(x, w) * scale[..., None]
    logp = torch.log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    return -(logp * mask[:, 1:]).sum() / mask[:, 1:].sum()
""",
    "teacher": """# mtmc: x=f32[B,S,D] w=f32[V,D] y=f32[B,S,D] u=f32[V,D] B=3 S=9 D=32 V=200 grad=x,w
def f(x, w, y, u):
    p, q = (torch.log_softmax(logits[:, :-1] / 2, -1) for logits in (x @ w.T, y @ u.T))
    return (q.exp() * (q - p)).sum(-1).mean()
""",
}
OF_EACH_TOKEN = f"""# mtmc: {ARGUMENTS.removesuffix(" grad=x,w")}
def f(x, w, labels):
    return F.cross_entropy((x @ w.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
"""
ALL_ROWS_READ = {
    "a loss of all rows as well": f"""# mtmc: {ARGUMENTS}
def f(x, w, labels):
    logits = x @ w.T
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return loss + torch.logsumexp(logits, -1).mean()
""",
    "another slice": f"""# mtmc: {ARGUMENTS}
def f(x, w, labels):
    logits = x @ w.T
    first = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return first + F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())
""",
    "every second row": f"""# mtmc: {ARGUMENTS}
def f(x, w, labels):
    return F.cross_entropy((x @ w.T)[:, ::2].flatten(0, 1), labels[:, ::2].flatten())
""",
}


def rewritten(capture: Capture) -> tuple[Graph, Graph]:
    """The graph with the values that the backward pass computes again, and the same after the rewrite."""
    graph = computing_again(capture.graph)
    return graph, with_early_slices(graph, product_of(capture))


def full_rows(graph: Graph, columns: int) -> list[str]:
    """The nodes with as many elements as all logits."""
    sizes = graph.sizes
    rows = sizes["B"] * sizes["S"] if "B" in sizes else sizes.get("N", 27)
    return [node.name for node in graph.nodes if node.type.numel.value(sizes) == rows * columns]


@pytest.mark.parametrize(
    ("name", "early"),
    [
        *((name, False) for name in SLICED),
        *((name, True) if name == "soft cap" else pytest.param(name, True, marks=pytest.mark.slow) for name in SLICED),
    ],
)
def test_sliced_logits_are_computed_in_chunks(checker: Checker, name: str, early: bool) -> None:
    capture = checker.capture(HEAD + SLICED[name])
    candidate = in_chunks(capture, rows=5, early=early)
    assert checker.first_failure(capture, candidate, few_cases(capture)) == ""
    graph, after = rewritten(capture)
    assert full_rows(graph, 200) and not full_rows(after, 200)


def test_sliced_logits_without_gradients(checker: Checker) -> None:
    capture = checker.capture(HEAD + OF_EACH_TOKEN)
    assert checker.first_failure(capture, in_chunks(capture), few_cases(capture)) == ""


@pytest.mark.parametrize("name", ALL_ROWS_READ)
def test_products_whose_other_rows_are_read_stay_as_they_are(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + ALL_ROWS_READ[name])
    graph, after = rewritten(capture)
    assert after is graph
    with pytest.raises(CannotCode):
        in_chunks(capture)


def test_chunks_of_sliced_logits_are_proposed(checker: Checker) -> None:
    capture = checker.capture(HEAD + SLICED["slice after the softmax"])
    sizes = {"B": 8, "S": 1024, "D": 4096, "V": 128256}
    large = replace(capture.graph, sizes=sizes)
    first = proposals(Situation(large, Schedule(), planning_model(("sm_90",))))[0]
    assert first.kind is ActionKind.CHUNK_ROWS
    assert first.params["early"] is True
