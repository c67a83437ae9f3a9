"""Linear layers with losses over a vocabulary, and how tests run them in chunks of rows."""

from __future__ import annotations

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import PRODUCTS
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.verify.cases import Case
from tests.codegen.checker import start
from tests.training.targets import cases

SHAPES = "x=f32[N,D] weight=f32[V,D] target=i64[N]@0..199 N=16 D=32 V=200 grad=x,weight"
PREFERENCES = "x=f32[B,S,D] weight=f32[V,D] target=i64[B,S]@0..199"
TEACHER = "x=f32[N,D] w=f32[V,D] y=f32[N,E] u=f32[V,E] N=16 D=32 E=48 V=200 grad=x,w"

SCALAR_LOSSES: dict[str, str] = {
    "cross entropy": f"""# mtmc: {SHAPES}
def f(x, weight, target):
    return F.cross_entropy(x @ weight.T, target)
""",
    "cross entropy in bfloat16": f"""# mtmc: {SHAPES.replace("x=f32", "x=bf16").replace("t=f32", "t=bf16")}
def f(x, weight, target):
    return F.cross_entropy((x @ weight.T).float(), target)
""",
    "ignored classes": f"""# mtmc: {SHAPES}
def f(x, weight, target):
    return F.cross_entropy(x @ weight.T, target, reduction="sum", ignore_index=3)
""",
    "bias and smoothed labels": """# mtmc: x=f32[B,S,D] weight=f32[V,D] bias=f32[V] target=i64[B,S]@0..199 B=2 S=8 D=32 V=200 grad=x,weight,bias
def f(x, weight, bias, target):
    logits = F.linear(x, weight, bias)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), label_smoothing=0.1)
""",
    "weights of classes": """# mtmc: x=f32[N,D] weight=f32[V,D] target=i64[N]@0..199 c=f32[V]@0.1..1 N=16 D=32 V=200 grad=x,weight
def f(x, weight, target, c):
    return F.cross_entropy(x @ weight.T, target, weight=c)
""",
    "softcap": f"""# mtmc: {SHAPES}
def f(x, weight, target):
    logits = torch.tanh((x @ weight.T) / 30.0) * 30.0
    return F.cross_entropy(logits, target)
""",
    "squared normaliser": f"""# mtmc: {SHAPES}
def f(x, weight, target):
    logits = x @ weight.T
    return F.cross_entropy(logits, target) + 1e-4 * (torch.logsumexp(logits, -1) ** 2).mean()
""",
    "classes by index": f"""# mtmc: {SHAPES.replace("@0..199", "@-200..199")}
def f(x, weight, target):
    logp = F.log_softmax(x @ weight.T, -1)
    return -logp[torch.arange(x.shape[0], device=x.device), target].mean()
""",
    "a temperature at run time": """# mtmc: x=f32[N,D] weight=f32[V,D] target=i64[N]@0..199 temperature=0.7 N=16 D=32 V=200 grad=x,weight
def f(x, weight, target, temperature):
    return F.cross_entropy(x @ weight.T / temperature, target)
""",
    "divergence from a teacher": f"""# mtmc: {TEACHER}
def f(x, w, y, u):
    student, teacher = F.log_softmax(x @ w.T, -1), F.log_softmax(y @ u.T, -1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)
""",
    "mean divergence": f"""# mtmc: {TEACHER}
def f(x, w, y, u):
    return F.kl_div(F.log_softmax(x @ w.T, -1), F.softmax(y @ u.T, -1))
""",
    "symmetric divergence": f"""# mtmc: {TEACHER}
def f(x, w, y, u):
    logp, logq = F.log_softmax(x @ w.T, -1), F.log_softmax(y @ u.T, -1)
    logm = torch.log((logp.exp() + logq.exp()) / 2)
    left = F.kl_div(logm, logp, reduction="batchmean", log_target=True)
    return 0.5 * (left + F.kl_div(logm, logq, reduction="batchmean", log_target=True))
""",
    "a second result": f"""# mtmc: {SHAPES}
def f(x, weight, target):
    logits = x @ weight.T
    return F.cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean()
""",
    "relative policy": f"""# mtmc: {PREFERENCES} old=f32[B,S]@-5..0 ref=f32[B,S]@-5..0 adv=f32[B] mask=f32[B,S]@0..1 B=3 S=7 D=32 V=200 grad=x,weight
def f(x, weight, target, old, ref, adv, mask):
    logp = torch.log_softmax(x @ weight.T, -1).gather(-1, target[..., None])[..., 0]
    ratio, a = torch.exp(logp - old), adv[:, None]
    policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)
    loss = (policy + 0.04 * (torch.exp(ref - logp) - (ref - logp) - 1)) * mask
    return loss.sum() / mask.sum().clamp(min=1.0)
""",
    "a scale for each sequence": f"""# mtmc: {PREFERENCES} scale=f32[B,1,1] B=3 S=7 D=32 V=200 grad=x,weight
def f(x, weight, target, scale):
    logits = (x @ weight.T) * scale
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
""",
    "a module": """class f(nn.Module):
    def __init__(self, d=32, v=200):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, v)

    # mtmc: x=f32[2,8,32] target=i64[2,8]@0..199 grad=x
    def forward(self, x, target):
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())
""",
}
"""All gradients are multiples of one upstream gradient: both ways to compute them are legal."""
OTHER_LOSSES: dict[str, str] = {
    "a loss for each row": f"""# mtmc: {SHAPES}
def f(x, weight, target):
    return F.cross_entropy(x @ weight.T, target, reduction="none")
""",
    "preferences": f"""# mtmc: {PREFERENCES} ref=f32[B] B=4 S=8 D=32 V=200 grad=x,weight
def f(x, weight, target, ref):
    logp = (x @ weight.T).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    mask = target != 3
    average = (logp * mask).sum(-1) / mask.sum(-1)
    return -F.logsigmoid(average[:2] - average[2:] - ref[:2]).mean()
""",
    "similarities of all rows": """# mtmc: x=f32[N,D] N=24 D=8 grad=x
def f(x):
    return F.cross_entropy(x @ x.T, torch.arange(x.shape[0], device=x.device))
""",
    "no gradients": f"""# mtmc: {SHAPES.removesuffix(" grad=x,weight")}
def f(x, weight, target):
    return F.cross_entropy(x @ weight.T, target, reduction="none")
""",
}
"""The upstream gradients of rows are only known in the backward pass, or there is none."""


def product_of(capture: Capture) -> str:
    """The first product of the graph."""
    graph = ir_of(capture.graph, Schedule()).graph
    return next(node.name for node in graph.nodes if node.word in PRODUCTS)


def in_chunks(capture: Capture, *, rows: int = 5, early: bool = False) -> Candidate:
    """The target in chunks of ``rows`` rows.

    Raises:
        CannotCode: it is refused.
    """
    params: dict[str, object] = {"node": product_of(capture), "rows": rows}
    if early:
        params["early"] = True
    action = MacroAction(ActionKind.CHUNK_ROWS, (product_of(capture),), (0, 0), params)
    return BuiltinCoder().write(capture, start(capture), action)


def few_cases(capture: Capture) -> list[Case]:
    """Two forms of upstream gradients, odd sizes, one row, and a call without gradients."""
    every = cases(capture)
    return [*every[:2], *every[-3:]]
