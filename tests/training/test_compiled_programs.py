"""Training programs under torch.compile: they run the kernels of both passes, without graph breaks."""

from __future__ import annotations

import re
from pathlib import Path

from mtmc_lsp.core.run import Candidate
from tests.codegen.checker import Checker
from tests.training.linear_losses import SCALAR_LOSSES, in_chunks
from tests.training.programs import run
from tests.training.targets import HEAD, MODULES, TARGETS, planned, text_of

COMPILED = """
def step(f, tensors):
    tensors = leaves(*tensors)
    loss = (f(*[t * 1 if t.requires_grad else t for t in tensors]) ** 2).sum()
    loss.backward()
    return [loss, *(t.grad for t in tensors)]


def training(f):
    def loss(*tensors):
        return (f(*[t * 1 if t.requires_grad else t for t in tensors]) ** 2).sum()

    return torch.compile(loss, backend="aot_eager", fullgraph=True)


def check(*tensors):
    expected = step(user.f, tensors)
    compiled = training(fast.f)
    tensors = leaves(*tensors)
    loss = compiled(*tensors)
    loss.backward()
    for a, b in zip([loss, *(t.grad for t in tensors)], expected, strict=True):
        close(a, b)
    return compiled
"""
NORM = """
check(*x_w())
assert runs() == ["forward", "backward"]
# Another number of rows is compiled again with symbolic sizes.
check(*x_w(7))
check(*x_w(9))
assert runs() == ["forward", "backward"] * 2
x, w = x_w()
with torch.no_grad():
    close(torch.compile(fast.f, backend="aot_eager", fullgraph=True)(x, w), user.f(x, w))
assert runs() == ["forward"]
# The operators have the results that they promise.
x, w = x.detach(), w.detach()
out, rstd = fast.f_forward_triton(x, w, 1e-6)
tests = ("test_schema", "test_faketensor")
torch.library.opcheck(fast.f_forward_triton, (x, w, 1e-6), test_utils=tests)
torch.library.opcheck(fast.f_backward_triton, (x, w, rstd, out), test_utils=tests)
"""
ATTENTION = """
q, k, v = (torch.randn(2, 32, 32, requires_grad=True) for _ in range(3))
check(q, k, v)
assert runs() == ["forward", "backward"]
q, k, v = (t.detach() for t in (q, k, v))
out, *saved = fast.f_forward_triton(q, k, v)
torch.library.opcheck(fast.f_backward_triton, (q, k, v, *saved, out, out), test_utils=("test_schema", "test_faketensor"))
"""
SUM = """
a, b = torch.randn(16, 96, requires_grad=True), torch.randn(16, 96, requires_grad=True)
check(a, b)
assert runs() == ["forward", "backward"]
"""
MODULE = """
x, module = torch.randn(32, 32), user.f()
expected = copy.deepcopy(module)
(expected(x) ** 2).sum().backward()
optimised = fast.f()
optimised.load_state_dict(module.state_dict())
compiled = torch.compile(optimised, backend="aot_eager", fullgraph=True)
for _ in range(2):
    (compiled(x) ** 2).sum().backward()
assert runs() == ["forward", "backward"] * 2
for a, b in zip(optimised.parameters(), expected.parameters(), strict=True):
    close(a.grad, 2 * b.grad)
"""
LOSS = """
x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(200, 32, requires_grad=True)
target = torch.randint(0, 200, (16,))
compiled = check(x, weight, target)
assert runs() == ["forward"], launched
# A second backward pass of the same call; torch.compile allows that with this setting alone.
torch._functorch.config.donated_buffer = False
a, b = leaves(x, weight)
loss = training(fast.f)(a, b, target)
loss.backward(retain_graph=True)
loss.backward()
for mine, expected in zip((a, b), step(user.f, (x, weight, target))[1:], strict=False):
    close(mine.grad, 2 * expected)
runs()
# Without gradients, the compiled program runs the user's code.
with torch.no_grad():
    close(torch.compile(fast.f, backend="aot_eager", fullgraph=True)(x, weight, target), user.f(x, weight, target))
assert runs() == []
"""
NO_OPERATOR = """
check(*x_w())
assert runs() == []
step(fast.f, x_w())
assert runs() == ["forward", "backward"]
"""


def checked(checker: Checker, folder: Path, text: str, program: str) -> Candidate:
    """Run a program with the planned version of a target."""
    capture = checker.capture(HEAD + text)
    candidate = planned(capture)
    run(folder, text_of(capture), candidate, COMPILED + program)
    return candidate


def guard_of(candidate: Candidate) -> str:
    """The source of the guard."""
    return candidate.source.partition("def f_fits(")[2].partition("\n\n\n")[0]


def test_a_compiled_loss_runs_both_passes_as_operators(checker: Checker, tmp_path: Path) -> None:
    candidate = checked(checker, tmp_path, TARGETS["rms norm"], NORM)
    assert "is_compiling()" not in guard_of(candidate)


def test_gradients_with_other_strides(checker: Checker, tmp_path: Path) -> None:
    checked(checker, tmp_path, TARGETS["attention"], ATTENTION)


def test_gradients_that_are_one_tensor(checker: Checker, tmp_path: Path) -> None:
    text = "# mtmc: a=f32[B,D] b=f32[B,D] B=16 D=96 grad=a,b\ndef f(a, b):\n    return torch.sin(a + b)\n"
    candidate = checked(checker, tmp_path, text, SUM)
    assert re.search(r"\n        return (grad_\w), \1, None\n", candidate.source)


def test_parameters_of_a_compiled_module(checker: Checker, tmp_path: Path) -> None:
    checked(checker, tmp_path, MODULES["perceptron"], MODULE)


def test_a_loss_whose_forward_pass_computes_the_gradients(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    run(tmp_path, text_of(capture), in_chunks(capture, early=True), COMPILED + LOSS)


def test_chunks_in_both_passes(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    program = LOSS.partition("# A second")[0].replace('["forward"]', '["forward", "backward"]')
    run(tmp_path, text_of(capture), in_chunks(capture), COMPILED + program)


def test_a_gradient_that_is_the_upstream_gradient_leaves_the_users_code(checker: Checker, tmp_path: Path) -> None:
    text = "# mtmc: x=f32[B,D] w=f32[D] B=16 D=96 grad=x,w\ndef f(x, w):\n    return x + torch.sin(w)\n"
    candidate = checked(checker, tmp_path, text, NO_OPERATOR)
    assert "not torch.compiler.is_compiling()" in guard_of(candidate)
