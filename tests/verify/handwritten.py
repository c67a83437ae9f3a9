"""Targets as users write them, with honest Triton versions by hand, and the means to spoil these in one place."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.run import Candidate, GeneratedCode, KernelLaunch

HEAD = """import torch
import torch.nn.functional as F
"""

TRITON = """import triton
import triton.language as tl
"""


@dataclass(frozen=True)
class Handwritten:
    """A target in a file of its own, and a candidate for it."""

    name: str
    own: str
    """The user's text; the body's first line is where the dispatch goes."""
    block: str
    dispatch: str
    body: str
    """The line of the target's body above which the dispatch stands."""
    launches: tuple[KernelLaunch, ...] = ()

    @property
    def text(self) -> str:
        """The user's whole file."""
        return HEAD + self.own

    def candidate(self, *changes: tuple[str, str]) -> Candidate:
        """The candidate, with texts replaced; each must be there."""
        source = HEAD + TRITON + self.block + self.own.replace(self.body, self.dispatch + self.body)
        for old, new in changes:
            assert old in source, old
            source = source.replace(old, new)
        code = GeneratedCode((), self.block, self.dispatch)
        return Candidate(str(hash(source)), None, None, source, code, None, self.launches)


RMS = Handwritten(
    "rms",
    """

# mtmc: x=f32[N,D] w=f32[D] N=37 D=72
def rms(x, w, eps: float = 1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
""",
    """

@triton.jit
def rms_kernel(x_ptr, w_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / columns + eps)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * columns + cols, x * scale * w, mask=mask)


def rms_fits(x, w):
    tensors = (x, w)
    return (
        all(t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and x.ndim == 2
        and x.numel() > 0
    )


def rms_triton(x, w, eps):
    out = torch.empty_like(x)
    rms_kernel[(x.shape[0],)](x, w, out, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
""",
    "    if rms_fits(x, w):\n        return rms_triton(x, w, eps)\n",
    "    return x * torch.rsqrt",
    (
        KernelLaunch(
            "rms_kernel",
            {"x_ptr": "*fp32", "w_ptr": "*fp32", "out_ptr": "*fp32", "columns": "i32", "eps": "fp32"},
            {"BLOCK": 128},
            4,
            2,
            ("x_ptr", "w_ptr", "out_ptr"),
        ),
    ),
)
"""RMS normalisation: a reduction, a broadcast weight, a constant."""

ADD_IN_PLACE = Handwritten(
    "accumulate",
    """

# mtmc: x=f32[N] y=f32[N] N=1000
def accumulate(x, y):
    x.add_(y)
    return y * 2
""",
    """

@triton.jit
def accumulate_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    y = tl.load(y_ptr + at, mask=mask)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=mask) + y, mask=mask)
    tl.store(out_ptr + at, y * 2, mask=mask)


def accumulate_fits(x, y):
    return all(
        t.is_cuda and t.dtype == torch.float32 and t.is_contiguous() and not t.requires_grad for t in (x, y)
    ) and 0 < x.numel() == y.numel()


def accumulate_triton(x, y):
    out = torch.empty_like(y)
    accumulate_kernel[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), BLOCK=256)
    return out
""",
    "    if accumulate_fits(x, y):\n        return accumulate_triton(x, y)\n",
    "    x.add_(y)",
)
"""Writes into an argument."""

DROP = Handwritten(
    "drop",
    """

# mtmc: x=f32[N] N=1500
def drop(x, p: float = 0.25):
    return F.dropout(x * 3, p, True)
""",
    """

@triton.jit
def drop_kernel(x_ptr, out_ptr, seed_ptr, count, p, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    a, b, c, d = tl.rand4x(tl.load(seed_ptr), (at // 4).to(tl.int32))
    word = at % 4
    keep = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)) >= p
    x = tl.load(x_ptr + at, mask=mask) * 3
    tl.store(out_ptr + at, tl.where(keep, x / (1 - p), 0.0), mask=mask)


def drop_triton(x, p):
    seeds = torch.randint(2**31 - 1, (1,), device=x.device)
    out = torch.empty_like(x)
    drop_kernel[(triton.cdiv(x.numel(), 256),)](x, out, seeds, x.numel(), p, BLOCK=256)
    return out
""",
    "    if x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad and x.numel() > 0:\n"
    "        return drop_triton(x, p)\n",
    "    return F.dropout",
)
"""Draws random numbers."""

PICK = Handwritten(
    "pick",
    """

# mtmc: x=f32[N,D] N=9 D=40
def pick(x):
    return (x * 2).relu().argmax(-1)
""",
    """

@triton.jit
def pick_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + cols, mask=cols < columns, other=0.0) * 2
    x = tl.where(x == x, tl.maximum(x, 0.0), float("inf"))
    x = tl.where(cols < columns, x, -1.0)
    best = tl.max(x, axis=0)
    tl.store(out_ptr + row, tl.max(tl.where(x == best, cols, -1), axis=0).to(tl.int64))


def pick_triton(x):
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    pick_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
""",
    "    if x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0 and not x.requires_grad:\n"
    "        return pick_triton(x)\n",
    "    return (x * 2)",
)
"""Returns indices; the last of equal values here, the first in eager."""

SCALE_MODULE = Handwritten(
    "Scale",
    """

# mtmc: x=bf16[N,width] width=48 N=20
class Scale(torch.nn.Module):
    def __init__(self, width: int = 48):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.register_buffer("running_var", torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x):
        return (x.float() * self.gain.float() * torch.rsqrt(self.running_var.float())).to(torch.bfloat16)
""",
    """

@triton.jit
def scale_kernel(x_ptr, gain_ptr, var_ptr, out_ptr, count, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask).to(tl.float32)
    gain = tl.load(gain_ptr + at % width, mask=mask).to(tl.float32)
    var = tl.load(var_ptr + at % width, mask=mask, other=1.0).to(tl.float32)
    tl.store(out_ptr + at, (x * gain * tl.rsqrt(var)).to(tl.bfloat16), mask=mask)


def scale_fits(x):
    return x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() and x.numel() > 0


def scale_triton(x, gain, var):
    out = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 256),)](x, gain, var, out, x.numel(), x.shape[1], BLOCK=256)
    return out
""",
    "        if scale_fits(x) and not torch.is_grad_enabled():\n"
    "            return scale_triton(x, self.gain, self.running_var)\n",
    "        return (x.float()",
)
"""A module in bfloat16 whose parameters start as ones."""

RESIDUE = Handwritten(
    "residue",
    """

# mtmc: x=f32[N,D] N=24 D=40
def residue(x):
    return x - x.half().float()
""",
    """

@triton.jit
def residue_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x - x.to(tl.float16).to(tl.float32), mask=at < count)


def residue_fits(x):
    return (
        x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def residue_triton(x):
    out = torch.empty_like(x)
    residue_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
    return out
""",
    "    if residue_fits(x):\n        return residue_triton(x)\n",
    "    return x - x.half()",
    (
        KernelLaunch(
            "residue_kernel",
            {"x_ptr": "*fp32", "out_ptr": "*fp32", "count": "i32"},
            {"BLOCK": 256},
            4,
            2,
            ("x_ptr", "out_ptr"),
        ),
    ),
)
"""What rounding loses: without the cast nothing is left of it."""

CANCELLED = Handwritten(
    "cancelled",
    """

# mtmc: x=f32[N,D] N=24 D=40
def cancelled(x):
    return x * 3.3 * 1.7 - x * 1.7 * 3.3
""",
    RESIDUE.block.replace("residue", "cancelled").replace(
        "x - x.to(tl.float16).to(tl.float32)", "x * 3.3 * 1.7 - x * 1.7 * 3.3"
    ),
    RESIDUE.dispatch.replace("residue", "cancelled"),
    "    return x * 3.3",
    RESIDUE.launches,
)
"""Rounding and nothing else: float64 has another one."""
