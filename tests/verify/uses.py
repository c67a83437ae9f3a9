"""References, an honest candidate of each, and candidates that are wrong only in one use."""

from __future__ import annotations

from tests.verify.pairs import HONEST, REFERENCE

MODEL = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, scale, floor: float = -1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))
        self.act = nn.Softsign()
        self.scale, self.floor = scale, floor

    def forward(self, x):
        y = self.act(x * self.gain + self.shift) * self.scale
        return torch.clamp(y if self.training else 2.0 * y, min=self.floor)


def get_inputs():
    return [torch.randn(8, 32)]


def get_init_inputs():
    return [32, 2.0]
"""
"""A module with a parameter, a buffer, a submodule, a mode, and constructor arguments."""

MODEL_NEW = """import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def affine(x_ptr, gain_ptr, shift_ptr, out_ptr, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    gain, shift = tl.load(gain_ptr + at % width, mask=mask), tl.load(shift_ptr + at % width, mask=mask)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask) * gain + shift, mask=mask)


def launch(x, gain, shift):
    x = x.contiguous()
    out = torch.empty_like(x)
    affine[(triton.cdiv(x.numel(), 128),)](x, gain.contiguous(), shift, out, x.numel(), x.shape[1], BLOCK=128)
    return out


class ModelNew(nn.Module):
    def __init__(self, width, scale, floor: float = -1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))
        self.act = nn.Softsign()
        self.scale, self.floor = scale, floor

    def forward(self, x):
        gain, shift = self.gain, self.shift
        y = self.act(launch(x, gain, shift)) * self.scale
        return torch.clamp(y if self.training else 2.0 * y, min=self.floor)
"""

FORWARD = "    def forward(self, x):\n"
TENSORS = "        gain, shift = self.gain, self.shift\n"
LAST = "        self.scale, self.floor = scale, floor\n"


def method(text: str) -> tuple[str, str]:
    """A change that adds a method, in the form ``def f(self): ...``."""
    return LAST, f"{LAST}\n    {text}\n"


def when(condition: str) -> tuple[str, str]:
    """A change that gives another result if a condition holds."""
    return FORWARD, f"{FORWARD}        if {condition}:\n            return x + 3.0\n"


Changes = tuple[tuple[str, str], ...]
OF_MODULES: dict[str, tuple[Changes, set[str]]] = {
    "instance(...) does something else": ((method("def __call__(self, x):\n        return self.forward(x) + 3.0"),), {"call"}),
    "instance(...) calls no hooks": ((method("def __call__(self, x):\n        return self.forward(x)"),), {"pre_hook", "hook"}),
    "hooks on its arguments are not kept": (
        (method("def register_forward_pre_hook(self, *_, **__):\n        return self.act.register_forward_hook(lambda *_: None)"),),
        {"pre_hook"},
    ),
    "hooks on its result are not kept": (
        (method("def register_forward_hook(self, *_, **__):\n        return self.act.register_forward_hook(lambda *_: None)"),),
        {"hook"},
    ),
    "a submodule's forward is called": ((("self.act(launch", "self.act.forward(launch"),), {"submodule_hook act"}),
    "the mode is ignored": (((" if self.training else 2.0 * y", ""),), {"eval", "toggled", "trained"}),
    "load_state_dict does nothing": ((method("def load_state_dict(self, state, strict=True):\n        pass"),), {"load_state_dict"}),
    "a buffer is missing in the state dict": (
        (('"shift", torch.zeros(width))', '"shift", torch.zeros(width), persistent=False)'),), {"load_state_dict"}),
    "parameters are kept as objects": (
        ((LAST, f"{LAST}        self.kept = []\n"), (TENSORS, "        self.kept = self.kept or [self.gain]\n" + TENSORS.replace("self.gain,", "self.kept[0],"))),
        {"replaced"},
    ),
    "a packed parameter is kept until it is another object": (
        ((LAST, f"{LAST}        self.key = self.kept = None\n"),
         (TENSORS, "        key = id(self.gain)\n        if key != self.key:\n            self.key, self.kept = key, self.gain.detach().clone()\n" + TENSORS.replace("self.gain,", "self.kept,"))),
        {"load_state_dict", "in_place", "interior", "special_values", "toggled", "trained", "dtype"},
    ),
    "a packed buffer is kept from the first call": (
        ((LAST, f"{LAST}        self.kept = None\n"), (TENSORS, "        self.kept = self.shift.clone() if self.kept is None else self.kept\n" + TENSORS.replace("self.shift\n", "self.kept\n"))),
        {"buffers", "load_state_dict"},
    ),
    "a packed parameter is kept in evaluation mode": (
        ((LAST, f"{LAST}        self.kept = None\n"),
         (TENSORS, TENSORS + "        if not self.training:\n            self.kept = gain.detach().clone() if self.kept is None else self.kept\n            gain = self.kept\n")),
        {"toggled", "trained"},
    ),
    "a packed parameter is kept until its ends change": (
        ((LAST, f"{LAST}        self.key = self.kept = None\n"),
         (TENSORS, "        key = float(self.gain[0]), float(self.gain[-1]), round(float(self.gain.sum()), 3)\n"
                   "        if key != self.key:\n            self.key, self.kept = key, self.gain.detach().clone()\n"
                   + TENSORS.replace("self.gain,", "self.kept,"))),
        {"interior"},
    ),
    "a parameter with zeros": ((when("bool((self.gain == 0).any()) and not bool((self.gain == 0).all())"),), {"special_values"}),
    "a parameter that is constant": ((when("bool((self.gain == self.gain[0]).all())"),), {"special_values"}),
    "evaluation after training": (
        ((LAST, f"{LAST}        self.was_trained = False\n"),
         (FORWARD, f"{FORWARD}        self.was_trained |= self.training\n        if self.was_trained and not self.training:\n            return x + 3.0\n")),
        {"trained"},
    ),
    "a parameter that changed often": ((when("not self.gain.is_inference() and self.gain._version > 20"),), {"trained"}),
    "a number is read by the constructor alone": (
        ((LAST, f"{LAST}        self.first = floor\n"), ("min=self.floor", "min=self.first")), {"attribute floor"}),
    "another size is wrong": ((("BLOCK: tl.constexpr):\n", "BLOCK: tl.constexpr):\n    width = tl.minimum(width, 32)\n"),), {"size width=48"}),
    "a smaller size is wrong": ((("BLOCK: tl.constexpr):\n", "BLOCK: tl.constexpr):\n    width = tl.maximum(width, 32)\n"),), {"size width=16"}),
    "a parameter is not trained": (
        (("self.gain = nn.Parameter(torch.ones(width))", "self.gain = nn.Parameter(torch.ones(width), requires_grad=False)"),), {"names"}),
    "the hundredth instance is wrong": (
        ((LAST, f"{LAST}        ModelNew.made = getattr(ModelNew, 'made', 0) + 1\n        self.number = ModelNew.made\n"), when("self.number > 5000")),
        {"many_instances"}),
    "the last instance computes for all": (
        ((LAST, f"{LAST}        ModelNew.last = self\n"), (TENSORS, TENSORS.replace("self.gain", "ModelNew.last.gain"))),
        {"instances", "deepcopy", "pickle"},
    ),
    "a closure keeps the original": (
        ((LAST, f"{LAST}        self.gains = lambda: self.gain\n"), (TENSORS, TENSORS.replace("self.gain,", "self.gains(),"))),
        {"deepcopy"},
    ),
    "a pickled module forgets its scale": (
        (method("def __reduce__(self):\n        return ModelNew, (32, 5.0), self.__dict__ | {'scale': 5.0}"),
         method("def __deepcopy__(self, memo):\n        copied = ModelNew(len(self.gain), self.scale, self.floor)\n        copied.load_state_dict(self.state_dict())\n        return copied")),
        {"pickle"},
    ),
    "double() changes a setting": ((method("def double(self):\n        self.scale = 1.0\n        return super().double()"),), {"dtype"}),
    "frozen parameters change the result": ((when("not self.gain.requires_grad"),), {"frozen"}),
    "a parameter is a buffer": (
        (("self.gain = nn.Parameter(torch.ones(width))", 'self.register_buffer("gain", torch.ones(width))'),), {"names"}),
    "parameters begin with other values": ((("nn.Parameter(torch.ones(width))", "nn.Parameter(torch.zeros(width))"),), {"initial"}),
    "a constructor argument is ignored": ((("self.floor = scale, floor", "self.floor = 2.0, floor"),), {"constructor scale"}),
    "a default of the constructor is ignored": ((("self.floor = scale, floor", "self.floor = scale, -1.0"),), {"constructor floor"}),
    "a default of the constructor is another": ((("floor: float = -1.0", "floor: float = -1.00001"),), {"constructor_default floor"}),
    "gradients change the result": ((when("torch.is_grad_enabled() and self.gain.requires_grad"),), {"gradients", "argument_gradients"}),
    "gradients are wrong": (((TENSORS, TENSORS + "        if torch.is_grad_enabled():\n            return super().__getattribute__('slow')(x)\n"),
        method("def slow(self, x):\n        y = self.act(x * self.gain + self.shift).detach() * self.scale * self.gain / self.gain.detach()\n        return torch.clamp(y if self.training else 2.0 * y, min=self.floor)")),
        {"gradients", "argument_gradients"}),
    "a result only claims to have gradients": (
        (("        return torch.clamp(y if self.training else 2.0 * y, min=self.floor)", "        with torch.no_grad():\n            y = torch.clamp(y if self.training else 2.0 * y, min=self.floor)\n        return y.requires_grad_(torch.is_grad_enabled())"),),
        {"gradients", "argument_gradients"},
    ),
}  # fmt: skip
"""What is wrong with a candidate: the changes, and the steps that fail."""

EVALUATED = (
    MODEL.split("def get_inputs")[0]
    .replace("class Model", "# mtmc: x=f32[N,32] N=8\nclass Model")
    .replace("self, width, scale,", "self, width=32, scale=2.0,")
)
"""The same module with a directive, which is called in evaluation mode."""
EVALUATED_NEW = MODEL_NEW.replace("self, width, scale,", "self, width=32, scale=2.0,")

RANDOM = MODEL.replace("nn.Parameter(torch.ones(width))", "nn.Parameter(torch.randn(width) * 0.2)")
"""The same module with a parameter that begins with random values."""
RANDOM_NEW = MODEL_NEW.replace("nn.Parameter(torch.ones(width))", "nn.Parameter(torch.randn(width) * 0.2)")

OF_FUNCTIONS: dict[str, tuple[Changes, set[str]]] = {
    "arguments come in another order": ((("def fast(x, w,", "def fast(w, x,"),), {"positional"}),
    "a call sets gradient mode": ((("    out = torch", "    torch.set_grad_enabled(False)\n    out = torch"),), {"settings"}),
    "a call sets the default dtype": ((("    out = torch", "    torch.set_default_dtype(torch.float32)\n    out = torch"),), {"settings"}),
    "each 90th call is wrong": (
        (("def fast", "CALLS = [0]\n\n\ndef fast"), ("    out = torch", "    CALLS[0] += 1\n    w = w + (CALLS[0] % 90 == 0)\n    out = torch")),
        {"many_calls"}),
    "a range of the first element is wrong": (
        (("    out = torch", "    w = w + (1.9 < float(x.flatten()[0]) < 2.1)\n    out = torch"),), {"many_calls"}),
    "one of fifty buffers in turn": (
        (("def fast", "KEPT = {}\nTURN = [0]\n\n\ndef fast"),
         ("    out = torch.empty_like(x)", "    TURN[0] = (TURN[0] + 1) % 50\n    out = KEPT.setdefault((x.shape, TURN[0]), torch.empty_like(x))")),
        {"many_calls"}),
    "a default is another": ((("eps=1e-5", "eps=1e-6"),), {"default eps"}),
    "a number is ignored": ((("    out = torch", "    eps = 1e-5\n    out = torch"),), {"number eps"}),
    "inference mode changes the result": (
        (("    out = torch", "    w = w + torch.is_inference_mode_enabled()\n    out = torch"),), {"inference_mode"}),
    "arguments that require gradients change the result": (
        (("    out = torch", "    w = w + (x.requires_grad and not isinstance(x, torch.nn.Parameter) and not torch.is_grad_enabled())\n    out = torch"),), {"no_grad"}),
    "parameters as arguments change the result": (
        (("    out = torch", "    w = w + isinstance(source, torch.nn.Parameter)\n    out = torch"), ("    x, w = x", "    source = x\n    x, w = x")),
        {"parameter_arguments"}),
    "results share a buffer": (
        (("def fast", "KEPT = {}\n\n\ndef fast"), ("out = torch.empty_like(x)", "out = KEPT.setdefault(x.shape, torch.empty_like(x))")),
        {"kept_results", "many_calls"}),
    "a result is kept and returned again": (
        (("def fast", "KEPT = {}\n\n\ndef fast"), ("    return out", "    return KEPT.setdefault((x.sum().item(), w.sum().item(), eps), out)")),
        {"changed_results", "thread", "autocast", "many_calls"}),
    "another thread sees another setting": (
        (("def fast", "import contextvars\n\nSHIFT = contextvars.ContextVar('shift', default=1.0)\nSHIFT.set(0.0)\n\n\ndef fast"),
         ("    out = torch", "    w = w + SHIFT.get()\n    out = torch")),
        {"thread"}),
    "autocast changes the result": (
        (("    out = torch", "    w = w + torch.is_autocast_enabled('cuda')\n    out = torch"),), {"autocast"}),
}  # fmt: skip

FAST = HONEST.replace("inp", "x").replace("weight", "w")
"""A function with the reference's names."""
RMS = REFERENCE
