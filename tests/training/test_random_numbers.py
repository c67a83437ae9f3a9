"""Random numbers that training code draws: kernels read the numbers that eager mode draws, and the gradients are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtmc_lsp.core.errors import TargetUnsupported
from tests.codegen.checker import Checker
from tests.training.targets import HEAD, cases, planned
from tests.verify.test_float64_execution import oracle, sample

TARGETS = {
    "reparameterisation": """# mtmc: mu=f32[B,Z] log_var=f32[B,Z] B=8 Z=16 grad=mu,log_var
def f(mu, log_var):
    std = torch.exp(0.5 * log_var)
    return mu + torch.randn_like(std) * std, -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1).mean()
""",
    "normal in place": """# mtmc: mu=f32[B,Z] log_var=f32[B,Z] B=8 Z=16 grad=mu,log_var
def f(mu, log_var):
    return torch.empty_like(mu).normal_(0.5, 2.0) * log_var.exp() + mu
""",
    "policy": """# mtmc: mu=f32[B,A] log_std=f32[B,A] B=16 A=4 grad=mu,log_std
def f(mu, log_std):
    policy = torch.distributions.Normal(mu, log_std.exp(), validate_args=False)
    action = policy.rsample()
    return torch.tanh(action), policy.log_prob(action).sum(-1)
""",
    "gumbel softmax": """# mtmc: logits=f32[B,K] B=8 K=12 grad=logits
def f(logits):
    return F.gumbel_softmax(logits, tau=0.5)
""",
    "uniform noise in bfloat16": """# mtmc: x=bf16[N,E] w=f32[E] N=16 E=8 grad=x
def f(x, w):
    noise = torch.empty_like(x, dtype=torch.float32).uniform_(0.99, 1.01)
    return F.softmax(x.float() * noise * w, -1).to(x.dtype) + torch.rand_like(x)
""",
    "stochastic depth": """# mtmc: x=f32[B,T,D] y=f32[B,T,D] B=4 T=8 D=32 grad=x,y
def f(x, y, keep=0.75):
    mask = x.new_empty((x.shape[0], 1, 1)).bernoulli_(keep)
    return x + y * mask.div_(keep)
""",
    "steps of a diffusion": """# mtmc: x=f32[B,C,H,W] kept=f32[100] B=4 C=3 H=6 W=6 grad=x
def f(x, kept):
    t = torch.randint(0, kept.shape[0], (x.shape[0],), device=x.device)
    share, noise = kept[t].sigmoid()[:, None, None, None], torch.randn_like(x)
    return F.mse_loss(share.sqrt() * x + (1 - share).sqrt() * noise, noise)
""",
}

DROPPED = {
    "attention of torch": """# mtmc: q=f32[B,2,S,8] k=f32[B,2,S,8] v=f32[B,2,S,8] B=2 S=12 grad=q,k,v
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
""",
    "attention layer": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    # mtmc: x=f32[B,S,16] B=2 S=12 grad=x
    def forward(self, x):
        mixed, weights = self.attend(x, x, x)
        return F.dropout(x + mixed, 0.3, self.training), weights
""",
}


@pytest.mark.parametrize("name", DROPPED)
def test_probabilities_that_attention_drops_are_those_of_the_kernels(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + DROPPED[name])
    assert sum("dropout" in node.op for node in capture.graph.nodes) == (2 if name == "attention layer" else 1)
    assert checker.first_failure(capture, planned(capture), cases(capture)[:3]) == ""


@pytest.mark.parametrize("name", TARGETS)
def test_results_and_gradients_follow_from_the_numbers_of_eager_mode(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + TARGETS[name])
    assert capture.graph.backward is not None, capture.workload.assumed
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


def test_other_numbers_are_refused(checker: Checker) -> None:
    capture = checker.capture(HEAD + TARGETS["reparameterisation"])
    candidate = planned(capture)
    assert candidate.source.count("torch.ops.aten.randn.default(") == 1
    drawn_twice = candidate.source.replace(
        "torch.ops.aten.randn.default(", "torch.rand(1) * 0 + torch.ops.aten.randn.default("
    )
    assert checker.first_failure(capture, replace(candidate, source=drawn_twice), cases(capture)[:1]) != ""


def test_numbers_in_the_order_of_transposed_memory_are_refused(checker: Checker) -> None:
    text = "# mtmc: x=f32[B,D] B=16 D=24\ndef f(x):\n    return x.t() + torch.randn_like(x.t())\n"
    with pytest.raises(TargetUnsupported, match="randn_like") as raised:
        checker.capture(HEAD + text)
    assert "contiguous tensors" in raised.value.remedy


@pytest.mark.parametrize(
    "drawn",
    [
        torch.randn_like,
        lambda x: torch.rand_like(x, dtype=torch.float32),
        lambda x: torch.empty_like(x).normal_(1.0, 2.0),
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: x.new_empty(x.shape).bernoulli_(0.7),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_oracle_draws_the_numbers_of_the_users_dtype(
    drawn, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sample(dtype)
    found = oracle(lambda x: seeded(drawn, x), x, monkeypatch)
    assert torch.equal(found, seeded(drawn, x).double())


def seeded(drawn, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return drawn(x)
