"""Gradients that are exactly 0: rounding of terms that cancel is allowed, a small wrong number is not."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.outcomes import CaseOutcome, uncertain_because
from tests.codegen.checker import Checker
from tests.planning.situations import fully_fused, start
from tests.training.targets import HEAD, cases, planned

TARGETS = {
    "js divergence": """# mtmc: student=f32[N,V] teacher=f32[N,V] N=8 V=64 grad=student
def f(student, teacher, beta=0.5):
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log(beta * q + (1 - beta) * p)
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1).mean()
""",
    "js divergence of 16-bit products": """# mtmc: x=bf16[N,D] w=bf16[V,D]@-0.02..0.02 tx=bf16[N,D] tw=bf16[V,D]@-0.02..0.02
# mtmc: N=56 D=64 V=88 grad=x,w
def f(x, w, tx, tw, beta=0.5):
    log_q, log_p = torch.log_softmax((x @ w.T).float(), -1), torch.log_softmax((tx @ tw.T).float(), -1)
    log_m = torch.log(torch.lerp(log_q.exp(), log_p.exp(), beta))
    loss = beta * (log_p.exp() * (log_p - log_m)).sum(-1) + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1)
    return loss.mean()
""",
    "geometric divergence": """# mtmc: student=f32[N,V] teacher=f32[N,V] N=8 V=64 grad=student
def f(student, teacher, beta=0.5):
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    return (log_p.exp() * (log_p - ((1 - beta) * log_p + beta * log_q))).sum(-1).mean()
""",
    "add and norm": """# mtmc: x=bf16[N,H] residual=bf16[N,H] weight=bf16[H] N=16 H=64 grad=x,residual,weight
def f(x, residual, weight, eps=1e-6):
    added = x + residual
    hidden = added.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype), added
""",
    "clip": """# mtmc: image=f32[B,D] text=f32[B,D] scale=f32[] B=8 D=32 grad=image,text,scale
def f(image, text, scale):
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    logits = scale.exp() * image @ text.t()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
""",
    "softcap": """# mtmc: x=f32[N,D] weight=f32[V,D] target=i64[N]@0..199 N=16 D=32 V=200 grad=x,weight
def f(x, weight, target):
    logits = torch.tanh((x @ weight.T) / 30.0) * 30.0
    return F.cross_entropy(logits, target)
""",
    "ignored labels": """# mtmc: x=f32[B,V] t=i64[B]@-1..199 B=16 V=200 grad=x
def f(x, t):
    return F.cross_entropy(x, t, ignore_index=-1, reduction="sum")
""",
    "padding": """# mtmc: i=i64[B,S]@0..9 w=f32[10,32] B=2 S=16 grad=w
def f(i, w):
    return torch.tanh(F.embedding(i, w, padding_idx=0)) * 2
""",
    "masked tokens": """# mtmc: logp=f32[B,S] advantage=f32[B] mask=f32[B,S]@0..1 B=4 S=32 grad=logp
def f(logp, advantage, mask):
    mask = mask > 0.5
    return -(torch.exp(logp) * advantage[:, None] * mask).sum() / mask.sum().clamp(min=1)
""",
    "clipped surrogate": """# mtmc: logp=f32[B,T]@-3.0..-0.1 old=f32[B,T]@-3.0..-0.1 adv=f32[B,T] mask=bool[B,T] B=5 T=12 grad=logp
def f(logp, old, adv, mask):
    mean = (adv * mask).sum() / (mask.sum() + 1e-8)
    var = ((adv - mean) ** 2 * mask).sum() / (mask.sum() + 1e-8)
    adv = (adv - mean) * torch.rsqrt(var + 1e-8)
    ratio = torch.exp(logp - old)
    return (torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum().clamp(min=1)
""",
    "relu": """# mtmc: x=f32[B,D] w=f32[D] B=16 D=96 grad=x,w
def f(x, w):
    return F.relu(x) * w
""",
    "causal": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=2 S=32 grad=q,k,v
def f(q, k, v):
    scores = q @ k.transpose(-1, -2) / 8
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
""",
}


@dataclass(frozen=True)
class Version:
    """A change of the generated code, and the case on which it counts."""

    target: str
    pattern: str
    replacement: str
    sizes: dict[str, int]
    distribution: str = "normal"
    numbers: dict[str, float] | None = None
    seeds: tuple[int, ...] = (0, 1, 2, 3)


UNCHANGED = (r"\Z", "")
RIGHT: dict[str, Version] = {
    # The two halves of the gradient are products of the same numbers, so they are equal in the reference.
    "a reciprocal instead of a division": Version(
        "js divergence", r" / \(?(sub|mul|add|p|q|exp\w*)\b", r" * 1.0 / \1", {"N": 8, "V": 64}, numbers={"beta": 0.0}
    ),
    "another rounding of one term": Version(
        "geometric divergence",
        r"return grad_student((?:, None)+)$",
        "p = torch.softmax(student, -1) / len(student)\n"
        "        p = p * grad_out\n"
        r"        return grad_student + p * (1 + 1e-7) - p\1",
        {"N": 16, "V": 200},
        numbers={"beta": 0.0},
    ),
    # The reference's terms are equal in all bits, those of the kernels in all but some: exp and log differ.
    "logarithms of exponentials": Version(
        "js divergence of 16-bit products", *UNCHANGED, {"N": 56, "D": 64, "V": 88}, numbers={"beta": 0.0}
    ),
    "logarithms of exponentials in more rows": Version(
        "js divergence of 16-bit products", *UNCHANGED, {"N": 200, "D": 72, "V": 136}, numbers={"beta": 0.0}
    ),
    "a product that is rounded to its other neighbour": Version(
        "add and norm",
        r"total = torch\.sum\(mul, ",
        "mul[:1] *= 1 - 2**-8\n    total = torch.sum(mul, ",
        {"N": 2, "H": 1},
        seeds=tuple(range(1, 41, 4)),
    ),
    "a norm of one element": Version("clip", *UNCHANGED, {"B": 2, "D": 1}, "mixed", seeds=(15, 37, 44, 50, 59, 84, 86)),
    # The sign of an advantage is that of a rounding error, and decides which branch of the maximum has a gradient.
    "advantages of equal rewards": Version(
        "clipped surrogate", *UNCHANGED, {"B": 3, "T": 11}, "constant", seeds=(0, 1, 389)
    ),
    "a saturated cap": Version("softcap", *UNCHANGED, {"N": 23, "D": 21, "V": 200}, "mixed", seeds=(1, 3, 9, 15, 27)),
}
WRONG: dict[str, Version] = {
    "a term too many in a gradient of 16 bits": Version(
        "js divergence of 16-bit products",
        r"return grad_x, grad_w((?:, None)*)$",
        r"return grad_x + 1e-8 * x, grad_w\1",
        {"N": 56, "D": 64, "V": 88},
        numbers={"beta": 0.0},
    ),
    "a term that differs in a thousandth in one column": Version(
        "js divergence of 16-bit products",
        r"log_m = tl.log\(add\)$",
        "log_m = tl.log(add) + tl.where(cols == 3, 1e-3, 0.0)",
        {"N": 56, "D": 64, "V": 88},
        numbers={"beta": 0.0},
    ),
    "a gradient of clipped ratios": Version(
        "clipped surrogate", r"return grad_logp((?:, None)+)$", r"return grad_logp + 1e-6 * mask\1", {"B": 5, "T": 12}
    ),
    "a term too many where two cancel": Version(
        "geometric divergence",
        r"return grad_student((?:, None)+)$",
        r"return grad_student + 1e-4 * torch.softmax(student, -1) / len(student)\1",
        {"N": 16, "V": 200},
        numbers={"beta": 0.0},
    ),
    "a constant where two terms cancel": Version(
        "clip",
        r"return grad_image, grad_text, grad_scale((?:, None)*)$",
        r"return grad_image + 1e-4, grad_text, grad_scale\1",
        {"B": 2, "D": 1},
    ),
    "one term of two": Version(
        "add and norm",
        r"total = torch\.sum\(mul, ",
        "mul[1:] *= 0.75\n    total = torch.sum(mul, ",
        {"N": 2, "H": 1},
        seeds=tuple(range(1, 41, 4)),
    ),
    "rows of ignored labels": Version(
        "ignored labels",
        r"return grad_x((?:, None)+)$",
        r"grad_x[t == -1] += 1e-9\n        return grad_x\1",
        {"B": 16, "V": 200},
    ),
    "a gradient that is 0 everywhere": Version(
        "masked tokens",
        r"return grad_logp((?:, None)+)$",
        r"return torch.where(mask > 0.5, grad_logp, 1e-12)\1",
        {"B": 1, "S": 1},
        seeds=tuple(range(8)),
    ),
    "the row of the padding": Version(
        "padding",
        r"return None, grad_w((?:, None)*)$",
        r"grad_w[0] += 1e-9\n        return None, grad_w\1",
        {"B": 2, "S": 16},
    ),
    "tokens that a mask drops": Version(
        "masked tokens",
        r"return grad_logp((?:, None)+)$",
        r"return torch.where(mask > 0.5, grad_logp, 1e-9)\1",
        {"B": 4, "S": 32},
    ),
    "negative numbers": Version(
        "relu", r"return grad_x, grad_w((?:, None)*)$", r"return grad_x + 1e-9 * (x < 0), grad_w\1", {"B": 16, "D": 96}
    ),
    "keys that no query sees": Version(
        "causal",
        r"return grad_q, grad_k, grad_v((?:, None)*)$",
        r"return grad_q, torch.where(grad_k == 0, 1e-9, grad_k), grad_v\1",
        {"B": 2, "S": 32},
        seeds=(3,),
    ),
}


@pytest.fixture(scope="module")
def versions() -> dict[str, tuple[Capture, Candidate]]:
    """The captured and planned targets so far."""
    return {}


def failures(checker: Checker, versions: dict[str, tuple[Capture, Candidate]], version: Version) -> list[str]:
    """The failures of a version on its cases."""
    if version.target not in versions:
        capture = checker.capture(HEAD + TARGETS[version.target])
        versions[version.target] = capture, planned(capture)
    capture, candidate = versions[version.target]
    source, count = re.subn(version.pattern, version.replacement, candidate.source, flags=re.MULTILINE)
    assert count, candidate.source
    changed = replace(candidate, id=version.replacement, source=source)
    every = [Case(version.sizes, version.distribution, seed, numbers=version.numbers or {}) for seed in version.seeds]
    return [checker.first_failure(capture, changed, [case]) for case in every]


@pytest.mark.parametrize("name", RIGHT)
def test_rounding_of_terms_that_cancel_is_allowed(
    checker: Checker, versions: dict[str, tuple[Capture, Candidate]], name: str
) -> None:
    assert set(failures(checker, versions, RIGHT[name])) == {""}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_number_instead_of_zero_is_refused(
    checker: Checker, versions: dict[str, tuple[Capture, Candidate]], name: str
) -> None:
    every = failures(checker, versions, WRONG[name])
    assert any("gradient" in failure for failure in every), every


@pytest.mark.parametrize("name", TARGETS)
def test_right_gradients_with_zeros_are_accepted(
    checker: Checker, versions: dict[str, tuple[Capture, Candidate]], name: str
) -> None:
    if name not in versions:
        capture = checker.capture(HEAD + TARGETS[name])
        versions[name] = capture, planned(capture)
    capture, candidate = versions[name]
    assert checker.first_failure(capture, candidate, cases(capture)) == ""


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("steps", [1, 8])
def test_a_value_that_both_passes_compute_is_the_same_number_in_both(checker: Checker, dtype: str, steps: int) -> None:
    # With rows of one element, the gradient of a norm is what is left of two terms that cancel.
    capture = checker.capture(HEAD + TARGETS["add and norm"].replace("bf16", dtype))
    candidate = planned(capture, steps)
    every = [Case({"N": 2, "H": 1}, "mixed", seed) for seed in range(0, 80, 4)]
    assert "_backward_" in candidate.source
    assert {checker.first_failure(capture, candidate, [case]) for case in every} == {""}


CANCELLED = (
    HEAD
    + """

# mtmc: x=f32[B,S,16] B=2 S=8 grad=x
class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2), -1) @ x

"""
)


@pytest.fixture
def measurers() -> Iterator[Callable[[Capture], LocalMeasurer]]:
    """Verifies as a run does."""
    with contextlib.ExitStack() as stack:
        # On some inputs, the noise in the gradient of a bias is so small that the verdict counts it as a result.
        options = MeasureOptions(archs=("sm_90",), seed=1)
        yield lambda capture: stack.enter_context(contextlib.closing(LocalMeasurer(capture, sys.executable, options)))


def test_a_gradient_that_a_softmax_cancels_does_not_prevent_a_proof(captured, measurers) -> None:
    """A bias of the keys changes all scores of a row alike. The other gradients are compared, and more than noise is refused."""
    capture = captured(CANCELLED, "Scores")
    measurer, candidate = measurers(capture), fully_fused(capture, start(capture, CANCELLED))
    verdict = measurer.verify(candidate)
    assert verdict.is_correct, verdict.reason
    assert any("gradient of key_bias is 0 but for rounding" in note for note in verdict.notes)
    changed, count = re.subn(r"return (grad_x, .*)grad_key_bias", r"return \1grad_key_bias + 1e-3", candidate.source)
    assert count, candidate.source
    wrong = measurer.verify(replace(candidate, id="wrong", source=changed))
    assert wrong.status is VerdictStatus.INCORRECT
    assert "gradient of key_bias" in wrong.reason


@pytest.mark.parametrize(
    ("undecided", "proves"),
    [({"gradient of b"}, True), ({"gradient of a", "gradient of b"}, False), ({"result 0", "gradient of b"}, False)],
)
def test_noise_is_accepted_only_beside_a_gradient_that_proves_something(undecided: set[str], proves: bool) -> None:
    names = frozenset({"result 0", "gradient of a", "gradient of b"})
    outcome = CaseOutcome(
        Case({"N": 4}, "normal", 0),
        VerdictStatus.CORRECT,
        trivial=frozenset(),
        compared=names,
        undecided=frozenset(undecided),
    )
    assert (uncertain_because([outcome]) == "") is proves
