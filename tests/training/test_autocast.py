"""Targets that run under ``torch.autocast``: kernels of both passes have its dtypes, and run only under the same autocast."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from tests.codegen.checker import Checker
from tests.codegen.checker import planned as fused
from tests.codegen.harness import some_cases
from tests.training.linear_losses import in_chunks
from tests.training.programs import run
from tests.training.targets import HEAD, cases, planned, text_of

TRAINED = {
    "a linear layer": """# mtmc: x=f32[B,32] w=f32[48,32] b=f32[48] B=16 autocast=f16 grad=x,w,b
def f(x, w, b):
    return F.softmax(F.gelu(F.linear(x, w, b)), -1)
""",
    "a linear layer in bfloat16": """# mtmc: x=f32[B,32] w=f32[48,32] B=16 autocast=bf16 grad=x,w
def f(x, w):
    return F.silu(x @ w.T)
""",
    "a block": """# mtmc: module=train x=f32[B,32] B=16 autocast=f16 grad=x
class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))
""",
    "regions inside": """# mtmc: x=f32[B,32] w=f32[32,32] v=f32[32,32] B=16 autocast=f16 grad=x,w,v
def f(x, w, v):
    h = x @ w
    with torch.autocast(x.device.type, enabled=False):
        y = (h.float() @ v).softmax(-1)
    with torch.no_grad():
        s = h.amax()
    return y * s, F.cross_entropy(h, torch.arange(x.shape[0], device=x.device))
""",
    "a custom function": """class Squared(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


# mtmc: x=f32[B,32] w=f32[32,32] B=16 autocast=f16 grad=x,w
def f(x, w):
    return Squared.apply(x @ w)
""",
}
CALLED = {
    "the caller's autocast": """# mtmc: x=f32[B,32] w=f32[48,32] b=f32[48] B=16 autocast=f16
def f(x, w, b):
    return F.softmax(F.gelu(F.linear(x, w, b)), -1)
""",
    "a region inside": """# mtmc: x=f32[B,32] w=f32[48,32] B=16
def f(x, w):
    with torch.autocast("cuda", torch.float16):
        y = F.gelu(F.linear(x, w))
    return F.softmax(y, -1)
""",
    "a decorator": """# mtmc: x=f32[B,32] w=f32[32,32] B=16
@torch.autocast("cuda", torch.float16)
def f(x, w):
    return F.gelu(x @ w) + 1
""",
    "attention": """# mtmc: q=f32[B,4,16,32] k=f32[B,4,16,32] v=f32[B,4,16,32] B=2 autocast=f16
def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2
""",
    "a convolution": """# mtmc: x=f32[B,4,16,16] w=f32[8,4,3,3] B=2 autocast=f16
def f(x, w):
    return F.relu(F.conv2d(x, w, padding=1)) * 2
""",
}
AS_ON_A_GPU = """
from mtmc_lsp.capture.worker.autocast.regions import gpu_autocast_on_cpu

stand_in = gpu_autocast_on_cpu()
stand_in.__enter__()


def trained(f, tensors, dtype=torch.float16, scale=1.0):
    \"\"\"The result of a call under autocast, and the gradients.\"\"\"
    with torch.autocast("cuda", dtype):
        y = f(*tensors)
    (y.float().sin().sum() * scale).backward()
    return y


def alike(mine, expected):
    assert mine.dtype == expected.dtype, (mine.dtype, expected.dtype)
    torch.testing.assert_close(mine, expected, rtol=4e-3, atol=4e-3 * float(expected.detach().abs().max()))


def arguments():
    return [torch.randn(shape, requires_grad=True) for shape in ((16, 32), (48, 32), (48,))]


"""
PROGRAMS = {
    "steps of an optimizer with a scaled loss": """
tensors = arguments()
parameters = [leaves(*tensors), leaves(*tensors)]
for f, each in zip((fast.f, user.f), parameters, strict=True):
    optimizer, scaler = torch.optim.SGD(each, lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = f(*each).sin().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
assert runs() == ["forward", "backward"] * 2
for mine, expected in zip(*parameters, strict=True):
    assert mine.grad.dtype == torch.float32
    alike(mine.grad, expected.grad)
    alike(mine, expected)
""",
    "accumulated gradients, and a backward pass under autocast": """
tensors = arguments()
a, b = leaves(*tensors), leaves(*tensors)
for f, each in ((fast.f, a), (user.f, b)):
    trained(f, each)
    with torch.autocast("cuda", torch.float16):
        f(*each).float().sin().sum().backward()
# The passes start once more to turn autocast off, if they call products of torch.
assert [name for name in dict.fromkeys(runs())] == ["forward", "backward"]
for mine, expected in zip(a, b, strict=True):
    alike(mine.grad, expected.grad)
""",
    "another autocast, and none": """
tensors = arguments()
for dtype in (torch.bfloat16, None):
    a, b = leaves(*tensors), leaves(*tensors)
    for f, each in ((fast.f, a), (user.f, b)):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            y = f(*each)
        y.float().sum().backward()
    assert runs() == [], dtype
    for mine, expected in zip(a, b, strict=True):
        assert torch.equal(mine.grad, expected.grad)
""",
    "a call without gradients": """
tensors = arguments()
with torch.no_grad(), torch.autocast("cuda", torch.float16):
    alike(fast.f(*tensors), user.f(*tensors))
assert runs() == ["forward"]
""",
    "activation checkpointing": """
from torch.utils.checkpoint import checkpoint

tensors = arguments()
for use_reentrant in (True, False):
    a, b = leaves(*tensors), leaves(*tensors)
    trained(lambda *each: checkpoint(fast.f, *each, use_reentrant=use_reentrant), a)
    assert runs() == ["forward", "forward", "backward"]
    trained(user.f, b)
    for mine, expected in zip(a, b, strict=True):
        alike(mine.grad, expected.grad)
""",
}


SLOW = {"a block", "regions inside"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TRAINED]
)
def test_both_passes_have_the_results_of_the_users_code_under_autocast(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + TRAINED[name])
    assert capture.graph.backward is not None, capture.workload.assumed
    assert capture.graph.autocast == capture.workload.autocast != ""
    gradients = {capture.graph.type_of(ref).dtype for ref in capture.graph.gradients}
    assert gradients == {"float32"}
    candidate = planned(capture)
    assert checker.first_failure(capture, candidate, cases(capture)) == ""


@pytest.mark.parametrize("name", CALLED)
def test_calls_without_gradients_under_autocast(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + CALLED[name])
    assert any(kind.dtype == "float16" for node in capture.graph.nodes for kind in node.outputs)
    assert checker.first_failure(capture, fused(capture), some_cases(capture)) == ""


def test_the_kernels_compile(checker: Checker) -> None:
    capture = checker.capture(HEAD + TRAINED["a linear layer in bfloat16"])
    assert checker.compile_errors(capture, planned(capture)) == []


def test_attention_stays_one_operator(checker: Checker) -> None:
    operators = [node.op for node in checker.capture(HEAD + CALLED["attention"]).graph.nodes]
    assert "aten.scaled_dot_product_attention.default" in operators


def test_the_decorators_autocast_is_told(checker: Checker) -> None:
    capture = checker.capture(HEAD + CALLED["a decorator"])
    assert capture.workload.assumed == (
        "the decorator of f runs its body under autocast with float16",
        "the process computes with autocast f16",
    )
    assert capture.graph.autocast == "float16"


def test_a_recurrent_layer_under_autocast_is_refused_with_a_remedy(checker: Checker) -> None:
    text = """# mtmc: x=f32[B,8,16] B=4 autocast=f16
class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]
"""
    with pytest.raises(TargetUnsupported) as caught:
        checker.capture(HEAD + text)
    assert "runs a recurrent layer under autocast" in caught.value.message
    assert "module.to(torch.bfloat16)" in caught.value.remedy


@pytest.fixture(scope="module")
def linear(checker: Checker) -> tuple[Capture, Candidate]:
    """A linear layer under autocast with the kernels of both passes."""
    capture = checker.capture(HEAD + TRAINED["a linear layer"])
    return capture, planned(capture)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_linear_layer_in_a_program(linear: tuple[Capture, Candidate], tmp_path: Path, name: str) -> None:
    capture, candidate = linear
    run(tmp_path, text_of(capture), candidate, AS_ON_A_GPU + PROGRAMS[name], replaces_autocast=False)


@pytest.mark.parametrize("early", [True, False])
def test_a_loss_in_chunks_under_autocast(checker: Checker, early: bool) -> None:
    text = """# mtmc: x=f32[N,D] weight=f32[V,D] target=i64[N]@0..199 N=48 D=32 V=200 autocast=bf16 grad=x,weight
def f(x, weight, target):
    return F.cross_entropy(F.linear(x, weight).float(), target)
"""
    capture = checker.capture(HEAD + text)
    candidate = in_chunks(capture, early=early)
    # Only the functions that a program calls turn autocast off, not the one for a chunk.
    assert candidate.source.count("enabled=False):") == (1 if early else 2)
    assert checker.first_failure(capture, candidate, cases(capture)) == ""
