"""What training programs do with autograd: each runs the same with the kernels, or runs the original code."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from tests.codegen.checker import Checker
from tests.training.linear_losses import SCALAR_LOSSES, in_chunks
from tests.training.programs import run
from tests.training.targets import HEAD, MODULES, TARGETS, planned, text_of

FUNCTION: dict[str, str] = {
    "gradients are added to those that exist": """
x, w = x_w()
a, b = leaves(x, w), leaves(x, w)
for _ in range(3):
    fast.f(*a).sin().sum().backward()
    user.f(*b).sin().sum().backward()
assert runs() == ["forward", "backward"] * 3
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
""",
    "a graph that is kept for two backward passes": """
x, w = x_w()
a, b = leaves(x, w), leaves(x, w)
for f, tensors in ((fast.f, a), (user.f, b)):
    out = f(*tensors)
    out.sin().sum().backward(retain_graph=True)
    out.cos().sum().backward()
assert runs() == ["forward", "backward", "backward"]
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
    # The second pass needs the graph.
try:
    out.sum().backward()
except RuntimeError as error:
    assert "second time" in str(error)
""",
    "inputs that get no gradient": """
x, w = x_w()
for x_trains, w_trains in ((True, False), (False, True)):
    a = [x.detach().requires_grad_(x_trains), w.detach().requires_grad_(w_trains)]
    b = leaves(*a)
    fast.f(*a).sin().sum().backward()
    user.f(*b).sin().sum().backward()
    assert runs() == ["forward", "backward"]
    for mine, expected in zip(a, b, strict=True):
        close(mine.grad, expected.grad)
out = fast.f(x.detach(), w.detach())
assert not out.requires_grad
""",
    "an input that the result is not asked about": """
x, w = x_w()
unused = torch.randn(3, requires_grad=True)
out = fast.f(x, w).sum()
assert torch.autograd.grad(out, [unused, x], allow_unused=True, retain_graph=True)[0] is None
close(torch.autograd.grad(out, [w])[0], torch.autograd.grad(user.f(x, w).sum(), [w])[0])
""",
    "an input that is changed in place between the passes": """
x, w = x_w()
y = x * 1
out = fast.f(y, w).sum()
y.mul_(2)
try:
    out.backward()
except RuntimeError as error:
    assert "modified by an inplace operation" in str(error), error
else:
    raise AssertionError("no error")
# A result may be changed.
a, b = leaves(x, w), leaves(x, w)
fast.f(*a).mul_(3).sum().backward()
user.f(*b).mul_(3).sum().backward()
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
""",
    "activation checkpointing": """
from torch.utils.checkpoint import checkpoint

x, w = x_w()
for use_reentrant in (True, False):
    a, b = leaves(x, w), leaves(x, w)
    (checkpoint(fast.f, *a, use_reentrant=use_reentrant) ** 2).sum().backward()
    assert runs() == ["forward", "forward", "backward"]
    (user.f(*b) ** 2).sum().backward()
    for mine, expected in zip(a, b, strict=True):
        close(mine.grad, expected.grad)
""",
    "hooks on saved tensors": """
from torch.autograd.graph import saved_tensors_hooks

x, w = x_w()
packed = []
a, b = leaves(x, w), leaves(x, w)
with saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
    out = fast.f(*a).sum()
out.backward()
user.f(*b).sum().backward()
assert len(packed) == 3
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
""",
    "numerical gradients in double precision": """
x, w = x_w(3, 5)
assert torch.autograd.gradcheck(fast.f, (x.double().detach().requires_grad_(), w.double().detach().requires_grad_()))
# float64 is outside the guard: the original code runs.
assert runs() == []
# The kernels, against differences of the original code in float64.
step = 1e-6
x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
fast.f(x, w).sum().backward()
assert runs() == ["forward", "backward"]
for tensor, place in ((x, (1, 2)), (x, (2, 4)), (w, (3,))):
    sides = []
    for sign in (1, -1):
        moved = {id(t): t.detach().double().clone() for t in (x, w)}
        moved[id(tensor)][place] += sign * step
        sides.append(user.f(moved[id(x)], moved[id(w)]).sum())
    numerical = (sides[0] - sides[1]) / (2 * step)
    assert abs(float(numerical - tensor.grad[place])) < 1e-4, (numerical, tensor.grad[place])
""",
    "second derivatives are those of the original code": """
x, w = x_w(4, 8)
a, b = leaves(x, w), leaves(x, w)
for f, tensors in ((fast.f, a), (user.f, b)):
    gradients = torch.autograd.grad(f(*tensors).sin().sum(), tensors, create_graph=True)
    sum((gradient**2).sum() for gradient in gradients).backward()
# The gradients of the sine's input are those of the first call.
assert runs() == ["forward", "backward"]
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
functional = torch.autograd.functional
for transform in (functional.hessian, lambda f, w: functional.hvp(f, w, torch.ones_like(w))[1]):
    close(transform(lambda w: fast.f(x, w).sin().sum(), w), transform(lambda w: user.f(x, w).sin().sum(), w))
# A tensor that other operations computed, and whose gradient flows on.
results = []
for f in (fast.f, user.f):
    p = w.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x.detach() * p, p).sin().sum(), [p], create_graph=True)
    results.append(torch.autograd.grad((g**3).sum(), [p])[0])
close(*results)
""",
    "gradients for several upstream gradients at once": """
x, w = x_w(4, 8)
jacobian = torch.autograd.functional.jacobian
mine, expected = (jacobian(lambda w: f(x, w).sum(0), w, vectorize=True) for f in (fast.f, user.f))
close(mine, expected)
results = [torch.autograd.grad(f(x, w).sum(0), [x, w], torch.eye(8), is_grads_batched=True) for f in (fast.f, user.f)]
for mine, expected in zip(*results, strict=True):
    close(mine, expected)
""",
    "torch.func and forward mode run the original code": """
x, w = x_w()
close(torch.func.grad(lambda x: fast.f(x, w).sum())(x), torch.func.grad(lambda x: user.f(x, w).sum())(x))
close(torch.func.vmap(lambda x: fast.f(x[None], w)[0])(x), user.f(x, w))
tangent = torch.ones_like(x)
mine, expected = (torch.func.jvp(lambda x: f(x, w), (x,), (tangent,)) for f in (fast.f, user.f))
close(mine[1], expected[1])
with torch.autograd.forward_ad.dual_level():
    dual = fast.f(torch.autograd.forward_ad.make_dual(x, tangent), w)
    close(torch.autograd.forward_ad.unpack_dual(dual).tangent, expected[1])
hessian = torch.func.hessian(lambda w: fast.f(x, w).sin().sum())(w)
close(hessian, torch.func.hessian(lambda w: user.f(x, w).sin().sum())(w))
assert runs() == []
""",
    "a scaled loss": """
x, w = x_w()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
parameters = [leaves(x, w), leaves(x, w)]
for f, tensors in zip((fast.f, user.f), parameters, strict=True):
    optimizer = torch.optim.SGD(tensors, lr=1e-4)
    scaler.scale(f(*tensors).sin().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
assert runs() == ["forward", "backward"]
for mine, expected in zip(*parameters, strict=True):
    close(mine.grad, expected.grad)
    close(mine, expected)
# An infinite gradient stays infinite or NaN, so that the scaler skips the step.
a = leaves(x, w)
(fast.f(*a).sum() * float("inf")).backward()
assert not bool(a[0].grad.isfinite().all())
""",
    "autocast runs the original code": """
x, w = x_w()
parameters = [leaves(x, w), leaves(x, w)]
head = torch.randn(96, 8)
for f, tensors in zip((fast.f, user.f), parameters, strict=True):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = f(*tensors)
        loss = (out @ head).float().sum()
    loss.backward()
assert runs() == []
for mine, expected in zip(*parameters, strict=True):
    assert mine.grad.dtype == mine.dtype
    close(mine.grad, expected.grad)
""",
}
PRODUCT = """
# The forward pass runs as kernels, and the backward pass is called under autocast.
q, k, v = (torch.randn(2, 32, 32, requires_grad=True) for _ in range(3))
a, b = leaves(q, k, v), leaves(q, k, v)
out = fast.f(*a).sin().sum()
with torch.autocast("cpu", dtype=torch.bfloat16):
    out.backward()
assert runs() == ["forward", "backward"]
user.f(*b).sin().sum().backward()
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
# A call under autocast has the dtypes of eager mode.
c, d = leaves(q, k, v), leaves(q, k, v)
for f, tensors in ((fast.f, c), (user.f, d)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = f(*tensors)
    assert out.dtype == torch.bfloat16
    out.float().sin().sum().backward()
assert runs() == []
for mine, expected in zip(c, d, strict=True):
    assert mine.grad.dtype == torch.float32
    close(mine.grad, expected.grad)
"""
LOSS: dict[str, str] = {
    "a scaled and accumulated loss": """
x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(200, 32, requires_grad=True)
a, b = leaves(x, weight), leaves(x, weight)
for scale in (2.0**16, 0.25):
    target = torch.randint(0, 200, (16,))
    (fast.f(*a, target) * scale).backward()
    (user.f(*b, target) * scale).backward()
assert runs() == ["forward", "forward"]
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, expected.grad)
""",
    "checkpointing and a kept graph": """
from torch.utils.checkpoint import checkpoint

x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(200, 32, requires_grad=True)
target = torch.randint(0, 200, (16,))
for use_reentrant in (True, False):
    a, b = leaves(x, weight), leaves(x, weight)
    checkpoint(fast.f, *a, target, use_reentrant=use_reentrant).backward()
    loss = user.f(*b, target)
    loss.backward()
    for mine, expected in zip(a, b, strict=True):
        close(mine.grad, expected.grad)
a = leaves(x, weight)
loss = fast.f(*a, target)
loss.backward(retain_graph=True)
loss.backward()
for mine, expected in zip(a, b, strict=True):
    close(mine.grad, 2 * expected.grad)
""",
}
PENALTY = """
# A gradient penalty, of the input and of the parameters.
torch.manual_seed(1)
module, optimised = user.f(), fast.f()
optimised.load_state_dict(module.state_dict())
results = []
for each in (module, optimised):
    torch.manual_seed(2)
    x = torch.randn(32, 32, requires_grad=True)
    (g,) = torch.autograd.grad(each(x).square().mean(), [x], create_graph=True)
    (g.norm(dim=1) - 1).square().mean().backward()
    results.append([x.grad, *(parameter.grad for parameter in each.parameters())])
assert "forward" in runs()
for mine, expected in zip(*results, strict=True):
    close(mine, expected)
assert all(type(parameter) is nn.Parameter for parameter in optimised.parameters())
"""
FREED = """
bias = torch.randn(96, requires_grad=True)
x = torch.randn(4, 96, requires_grad=True)
out = fast.f(x * 1, bias)
assert runs() == ["forward"]
for changes in (False, True):
    y = x * 1
    out = fast.f(y, bias)
    if changes:
        y.mul_(2)
    else:
        del y
    try:
        torch.autograd.grad(out.sum(), [bias], create_graph=True)
    except RuntimeError as error:
        assert "need an input that was freed or changed after the call" in str(error), error
    else:
        raise AssertionError("no error")
"""
RANDOM = """
x, w = x_w()
try:
    torch.autograd.grad(fast.f(x).sum(), [x], create_graph=True)
except RuntimeError as error:
    text = "f: its kernels have no second derivatives (create_graph=True); leave grad= out of its directive"
    assert str(error) == text, error
else:
    raise AssertionError("no error")
"""
MODULE = """
from torch.utils.checkpoint import checkpoint

module = user.f()
optimised = fast.f()
optimised.load_state_dict(module.state_dict())
x = torch.randn(32, 32)
for each in (module, optimised):
    optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
    for number in range(4):
        out = checkpoint(each, x, use_reentrant=False) if number == 3 else each(x)
        (out**2).mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
assert runs().count("backward") == 4
for mine, expected in zip(optimised.parameters(), module.parameters(), strict=True):
    close(mine, expected)
"""


@pytest.fixture(scope="module")
def norm(checker: Checker) -> tuple[Capture, Candidate]:
    """The norm with the kernels of both passes."""
    capture = checker.capture(HEAD + TARGETS["rms norm"])
    return capture, planned(capture)


@pytest.mark.parametrize("name", FUNCTION)
def test_a_norm_in_a_program(norm: tuple[Capture, Candidate], tmp_path: Path, name: str) -> None:
    capture, candidate = norm
    run(tmp_path, text_of(capture), candidate, FUNCTION[name])


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", LOSS)
def test_a_loss_in_chunks_in_a_program(checker: Checker, tmp_path: Path, name: str, early: bool) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    program = LOSS[name] if early else LOSS[name].replace('["forward", "forward"]', '["forward", "backward"] * 2')
    run(tmp_path, text_of(capture), in_chunks(capture, early=early), program)


def test_a_module_that_an_optimizer_trains(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + MODULES["perceptron"])
    run(tmp_path, text_of(capture), planned(capture), MODULE)


def test_products_under_autocast(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + TARGETS["attention"])
    run(tmp_path, text_of(capture), planned(capture), PRODUCT)


def test_a_gradient_penalty_of_a_module(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + MODULES["perceptron"])
    run(tmp_path, text_of(capture), planned(capture), PENALTY)


def test_second_derivatives_of_a_loss_whose_forward_pass_computes_gradients(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + SCALAR_LOSSES["cross entropy"])
    program = """
x, weight = torch.randn(16, 32, requires_grad=True), torch.randn(200, 32, requires_grad=True)
target = torch.randint(0, 200, (16,))
results = []
for f in (fast.f, user.f):
    a = leaves(x, weight)
    g = torch.autograd.grad(f(*a, target), a, create_graph=True)
    results.append(torch.autograd.grad(sum((each**2).sum() for each in g), a))
for mine, expected in zip(*results, strict=True):
    close(mine, expected)
"""
    run(tmp_path, text_of(capture), in_chunks(capture, early=True), program)


def test_second_derivatives_do_not_keep_inputs_alive(checker: Checker, tmp_path: Path) -> None:
    text = "# mtmc: x=f32[B,D] b=f32[D] B=4 D=96 grad=x,b\ndef f(x, b):\n    return torch.tanh(x + b)\n"
    capture = checker.capture(HEAD + text)
    candidate = planned(capture)
    assert "ctx.save_for_backward(out)" in candidate.source
    run(tmp_path, text_of(capture), candidate, FREED)


def test_second_derivatives_of_random_operations_are_an_error(checker: Checker, tmp_path: Path) -> None:
    text = "# mtmc: x=f32[B,D] B=16 D=96 grad=x\ndef f(x):\n    return torch.tanh(F.dropout(x, 0.5))\n"
    capture = checker.capture(HEAD + text)
    run(tmp_path, text_of(capture), planned(capture), RANDOM)
