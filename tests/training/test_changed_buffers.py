"""Buffers that the forward pass changes in place, such as running means: both passes are kernels if no gradient reads them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.codegen.checker import Checker
from tests.training.programs import run
from tests.training.targets import HEAD, cases, planned, text_of

CENTRE = """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.linspace(-1, 1, 24)[None])

    # mtmc: s=f32[B,24] t=f32[B,24] B=16 grad=s
    def forward(self, s, t):
        q = F.softmax((t - self.center) / 0.4, dim=-1).detach()
        loss = torch.sum(-q * F.log_softmax(s, dim=-1), dim=-1).mean()
        with torch.no_grad():
            self.center.mul_(0.9).add_(t.mean(0, keepdim=True), alpha=0.1)
        return loss
"""
CODEBOOK = """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.linspace(-2, 2, 16 * 8).view(16, 8).sin())
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", self.codes.clone())

    # mtmc: z=f32[B,8] B=24 grad=z
    def forward(self, z):
        distances = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.pow(2).sum(1)
        nearest = distances.argmin(1)
        chosen = F.embedding(nearest, self.codes)
        if self.training:
            once = F.one_hot(nearest, 16).type(z.dtype)
            self.counts.data.mul_(0.9).add_(once.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(once.t() @ z.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / (self.counts + 1e-3).unsqueeze(1))
        return z + (chosen - z).detach(), (chosen.detach() - z).pow(2).mean(), nearest
"""
PROGRAM = """
plain, fast_module = user.f(), fast.f()
for step in range(3):
    (s, t), = [leaves(torch.randn(16, 24, requires_grad=True), torch.randn(16, 24))]
    other, = leaves(s)
    plain(s, t).backward()
    fast_module(other, t).backward()
    assert runs() == ["forward", "backward"]
    close(other.grad, s.grad)
    close(fast_module.center, plain.center)
"""


@pytest.mark.parametrize("text", [CENTRE, CODEBOOK], ids=["centre", "codebook"])
def test_results_gradients_and_buffers_are_those_of_the_users_code(checker: Checker, text: str) -> None:
    capture = checker.capture(HEAD + text)
    assert capture.graph.backward is not None, capture.workload.assumed
    assert capture.graph.mutations
    candidate = planned(capture)
    assert "torch.autograd.Function" in candidate.source
    assert checker.first_failure(capture, candidate, cases(capture)) == ""


def test_a_training_program_with_a_running_mean(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + CENTRE)
    run(tmp_path, text_of(capture), planned(capture), PROGRAM)


def test_the_backward_pass_reads_no_changed_buffer_and_a_forgotten_change_is_refused(checker: Checker) -> None:
    capture = checker.capture(HEAD + CENTRE)
    candidate = planned(capture)
    passes = re.search(r"^def f_backward\(.*?(?=^class )", candidate.source, re.MULTILINE | re.DOTALL)
    assert passes is not None and not re.search(r"\bcenter\b", passes[0])
    first = '    """Forward pass of ``f`` with Triton kernels."""\n'
    assert candidate.source.count(first) == 1
    forgetful = candidate.source.replace(first, f"{first}    center = center.clone()\n")
    assert checker.first_failure(capture, replace(candidate, id="forgetful", source=forgetful), cases(capture)) != ""


def test_a_trained_module_is_in_training_mode_unless_the_directive_says_otherwise(checker: Checker) -> None:
    text = """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24)

    # mtmc: x=f32[B,24] B=16 grad=x
    def forward(self, x):
        return F.relu(self.norm(x))
"""
    modes = {
        form: checker.capture(HEAD + text.replace("grad=x", f"{form}")).workload.module.training
        for form in ("grad=x", "grad=x module=eval", "module=train", "")
    }
    assert modes == {"grad=x": True, "grad=x module=eval": False, "module=train": True, "": None}
