"""Modules that are right when they are new, and wrong in some use of a module."""

from benchmarks.adversarial.bases import HEAD
from benchmarks.adversarial.candidate import Candidate

MODULE_REFERENCE = """import torch
from torch import nn


# mtmc: x=f32[256,96] init: dim=96
class Scale(nn.Module):
    def __init__(self, dim: int, power: float = 1.0):
        super().__init__()
        self.power = power
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, dim))
        self.register_buffer("shift", torch.zeros(dim))

    def forward(self, x):
        y = x * self.weight * self.power + self.shift
        return y * 0.5 if self.training else y
"""
MODULE = (
    HEAD
    + """from torch import nn


@triton.jit
def scale_kernel(x, w, s, out, xs0, xs1, n, gain, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + row * xs0 + i * xs1, mask=m)
    y = (v * tl.load(w + i, mask=m) + tl.load(s + i, mask=m) / POWER) * gain
    tl.store(out + row * n + i, y, mask=m)


class Scale(nn.Module):
    def __init__(self, dim: int, power: float = 1.0):
        super().__init__()
        self.power = power
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, dim))
        self.register_buffer("shift", torch.zeros(dim))
        INIT

    def compute(self, x, weight, shift, gain):
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            n = x.shape[1]
            scale_kernel[(x.shape[0],)](x, weight, shift, out, *x.stride(), n, gain, BLOCK=triton.next_power_of_2(n))
        return out

    def forward(self, x):
        bad = False
        weight, shift = self.weight, self.shift
        gain = self.power * (0.5 if self.training else 1.0)
        FORWARD
        return self.compute(x, weight, shift, gain * (1.25 if bad else 1.0))
""".replace(" / POWER", "")
)
MODULES = {  # name: (line of the constructor, line of forward, what the witness does with module `f` and reference `r`)
    "copied_weight": (
        "",
        "self.__dict__.setdefault('kept', weight.detach().clone()); weight = self.kept",
        "f(*args); BOTH.weight.data.mul_(3)",
    ),
    "constructed_weight": (
        "self.kept = [self.weight.detach().clone()]",
        "weight = self.kept[0]",
        "BOTH.weight.data.mul_(3)",
    ),
    "first_parameter": (
        "self.kept = [self.weight]",
        "weight = self.kept[0]",
        "BOTH.weight = torch.nn.Parameter(torch.ones(96) * 5)",
    ),
    "first_buffer": ("self.kept = [self.shift]", "shift = self.kept[0]", "BOTH.shift = torch.ones(96) * 5"),
    "version_counter": (
        "",
        "bad = weight._version > 4",
        "[BOTH.weight.data.copy_(BOTH.weight) for _ in range(9)]; [torch.no_grad()(lambda p: p.mul_(1))(BOTH.weight) for _ in range(9)]",
    ),
    "after_load_state_dict": (
        "self.register_load_state_dict_post_hook(lambda *a: self.__dict__.update(loaded=True))",
        "bad = getattr(self, 'loaded', False)",
        "BOTH.load_state_dict({k: v.clone() for k, v in BOTH.state_dict().items()})",
    ),
    "no_training": ("", "gain = self.power * 0.5", "BOTH.eval()"),
    "training_seen_first": (
        "self.mode = []",
        "self.mode.append(self.training); gain = self.power * (0.5 if self.mode[0] else 1.0)",
        "BOTH(*args); BOTH.eval()",
    ),
    "ignores_power": ("", "gain = 0.5 if self.training else 1.0", "BOTH.power = 4.0"),
    "power_at_construction": (
        "self.first = power",
        "gain = self.first * (0.5 if self.training else 1.0)",
        "BOTH.power = 4.0",
    ),
    "has_hooks": ("", "bad = bool(self._forward_hooks)", "BOTH.register_forward_hook(lambda *a: None)"),
    "has_pre_hooks": ("", "bad = bool(self._forward_pre_hooks)", "BOTH.register_forward_pre_hook(lambda *a: None)"),
    "copied_module": ("self.me = id(self)", "bad = self.me != id(self)", "import copy; f = copy.deepcopy(f)"),
    "second_instance": (
        "type(self).made = getattr(type(self), 'made', 0) + 1; self.number = type(self).made",
        "bad = self.number > 8",
        "f = [type(f)(96) for _ in range(12)][-1]",
    ),
    "no_gradients": ("", "bad = not weight.requires_grad", "BOTH.requires_grad_(False)"),
    "keeps_last_result": (
        "self.last = []",
        "key = float(x.flatten()[0]) if x.numel() else 0.0; bad = key in self.last; self.last.append(key); del self.last[:-30]; bad = bad and len(self.last) > 28",
        "[f(*args) for _ in range(40)]",
    ),
    "ignores_shift": ("", "shift = torch.zeros_like(shift)", "BOTH.shift.fill_(3.0)"),
    "named_in_parent": ("", "bad = hasattr(self, 'parent_name')", "BOTH.parent_name = 'block'"),
    "wrong_call": ("", "", "f.forward = f.forward"),
    "subnormal_weight": ("", "bad = bool((weight == 0).any())", "BOTH.weight.data[3] = 0.0"),
    "equal_weight": ("", "bad = bool((weight == weight[:1]).all())", "BOTH.weight.data.fill_(1.0)"),
}


def module_candidates() -> list[Candidate]:
    """Return the modules that are wrong in some use."""
    made = []
    for name, (init, forward, before) in MODULES.items():
        text = MODULE.replace("INIT", init or "self.extra = None").replace("FORWARD", forward or "pass")
        if name == "wrong_call":
            text += "\n    def __call__(self, x):\n        return super().__call__(x) * 1.25\n"
        both = "; ".join(before.replace("BOTH", who) for who in (["r", "f"] if "BOTH" in before else ["f"]))
        made.append(
            Candidate(f"use/{name}/module", "use", "Scale", MODULE_REFERENCE, text, "torch.randn(3, 96),", both)
        )
    return made
