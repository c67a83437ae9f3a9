"""Targets with a backward pass, and how tests plan and check them."""

from __future__ import annotations

from pathlib import Path

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.verify.cases import FORWARD, Case
from mtmc_lsp.verify.worker.run_target import UPSTREAM
from tests.codegen.checker import start

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
TARGETS: dict[str, str] = {
    "rms norm": """# mtmc: x=f32[B,D] weight=f32[D] B=16 D=96 grad=x,weight
def f(x, weight, eps=1e-6):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * rstd * weight
""",
    "layer norm": """# mtmc: x=f32[B,D] w=f32[D] b=f32[D] B=16 D=96 grad=x,w,b
def f(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)
""",
    "group norm": """# mtmc: x=bf16[B,12,L] w=bf16[12] b=bf16[12] B=2 L=10 grad=x,w,b
def f(x, w, b):
    return x + F.group_norm(x, 3, w, b, eps=1e-6)
""",
    "group norm without weights": """# mtmc: x=f32[B,C,H,W] B=2 C=6 H=5 W=4 grad=x
def f(x):
    return F.relu(F.group_norm(x, 1))
""",
    "adaptive pooling": """# mtmc: x=f32[B,3,H,W] B=2 H=8 W=6 grad=x
def f(x):
    return F.adaptive_avg_pool2d(F.silu(x), (4, 2)) * 2
""",
    "special functions": """# mtmc: x=f32[B,D] y=f32[B,D]@0.1..0.9 B=16 D=96 grad=x,y
def f(x, y):
    gammas = torch.lgamma(y + x.abs()) + torch.digamma(y + 1)
    errors = torch.erfinv(y) + torch.special.ndtri(y) + torch.special.erfcx(x) + torch.special.log_ndtr(x)
    return gammas + errors + torch.special.i0e(x) + torch.special.i1(x) + torch.special.xlog1py(x, y)
""",
    "deviations": """# mtmc: x=f32[B,D] B=16 D=96 grad=x
def f(x):
    mean, var = x.mean(0), x.var(0, unbiased=False)
    return (x - x.mean(-1, keepdim=True)) / (x.std(dim=-1, keepdim=True) + 1e-5), mean, torch.sqrt(var + 1e-4)
""",
    "deviation with its mean": """# mtmc: x=bf16[B,C,L] B=3 C=12 L=20 grad=x
def f(x):
    std, mean = torch.std_mean(x, (1, 2), keepdim=True)
    return (x - mean) * (std + 1e-3).reciprocal()
""",
    "names of the autograd function": """# mtmc: ctx=f32[B,D] original=f32[B,D] B=16 D=96 grad=ctx
def f(ctx, original):
    return torch.tanh(ctx + original), (ctx - original).square().mean()
""",
    "gelu": """# mtmc: x=f32[B,D] bias=f32[D] B=16 D=96 grad=x,bias
def f(x, bias):
    return F.gelu(x + bias)
""",
    "gated": """# mtmc: a=f32[B,D] b=f32[B,D] B=16 D=96 grad=a,b
def f(a, b):
    return F.silu(a) * b
""",
    "rotary": """# mtmc: q=f32[B,S,32] c=f32[S,32] s=f32[S,32] B=2 S=16 grad=q
def f(q, c, s):
    a, b = q.chunk(2, -1)
    return q * c + torch.cat((-b, a), -1) * s
""",
    "cross entropy": """# mtmc: x=f32[B,V] t=i64[B]@0..199 B=16 V=200 grad=x
def f(x, t):
    return F.cross_entropy(x, t)
""",
    "ignored classes": """# mtmc: x=f32[B,V] t=i64[B]@-1..199 B=16 V=200 grad=x
def f(x, t):
    return F.cross_entropy(x, t, ignore_index=-1, reduction="sum")
""",
    "smoothed cross entropy": """# mtmc: logits=f32[B,V] t=i64[B]@0..199 B=16 V=200 grad=logits
def f(logits, t):
    logp = F.log_softmax(logits, -1)
    nll = -logp.gather(-1, t[:, None]).squeeze(-1)
    return (0.9 * nll - 0.1 * logp.mean(-1)).mean()
""",
    "mean squares": """# mtmc: x=f32[B,D] y=f32[B,D] B=16 D=96 grad=x,y
def f(x, y):
    return F.mse_loss(x, y) + F.huber_loss(x, y, delta=0.7)
""",
    "smooth absolute values": """# mtmc: x=f16[B,D] y=f16[B,D] B=16 D=96 grad=x
def f(x, y):
    return F.smooth_l1_loss(x, y, beta=0.5)
""",
    "divergence": """# mtmc: x=f32[B,V] t=f32[B,V] B=16 V=64 grad=x
def f(x, t):
    return F.kl_div(F.log_softmax(x, -1), F.softmax(t, -1), reduction="batchmean")
""",
    "numbers in gradients": """# mtmc: x=f32[B,V] y=f32[B,V] B=16 V=64 grad=x,y
def f(x, y, gamma=2.5, weight=0.3):
    p = torch.sigmoid(x)
    return (1 - p) ** gamma * torch.lerp(p, y, weight)
""",
    "focal": """# mtmc: x=f32[B,V] t=f32[B,V]@0..1 B=16 V=64 grad=x
def f(x, t):
    p = torch.sigmoid(x)
    c = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    return (c * (1 - (p * t + (1 - p) * (1 - t))) ** 2).mean()
""",
    "policy gradient with an entropy bonus": """# mtmc: logits=f32[B,A] act=i64[B]@0..5 adv=f32[B] B=16 A=6 grad=logits
def f(logits, act, adv):
    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
    return -(policy.log_prob(act) * adv).mean() - 0.01 * policy.entropy().mean()
""",
    "two results": """# mtmc: x=f32[B,D] w=f32[D] B=16 D=96 grad=x,w
def f(x, w):
    h = torch.tanh(x * w)
    return h * 2, h.sum(-1)
""",
    "a result without gradient": """# mtmc: x=f32[B,D] B=16 D=96 grad=x
def f(x):
    y = x * x
    return y, y.argmax(-1)
""",
    "cut off": """# mtmc: x=f32[B,D] w=f32[D] B=16 D=96 grad=x
def f(x, w):
    with torch.no_grad():
        scale = torch.sigmoid(x)
    return scale * x + w.detach()
""",
    "changed in place": """# mtmc: x=f32[B,D] B=16 D=96 grad=x
def f(x):
    y = x * 2
    y.relu_()
    return y + 1
""",
    "own gradient": """class Leaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, g, 0.1 * g)


# mtmc: x=f32[B,D] B=16 D=96 grad=x
def f(x):
    return Leaky.apply(x) * 2
""",
    "bfloat16": """# mtmc: x=bf16[B,D] w=bf16[D] B=16 D=96 grad=x,w
def f(x, w):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w
""",
    "embedding": """# mtmc: i=i64[B,S]@0..49 w=f32[50,32] B=2 S=8 grad=w
def f(i, w):
    return torch.tanh(F.embedding(i, w)) * 2
""",
    "broadcast operands": """# mtmc: x=f32[B,S,D] a=f32[S,D] b=f32[1] B=2 S=8 D=32 grad=x,a,b
def f(x, a, b):
    return torch.exp(-x * a) + b
""",
    "a number at run time": """# mtmc: x=f32[B,D] scale=0.5 B=16 D=96 grad=x
def f(x, scale):
    return torch.sin(x * scale) / scale
""",
    "contrastive": """# mtmc: a=f32[B,D] b=f32[B,D] B=16 D=32 grad=a,b
def f(a, b):
    logits = F.normalize(a, dim=-1) @ b.t()
    labels = torch.arange(logits.shape[0], device=a.device)
    return F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)
""",
    "attention": """# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=2 S=32 grad=q,k,v
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
""",
}
MODULES: dict[str, str] = {
    "perceptron": """class f(nn.Module):
    def __init__(self, d=32, h=64):
        super().__init__()
        self.up, self.down = nn.Linear(d, h), nn.Linear(h, d)

    # mtmc: x=f32[B,32] B=32 grad=x
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))
""",
    "module with a group norm": """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    # mtmc: x=f32[B,16,H,W] B=2 H=6 W=8 grad=x
    def forward(self, x):
        return F.silu(self.norm(x))
""",
    "batch norm in evaluation mode": """class f(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.norm = nn.BatchNorm2d(c)

    # mtmc: x=f32[B,8,6,6] B=4 grad=x module=eval
    def forward(self, x):
        return F.relu(self.norm(x))
""",
    "parameters alone": """class f(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm, self.frozen = nn.LayerNorm(d), nn.Parameter(torch.ones(d), requires_grad=False)

    # mtmc: x=f32[B,32] B=32 grad=parameters
    def forward(self, x):
        return self.norm(x) * self.frozen
""",
}


def planned(capture: Capture, most: int = 8) -> Candidate:
    """All steps that the roofline planner proposes without a GPU."""
    device = planning_model(("sm_90",))
    coder, planner = BuiltinCoder(device), RooflinePlanner()
    best, steps = start(capture), list[Step]()
    while len(steps) < most:
        action = planner.propose(State(capture, best, tuple(steps), device, False))
        if not isinstance(action, MacroAction):
            break
        status = StepStatus.ACCEPTED
        try:
            best = coder.write(capture, best, action)
        except CannotCode:
            status = StepStatus.FAILED
        steps.append(Step(len(steps) + 1, action, status, "", candidate=best))
    return best


def cases(capture: Capture) -> list[Case]:
    """The workload's and odd sizes, every form of upstream gradient, and a call without gradients."""
    sizes = dict(capture.graph.sizes)
    odd = {name: size + 3 if name in capture.variable_sizes else size for name, size in sizes.items()}
    small = {name: 1 if name in capture.variable_sizes else size for name, size in sizes.items()}
    found = [Case(sizes, "normal", seed) for seed in range(len(UPSTREAM))]
    return [*found, Case(odd, "normal", 4), Case(small, "normal", 5), Case(sizes, "normal", 6, FORWARD)]


def text_of(capture: Capture) -> str:
    """The file of a captured target."""
    return Path(capture.workload.target.path).read_text()
