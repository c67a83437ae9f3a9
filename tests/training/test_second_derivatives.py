"""Second derivatives of other targets: under autocast, with containers, and of modules with tied weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.checker import Checker
from tests.training.programs import run
from tests.training.targets import HEAD, planned, text_of

TARGETS = {
    "autocast": """# mtmc: x=f32[B,32] w=f32[48,32] B=16 autocast=f16 grad=x,w
def f(x, w):
    return torch.tanh(F.linear(x, w))
""",
    "containers": """# mtmc: rope=(f32[B,32],f32[32]) flag=True B=16 grad=rope[0]
def f(rope, *, flag=False, scale=1.5):
    return {"a": torch.tanh(rope[0] * rope[1]) * scale if flag else rope[0], "b": [rope[0].sin()]}
""",
    "tied weights": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.layers[1].weight = self.layers[0].weight

    # mtmc: x=f32[B,32] B=16 grad=x
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x
""",
}
PROGRAMS = {
    "autocast": """
from mtmc_lsp.capture.worker.autocast.regions import gpu_autocast_on_cpu

stand_in = gpu_autocast_on_cpu()
stand_in.__enter__()
x, w = torch.randn(16, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
results = []
for f in (fast.f, user.f):
    a = leaves(x, w)
    with torch.autocast("cuda", torch.float16):
        y = f(*a)
    g = torch.autograd.grad(y.float().sin().sum(), a, create_graph=True)
    results.append([*g, *torch.autograd.grad(sum((each**2).sum() for each in g), a)])
assert "forward" in runs()
for mine, expected in zip(*results, strict=True):
    assert mine.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(mine, expected, rtol=1e-2, atol=1e-2 * float(expected.detach().abs().max()))
""",
    "containers": """
x, w = torch.randn(16, 32, requires_grad=True), torch.randn(32)
results = []
for f in (fast.f, user.f):
    (a,) = leaves(x)
    y = f((a, w), flag=True, scale=0.7)
    (g,) = torch.autograd.grad(y["a"].sin().sum() + (y["b"][0] ** 2).sum(), [a], create_graph=True)
    results.append(torch.autograd.grad((g**2).sum(), a)[0])
assert "forward" in runs()
close(*results)
""",
    "tied weights": """
module, optimised = user.f(), fast.f()
optimised.load_state_dict(module.state_dict())
x = torch.randn(16, 32, requires_grad=True)
results = []
for each in (module, optimised):
    (a,) = leaves(x)
    (g,) = torch.autograd.grad(each(a).sin().sum(), [a], create_graph=True)
    results.append([g, *torch.autograd.grad((g**2).sum(), [a, *each.parameters()])])
assert "forward" in runs()
for mine, expected in zip(*results, strict=True):
    close(mine, expected)
""",
}


@pytest.mark.parametrize("name", TARGETS)
def test_second_derivatives_are_those_of_the_users_code(checker: Checker, tmp_path: Path, name: str) -> None:
    capture = checker.capture(HEAD + TARGETS[name])
    run(tmp_path, text_of(capture), planned(capture), PROGRAMS[name], replaces_autocast=False)
