"""Batch norm in training mode: both passes are kernels, and the running statistics are updated as in eager mode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from tests.codegen.checker import Checker
from tests.training.programs import run
from tests.training.targets import HEAD, cases, planned, text_of

TRAINED = """

def model():
    return f().train()
"""
TARGETS: dict[str, str] = {
    "images": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    # mtmc: x=f32[B,8,6,6] B=4 grad=x
    def forward(self, x):
        return F.relu(self.norm(x))
""",
    "after a convolution": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, momentum=0.3)

    # mtmc: x=f32[B,3,7,7] B=3 grad=parameters
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))
""",
    "rows and a residual": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24, eps=1e-3)

    # mtmc: x=f32[B,24] B=32 grad=x
    def forward(self, x):
        return x + F.gelu(self.norm(x))
""",
    "without parameters": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24, affine=False)

    # mtmc: x=f32[B,24] B=32 grad=x
    def forward(self, x):
        return torch.tanh(self.norm(x))
""",
    "without statistics": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24, track_running_stats=False)

    # mtmc: x=f32[B,24] B=32 grad=x
    def forward(self, x):
        return torch.tanh(self.norm(x))
""",
}
FAULTS: dict[str, tuple[str, str]] = {
    "statistics that are not updated": (
        r"norm_running_mean, norm_running_var, out, n_cols",
        "norm_running_mean.clone(), norm_running_var.clone(), out, n_cols",
    ),
    "a call that is not counted": (r"norm_num_batches_tracked\.add_\(1\)", "pass"),
    "statistics of the running mean in the backward pass": (
        r"ctx\.save_for_backward\(x, norm_weight, out, batch_norm_1, ",
        "ctx.save_for_backward(x, norm_weight, out, norm_running_mean.clone(), ",
    ),
    "an update in the backward pass, too": (
        r"return grad_x, grad_norm_weight, grad_norm_bias, None, None, None\n",
        "return grad_x, grad_norm_weight, grad_norm_bias * 1.001, None, None, None\n",
    ),
}
PROGRAM = """
module, optimised = user.f().train(), fast.f().train()
optimised.load_state_dict(module.state_dict())
for each in (module, optimised):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
    for _ in range(3):
        (each(torch.randn(4, 8, 6, 6, requires_grad=True)) ** 2).mean().backward()
        optimizer.step()
assert runs() == ["forward", "backward"] * 3
for (name, mine), expected in zip(optimised.state_dict().items(), module.state_dict().values(), strict=True):
    close(mine.float(), expected.float())
assert int(optimised.norm.num_batches_tracked) == 3
# Under torch.compile the user's code runs, because the kernels change buffers.
x = torch.randn(4, 8, 6, 6)
close(torch.compile(optimised, backend="aot_eager", fullgraph=True)(x), module(x))
assert runs() == []
for mine, expected in zip(optimised.buffers(), module.buffers(), strict=True):
    close(mine.float(), expected.float())
# In evaluation mode the user's code runs.
close(optimised.eval()(x), module.eval()(x))
assert runs() == []
"""


@pytest.mark.parametrize("name", TARGETS)
def test_results_gradients_and_statistics_are_those_of_the_users_code(checker: Checker, name: str) -> None:
    capture, candidate = trained(checker, name)
    assert capture.graph.backward is not None, capture.workload.assumed
    assert len(capture.graph.mutations) == (0 if name == "without statistics" else 3)
    assert "torch.autograd.Function" in candidate.source
    assert checker.first_failure(capture, candidate, cases(capture)) == ""
    assert checker.compile_errors(capture, candidate) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused(checker: Checker, fault: str) -> None:
    capture, candidate = trained(checker, "images")
    source, count = re.subn(*FAULTS[fault], candidate.source)
    assert count, candidate.source
    assert checker.first_failure(capture, replace(candidate, id=fault, source=source), cases(capture)) != ""


def test_a_training_program(checker: Checker, tmp_path: Path) -> None:
    capture, candidate = trained(checker, "images")
    run(tmp_path, text_of(capture), candidate, PROGRAM)


def test_a_changed_buffer_that_gradients_depend_on_keeps_the_users_code(checker: Checker) -> None:
    text = """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(24))

    # mtmc: x=f32[B,24] B=32 grad=x
    def forward(self, x):
        y = x * self.scale.clone()
        self.scale.mul_(0.5)
        return torch.sin(y)
"""
    capture = checker.capture(HEAD + text)
    assert capture.graph.backward is None
    assert capture.workload.assumed[-1].endswith("run your code: the code changes scale in place")


def trained(checker: Checker, name: str) -> tuple[Capture, Candidate]:
    """A target in training mode, and its planned version."""
    capture = checker.capture(HEAD + TARGETS[name] + TRAINED)
    return capture, planned(capture)
