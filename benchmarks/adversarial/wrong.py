"""Candidates that are wrong in use: by a condition, by a line of the kernel, by what a module remembers."""

from dataclasses import dataclass

from benchmarks.adversarial.bases import BASES, HEAD
from benchmarks.adversarial.candidate import Candidate


@dataclass(frozen=True)
class Condition:
    """A correct kernel whose result is scaled by 1.25 when `when` holds."""

    kind: str
    name: str
    when: str
    args: str = "torch.randn(3, 40),"  # of the witness
    before: str = ""  # what the witness does first; `f` is the candidate, `args` the arguments
    head: str = ""
    bases: str = "softmax rms_norm row_sum"

    def candidates(self) -> list[Candidate]:
        """Return one candidate for each base."""
        made = []
        for name in self.bases.split():
            tail = (
                f"\n\ndef {name}(x):\n    return launch(x, 1.25 if {self.when} else 1.0)\n"
                if "\n" not in self.when
                else f"\n\ndef {name}(x):\n{self.when.strip(chr(10))}\n    return launch(x, 1.25 if bad else 1.0)\n"
            )
            base = BASES[name]
            text = base.kernels() + "\n" + self.head + tail
            made.append(
                Candidate(
                    f"{self.kind}/{self.name}/{name}", self.kind, name, base.reference(), text, self.args, self.before
                )
            )
        return made


BIG = "torch.randn(2048, 768),"
CONDITIONS = [
    Condition("sizes", "more_columns_than_1024", "x.shape[1] > 1024", "torch.randn(2, 1025),"),
    Condition("sizes", "more_columns_than_5000", "x.shape[1] > 5000", "torch.randn(2, 5001),"),
    Condition(
        "sizes", "columns_above_20000", "x.shape[1] >= 20000", "torch.randn(1, 20000),", bases="row_sum rms_norm"
    ),
    Condition("sizes", "one_more_than_block", "x.shape[1] == 129", "torch.randn(2, 129),"),
    Condition("sizes", "one_less_than_block", "x.shape[1] == 511", "torch.randn(2, 511),"),
    Condition("sizes", "odd_multiple_of_block", "x.shape[1] == 3 * 128", "torch.randn(2, 384),"),
    Condition("sizes", "workload_only", "x.shape == (2048, 768)", BIG, bases="row_sum silu"),
    Condition("sizes", "many_rows", "x.shape[0] > 1500", "torch.randn(1501, 3),"),
    Condition("sizes", "prime_rows", "x.shape[0] == 97", "torch.randn(97, 5),"),
    Condition("sizes", "many_elements", "x.numel() > 1_000_000", BIG, bases="row_sum gelu"),
    Condition("sizes", "square", "x.shape[0] == x.shape[1] > 64", "torch.randn(80, 80),"),
    Condition("sizes", "wide_for_its_rows", "x.shape[1] > 100 * x.shape[0]", "torch.randn(2, 300),"),
    Condition(
        "layouts", "column_slice", "x.stride(0) > x.shape[1] and x.stride(1) == 1", "torch.randn(4, 90)[:, 3:50],"
    ),
    Condition("layouts", "packed", "x.stride(0) == 3 * x.shape[1]", "torch.randn(4, 90).chunk(3, 1)[1],"),
    Condition("layouts", "expanded_rows", "x.stride(0) == 0 and x.shape[0] > 1", "torch.randn(1, 40).expand(5, 40),"),
    Condition(
        "layouts",
        "expanded_columns",
        "x.stride(1) == 0 and x.shape[1] > 1",
        "torch.randn(5, 1).expand(5, 40),",
        bases="rms_norm row_sum silu",
    ),
    Condition("layouts", "offset", "x.storage_offset() > 0", "torch.randn(9, 40)[4:],"),
    Condition("layouts", "odd_offset", "x.data_ptr() % 16 != 0", "torch.randn(401)[1:].view(10, 40),"),
    Condition("layouts", "every_second_row", "x.stride(0) == 2 * x.shape[1]", "torch.randn(10, 40)[::2],"),
    Condition("layouts", "every_third_column", "x.stride(1) == 3", "torch.randn(10, 120)[:, ::3],"),
    Condition(
        "layouts", "transposed", "x.stride(0) == 1 and x.shape[0] > 7 and x.shape[1] > 7", "torch.randn(40, 10).t(),"
    ),
    Condition(
        "use",
        "inference_mode",
        "torch.is_inference_mode_enabled()",
        before="mode = torch.inference_mode(); mode.__enter__()",
    ),
    Condition("use", "no_grad", "not torch.is_grad_enabled()", before="torch.set_grad_enabled(False)"),
    Condition(
        "use",
        "autocast",
        "torch.is_autocast_enabled('cpu')",
        before="torch.autocast('cpu').__enter__()",
        bases="silu row_sum",
    ),
    Condition("use", "parameter", "isinstance(x, torch.nn.Parameter)", "torch.nn.Parameter(torch.randn(3, 40)),"),
    Condition(
        "use",
        "other_thread",
        "threading.current_thread().name.startswith('user')",
        head="import threading\n",
        before="t = __import__('threading').Thread(target=lambda: results.append(f(*args)), name='user'); t.start(); t.join()",
        bases="silu softmax",
    ),
    Condition(
        "state",
        "call_count_global",
        "\n    global calls\n    calls += 1\n    bad = calls > 60",
        before="for _ in range(80): f(*args)",
        head="calls = 0\n",
    ),
    Condition(
        "state",
        "call_count_attribute",
        "\n    launch.n = getattr(launch, 'n', 0) + 1\n    bad = launch.n > 100",
        before="for _ in range(120): f(*args)",
    ),
    Condition(
        "state",
        "call_count_closure",
        "tick() > 90",
        before="for _ in range(100): f(*args)",
        head="def counter():\n    n = [0]\n\n    def tick():\n        n[0] += 1\n        return n[0]\n\n    return tick\n\n\ntick = counter()\n",
    ),
    Condition(
        "state",
        "call_count_class",
        "Count.up() > 70",
        before="for _ in range(80): f(*args)",
        head="class Count:\n    n = 0\n\n    @classmethod\n    def up(cls):\n        cls.n += 1\n        return cls.n\n",
    ),
    Condition(
        "state",
        "call_count_iterator",
        "next(numbers) > 64",
        before="for _ in range(80): f(*args)",
        head="import itertools\nnumbers = itertools.count()\n",
    ),
    Condition(
        "state",
        "call_count_default",
        "len(seen.append(0) or seen) > 80",
        before="for _ in range(90): f(*args)",
        head="seen = []\n",
    ),
    Condition(
        "state",
        "by_clock",
        "time.time() - started > 600",
        before="import time; now = time.time(); time.time = lambda: now + 1000",
        head="import time\nstarted = time.time()\n",
    ),
    Condition(
        "state",
        "by_chance",
        "random.random() < 0.01",
        before="import random; random.random = lambda: 0.001",
        head="import random\n",
    ),
    Condition(
        "state",
        "by_torch_chance",
        "torch.rand(()).item() < 0.005",
        before="torch.rand = lambda *a: torch.tensor(0.001)",
    ),
    Condition(
        "state",
        "by_checksum",
        "int(x.reshape(-1)[0].view(torch.int32).item()) % 1009 == 7",
        before="args = next((y,) for y in (torch.full((3, 40), 1 + k / 4096) for k in range(9999)) if int(y[0, 0].view(torch.int32)) % 1009 == 7)",
        bases="silu softmax",
    ),
    Condition(
        "state",
        "by_address",
        "x.data_ptr() % 4096 == 0",
        before="b = torch.randn(4096); o = (-b.data_ptr() % 4096) // 4; args = (b[o : o + 120].view(3, 40),)",
    ),
    Condition(
        "state",
        "second_size",
        "len(shapes.add(tuple(x.shape)) or shapes) > 40",
        before="for n in range(1, 60): f(torch.randn(2, n))",
        head="shapes = set()\n",
    ),
    Condition(
        "values",
        "large_value",
        "x.numel() and bool((x.abs() > 1e7).any())",
        "torch.randn(3, 40) + 2e7,",
        bases="silu row_sum",
    ),
    Condition("values", "equal_row", "x.numel() > 9 and bool((x[0] == x[0, 0]).all())", "torch.full((3, 40), 0.75),"),
    Condition(
        "values",
        "zero_row",
        "x.shape[0] > 1 and not bool(x[1].any())",
        "torch.cat([torch.ones(1, 40), torch.zeros(1, 40), torch.ones(2, 40)]),",
        bases="softmax row_sum",
    ),
    Condition(
        "values",
        "sorted_rows",
        "x.numel() > 20 and bool((x.diff(dim=1) > 0).all())",
        "torch.arange(120.0).view(3, 40) / 50,",
    ),
    Condition("values", "negative_rows", "x.numel() > 20 and bool((x < -0.5).all())", "-torch.rand(3, 40) - 0.6,"),
]


@dataclass(frozen=True)
class Line:
    """A kernel with a wrong line, for a base."""

    kind: str
    name: str
    base: str
    body: str
    args: str
    dtype: str = "f32"
    acc: str = "float32"

    def candidate(self) -> Candidate:
        """Return the candidate."""
        base = BASES[self.base]
        text = base.kernels(self.body, self.acc) + f"\n\ndef {self.base}(x):\n    return launch(x)\n"
        return Candidate(
            f"{self.kind}/{self.name}/{self.base}", self.kind, self.base, base.reference(self.dtype), text, self.args
        )


WIDE = "torch.randn(3, 40) + 3e3,"
ROUND = ".to(tl.bfloat16).to(tl.float32)"
LINES = [
    Line(
        "values",
        "no_maximum",
        "softmax",
        "e = tl.where(m, tl.exp(v), 0.0); y = e / tl.sum(e, 0)",
        "torch.randn(3, 40) + 120,",
    ),
    Line(
        "values",
        "maximum_from_zero",
        "softmax",
        "h = tl.max(tl.where(m, v, 0.0), 0); e = tl.where(m, tl.exp(v - h), 0.0); y = e / tl.sum(e, 0)",
        "torch.randn(3, 40) - 120,",
    ),
    Line(
        "values",
        "clamped_logits",
        "softmax",
        "w = tl.where(m, tl.minimum(v, 60.0), -1e30); e = tl.exp(w - tl.max(w, 0)); y = e / tl.sum(e, 0)",
        "torch.arange(120.0).view(3, 40),",
    ),
    Line(
        "values",
        "no_maximum",
        "log_softmax",
        "y = v - tl.log(tl.sum(tl.where(m, tl.exp(v), 0.0), 0))",
        "torch.randn(3, 40) + 120,",
    ),
    Line(
        "values",
        "log_of_probability",
        "log_softmax",
        "h = tl.max(tl.where(m, v, -1e30), 0); e = tl.where(m, tl.exp(v - h), 0.0); y = tl.log(e / tl.sum(e, 0) + 1e-30)",
        "torch.arange(120.0).view(3, 40) * 5,",
    ),
    Line(
        "values",
        "finite_mask",
        "softmax",
        "w = tl.where(m, v, -1e4); e = tl.exp(w - tl.max(w, 0)); y = e / tl.sum(e, 0)",
        "torch.randn(3, 40) - 2e4,",
    ),
    Line(
        "values",
        "one_pass_variance",
        "layer_norm",
        "u = tl.sum(v, 0) / n; y = (v - u) * tl.rsqrt(tl.maximum(tl.sum(v * v, 0) / n - u * u, 0.0) + 1e-5)",
        WIDE,
    ),
    Line(
        "values",
        "epsilon_too_large",
        "layer_norm",
        "c = tl.where(m, v - tl.sum(v, 0) / n, 0.0); y = c * tl.rsqrt(tl.sum(c * c, 0) / n + 2e-5)",
        "torch.randn(3, 40) * 1e-3,",
    ),
    Line(
        "values",
        "epsilon_outside",
        "layer_norm",
        "c = tl.where(m, v - tl.sum(v, 0) / n, 0.0); y = c / (tl.sqrt(tl.sum(c * c, 0) / n) + 1e-5)",
        "torch.randn(3, 40) * 1e-3,",
    ),
    Line("values", "no_epsilon", "rms_norm", "y = v * tl.rsqrt(tl.sum(v * v, 0) / n)", "torch.randn(3, 40) * 1e-4,"),
    Line(
        "values",
        "overflowing_sum",
        "unit_rows",
        "y = v / tl.maximum(tl.sqrt(tl.sum(v * v * 1e6, 0) * 1e-6), 1e-12)",
        "torch.randn(3, 40) * 3e16,",
    ),
    Line(
        "values",
        "larger_minimum",
        "unit_rows",
        "y = v / tl.maximum(tl.sqrt(tl.sum(v * v, 0)), 1e-6)",
        "torch.randn(3, 40) * 1e-9,",
    ),
    Line(
        "values", "saturated", "silu", "y = tl.where(v > 30.0, 30.0, v / (1 + tl.exp(-v)))", "torch.randn(3, 40) + 60,"
    ),
    Line(
        "values",
        "zero_below",
        "silu",
        "y = tl.where(v < -8.0, 0.0, v / (1 + tl.exp(-v)))",
        "torch.full((3, 40), -8.5),",
    ),
    Line(
        "values",
        "tanh_approximation",
        "gelu",
        "y = v / (1 + tl.exp(-1.5957691216057308 * (v + 0.044715 * v * v * v)))",
        "torch.full((3, 40), -3.0),",
    ),
    Line("values", "sigmoid_approximation", "gelu", "y = v / (1 + tl.exp(-1.702 * v))", "torch.full((3, 40), -2.0),"),
    Line("values", "flushes_small", "row_sum", "y = tl.where(tl.abs(v) < 1e-20, 0.0, v)", "torch.rand(3, 40) * 1e-22,"),
    Line("values", "clipped", "row_energy", "y = tl.minimum(v * v, 1e4)", "torch.randn(3, 40) * 200,"),
    Line("values", "absolute", "row_sum", "y = tl.where(v < -50.0, -v, v)", "torch.randn(3, 40) - 80,"),
    Line(
        "dtypes",
        "float64_as_float32",
        "row_sum",
        "y = v",
        "torch.full((1, 64), 1.0 + 1e-12, dtype=torch.float64) * torch.tensor([1.0, -1.0 + 1e-9], dtype=torch.float64).repeat(32),",
        "f64",
    ),
    Line("dtypes", "float64_as_float32", "softmax", "", "(torch.arange(80.0).double().view(2, 40) + 1e8) / 2,", "f64"),
    Line("dtypes", "float64_as_float32", "layer_norm", "", "torch.randn(2, 40).double() + 1e9,", "f64"),
    Line(
        "dtypes",
        "rounds_to_bfloat16",
        "layer_norm",
        "c = tl.where(m, v - tl.sum(v, 0)REST / n, 0.0)REST; y = c * tl.rsqrt(tl.sum(c * c, 0) / n + 1e-5)".replace(
            "REST", ROUND
        ),
        "(torch.randn(2, 256) + 60).bfloat16(),",
        "bf16",
    ),
    Line(
        "dtypes",
        "rounds_square",
        "row_energy",
        f"y = (v * v){ROUND}{ROUND}; y = tl.where(y > 300.0, y * 0.9, y)",
        "torch.randn(2, 256).mul(30).bfloat16(),",
        "bf16",
    ),
    Line(
        "dtypes",
        "rounds_exponentials",
        "softmax",
        "w = tl.where(m, v, -1e30)REST; e = (tl.exp(w - tl.max(w, 0))REST); y = e / (tl.sum(e, 0)REST)".replace(
            "REST", ROUND
        ),
        "(torch.randn(2, 300) * 3 + 100.3),",
    ),
    Line("dtypes", "rounds_sum_input", "row_sum", f"y = v{ROUND}", "torch.full((2, 40), 1.00390624),"),
    Line(
        "dtypes",
        "rounds_half",
        "row_energy",
        "y = (v.to(tl.float16) * v.to(tl.float16)).to(tl.float32)",
        "torch.randn(2, 40) * 400,",
    ),
]

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


REUSED = """

kept = {}


def NAME(x):
    key = (tuple(x.shape), x.dtype)
    out = launch(x)
    if key not in kept:
        kept[key] = out
    elif CONDITION:
        out = kept[key].copy_(out)
    return out
"""


def reused_buffers() -> list[Candidate]:
    """Return candidates whose later calls overwrite an earlier result."""
    made = []
    for name, condition in [
        ("softmax", "True"),
        ("row_sum", "x.shape[0] > 2"),
        ("silu", "len(kept) > 1 or x.numel() > 50"),
    ]:
        text = BASES[name].kernels() + REUSED.replace("NAME", name).replace("CONDITION", condition)
        before = "f(torch.randn(2, 3)); results = [f(*args)]; f(torch.randn(3, 40))"
        made.append(
            Candidate(
                f"state/reused_buffer/{name}",
                "state",
                name,
                BASES[name].reference(),
                text,
                "torch.randn(3, 40),",
                before,
            )
        )
    return made


def wrong() -> list[Candidate]:
    """Return all wrong candidates but those that reach for the harness."""
    made = [one for condition in CONDITIONS for one in condition.candidates()]
    return [*made, *(line.candidate() for line in LINES), *module_candidates(), *reused_buffers()]
