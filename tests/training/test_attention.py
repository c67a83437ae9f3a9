"""Attention in training: the backward pass computes the probabilities again, and saves none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.actions.base import Situation
from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import Checker, start
from tests.training.targets import HEAD, cases

ATTENTIONS = {
    "plain": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=2 S=40 grad=q,k,v
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
""",
    "causal": """# mtmc: q=bf16[B,H,S,64] k=bf16[B,H,S,64] v=bf16[B,H,S,64] B=1 H=2 S=72 grad=q,k,v
def f(q, k, v):
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * 64**-0.5).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v
""",
    "einsum": """# mtmc: q=f32[B,S,H,64] k=f32[B,S,H,64] v=f32[B,S,H,64] B=2 H=2 S=40 grad=q,k,v
def f(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
""",
    "grouped heads": """# mtmc: q=f32[B,4,S,64] k=f32[B,2,S,64] v=f32[B,2,S,64] B=1 S=40 grad=q,k,v
def f(q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v
""",
    "keys of another length": """# mtmc: q=f32[S,32] k=f32[T,32] v=f32[T,48] S=40 T=72 grad=q,k,v
def f(q, k, v):
    return torch.softmax(q @ k.t() / 8, -1) @ v
""",
    "few queries": """# mtmc: q=f32[B,6,32] k=f32[B,T,32] v=f32[B,T,32] B=2 T=1030 grad=q,k,v
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
""",
    "few queries of grouped heads": """# mtmc: q=bf16[B,4,2,32] k=bf16[B,2,T,32] v=bf16[B,2,T,32] B=1 T=1030 grad=q,k,v
def f(q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return torch.softmax((q @ k.transpose(-1, -2) * 0.1).float(), -1).to(q.dtype) @ v
""",
    "bias by position": """# mtmc: q=f32[B,2,S,64] k=f32[B,2,S,64] v=f32[B,2,S,64] slopes=f32[2] B=1 S=40 grad=q,k,v
def f(q, k, v, slopes):
    at = torch.arange(q.shape[2], device=q.device)
    bias = slopes[:, None, None] * (at[None, :] - at[:, None])
    return torch.softmax(q @ k.transpose(-1, -2) / 8 + bias, -1) @ v
""",
    "sliding window": """# mtmc: q=f32[B,S,16] k=f32[B,S,16] v=f32[B,S,16] B=1 S=100 grad=q,k,v
def f(q, k, v):
    at = torch.arange(q.shape[1], device=q.device)
    ago = at[:, None] - at[None, :]
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill((ago < 0) | (ago >= 20), float("-inf"))
    return torch.softmax(scores, -1) @ v
""",
    "mask argument": """# mtmc: q=f32[B,2,S,32] k=f32[B,2,S,32] v=f32[B,2,S,32] mask=bool[S,S] B=1 S=40 grad=q,k,v
def f(q, k, v, mask):
    return torch.softmax(torch.where(mask, q @ k.transpose(-1, -2) * 0.125, -1e4), -1) @ v
""",
    "rows that see no key": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=1 S=40 grad=q,k,v
def f(q, k, v):
    at = torch.arange(q.shape[1], device=q.device)
    hidden = (at[None, :] > at[:, None]) | (at[:, None] < 3)
    return torch.softmax((q @ k.transpose(-1, -2) / 8).masked_fill(hidden, -1e9), -1) @ v
""",
    "soft cap": """# mtmc: q=f32[B,2,S,80] k=f32[B,2,S,80] v=f32[B,2,S,80] B=1 S=40 grad=q,k,v
def f(q, k, v):
    return torch.softmax(20 * torch.tanh(q @ k.transpose(-1, -2) * 0.1 / 20), -1) @ v
""",
    "gradient of the queries alone": """# mtmc: q=f32[B,2,S,32] k=f32[B,2,S,32] v=f32[B,2,S,32] B=1 S=40 grad=q
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1) @ v
""",
    "gradient of the values alone": """# mtmc: q=f32[B,2,S,32] k=f32[B,2,S,32] v=f32[B,2,S,32] B=1 S=40 grad=v
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1) @ v
""",
    "a block with projections": """class f(nn.Module):
    def __init__(self, d=64, h=2):
        super().__init__()
        self.qkv, self.out, self.h = nn.Linear(d, 3 * d), nn.Linear(d, d), h

    # mtmc: x=f32[B,S,64] B=2 S=40 grad=x
    def forward(self, x):
        B, S, D = x.shape
        q, k, v = (t.view(B, S, self.h, -1).transpose(1, 2) for t in self.qkv(x).split(D, 2))
        scores = q @ k.transpose(-2, -1) / (D // self.h) ** 0.5
        mask = torch.tril(torch.ones(S, S, device=x.device))
        weights = F.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(B, S, D))
""",
}
UNCHANGED = {
    "above 128": """# mtmc: q=f32[B,S,256] k=f32[B,S,256] v=f32[B,S,256] B=1 S=40 grad=q,k,v
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1) @ v
""",
    "the gradient of a bias needs": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] bias=f32[S,S] B=1 S=40 grad=q,k,v,bias
def f(q, k, v, bias):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.1 + bias, -1) @ v
""",
    "the caller, reads its scores or probabilities": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=1 S=40 grad=q,k,v
def f(q, k, v):
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.1, -1)
    return weights @ v, weights
""",
    "is no softmax": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=1 S=40 grad=q,k,v
def f(q, k, v):
    return torch.sigmoid(q @ k.transpose(-1, -2) * 0.1) @ v
""",
}
DEVICE = planning_model(("sm_90",))


def product_of_values(capture: Capture) -> str:
    """The second product of the forward pass's attention."""
    graph = capture.graph
    forward = [node for node in graph.nodes if node.name not in graph.backward_nodes and node.word in ("mm", "bmm")]
    return max(forward, key=lambda node: (node.word == "bmm", graph.positions[node.name])).name


def recomputed(capture: Capture, node: str = "") -> Candidate:
    """The target after the one step."""
    action = MacroAction(ActionKind.RECOMPUTE_ATTENTION, (), (0, 0), {"node": node or product_of_values(capture)})
    return BuiltinCoder(DEVICE).write(capture, start(capture), action)


def proposed(capture: Capture) -> list[MacroAction]:
    """The actions of this kind that are proposed for a target."""
    situation = Situation(capture.graph, Schedule(), DEVICE)
    return [action for action in proposals(situation) if action.kind is ActionKind.RECOMPUTE_ATTENTION]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_results_and_gradients_are_those_of_the_users_code(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + ATTENTIONS[name])
    candidate = recomputed(capture)
    assert checker.first_failure(capture, candidate, cases(capture)) == ""
    saved = re.search(r"ctx.save_for_backward\(([^)]*)\)", candidate.source)
    assert saved is not None
    assert "row_max" in saved[1] and "log_total" in saved[1]
    assert "atomic" not in candidate.source


@pytest.mark.parametrize("name", ["few queries", "few queries of grouped heads"])
def test_programs_that_share_the_keys_save_the_statistics_of_each_row_once(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + ATTENTIONS[name])
    candidate = recomputed(capture)
    combining = next(text for text in candidate.source.split("@triton.jit") if "for part in range(0, PARTS):" in text)
    for name in ("row_max", "log_total"):
        assert f"tl.store({name}_ptr" in combining
        assert candidate.source.count(f"tl.store({name}_ptr") == 1
    assert not checker.compile_errors(capture, candidate, ("sm_80", "sm_90"))


@pytest.mark.parametrize("reason", UNCHANGED)
def test_other_attentions_are_refused_with_a_reason(checker: Checker, reason: str) -> None:
    capture = checker.capture(HEAD + UNCHANGED[reason])
    assert proposed(capture) == []
    with pytest.raises(Exception, match=reason):
        recomputed(capture)


def test_the_step_says_what_is_saved_and_what_is_computed_again(checker: Checker) -> None:
    text = ATTENTIONS["causal"].replace("B=1 H=2 S=72", "B=1 H=2 S=512")
    (action,) = proposed(checker.capture(HEAD + text))
    assert action.text == "Compute the probabilities of the attention again in the backward pass"
    # Two heads with 512 maxima and sums in float32, instead of 512 x 512 scores, probabilities and statistics of the rows.
    assert "8.2 kB are saved for the backward pass instead of 1.1 MB" in action.rationale
    assert "Scores and probabilities are computed again, tile by tile" in action.rationale
    assert action.expected.saved_memory > 1e6


def test_kernels_compile_without_spilled_registers(checker: Checker) -> None:
    capture = checker.capture(HEAD + ATTENTIONS["causal"])
    reports = checker.reports(capture, recomputed(capture))
    assert [(report.kernel, report.error, report.spills) for report in reports if report.error or report.spills] == []


def test_the_mask_limits_the_loops_of_the_gradients(checker: Checker) -> None:
    source = recomputed(checker.capture(HEAD + ATTENTIONS["causal"])).source
    assert "first_query = tl.maximum(first_key, 0) // BLOCK_M * BLOCK_M" in source
    assert "for start in range(first_query, n_queries, BLOCK_M):" in source
    assert source.count("for start in range(0, end_key, BLOCK_N):") == 1


# For each fault: the target, a pattern in the generated code, and its replacement.
FAULTS: dict[str, tuple[str, str, str]] = {
    "no subtracted sum": ("plain", r"weights \* delta\)", "weights * delta * 0.0)"),
    "the sum of another row": ("plain", r"delta_ptr \+ batch \* n_queries \+ m,", "delta_ptr + batch * n_queries + m // 2,"),
    "another scale in the backward pass": ("plain", r"scores / 8.0 - row_max", "scores / 8.5 - row_max"),
    "a scale that is dropped from the gradient": ("plain", r"\(grad_weights \* weights - weights \* delta\) / 8.0",
                                                  "(grad_weights * weights - weights * delta)"),
    "a maximum in other units": ("plain", r"largest = row_max \* 0.125", "largest = row_max"),
    "a causal mask that is off by one in the backward pass": (
        "causal", r"(def f_backward_grad_k_kernel(?:.|\n)*?- m) >= 1", r"\1 >= 2"),
    "queries that the loop leaves out": (
        "causal", r"first_query = tl.maximum\(first_key, 0\) // BLOCK_M \* BLOCK_M",
        "first_query = (first_key + BLOCK_M) // BLOCK_M * BLOCK_M"),
    "keys that the loop leaves out": (
        "causal", r"(def f_backward_grad_q_kernel(?:.|\n)*?end_key = tl.minimum\(first_query) \+ BLOCK_M", r"\1"),
    "a gradient of the keys by the values": ("plain", r"grad_k = tl.dot\((.*(?:\n.*)??)q,", r"grad_k = tl.dot(\1grad_out,"),
    "probabilities that are not normalised": ("plain", r"scores / 8.0 - row_max - log_total\)", "scores / 8.0 - row_max)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def versions() -> dict[str, tuple[Capture, Candidate]]:
    """The captured and planned targets so far."""
    return {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_backward_pass_is_refused(
    checker: Checker, versions: dict[str, tuple[Capture, Candidate]], fault: str
) -> None:
    name, pattern, replacement = FAULTS[fault]
    if name not in versions:
        capture = checker.capture(HEAD + ATTENTIONS[name])
        versions[name] = capture, recomputed(capture)
    capture, candidate = versions[name]
    source, count = re.subn(pattern, replacement, candidate.source)
    assert count, candidate.source
    some = [Case(dict(capture.graph.sizes), "normal", seed) for seed in range(2)]
    assert checker.first_failure(capture, replace(candidate, id=fault, source=source), some) != ""
