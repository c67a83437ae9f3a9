"""Correct kernels in several styles: flat, by rows, in loops, autotuned, with atomics, in two launches."""

from benchmarks.adversarial.bases import BASES, HEAD
from benchmarks.adversarial.candidate import Candidate

POINTWISE = {  # name: (torch, Triton)
    "silu": ("F.silu(x)", "v / (1 + tl.exp(-v))"),
    "gelu": ("F.gelu(x)", "0.5 * v * (1 + tl.erf(v * 0.7071067811865476))"),
    "relu": ("torch.where(x > 0, x, torch.zeros_like(x))", "tl.where(v > 0, v, 0.0)"),
    "leaky": ("F.leaky_relu(x, 0.1)", "tl.where(v > 0, v, v * 0.1)"),
    "sigmoid": ("torch.sigmoid(x)", "tl.sigmoid(v)"),
    "square": ("x * x", "v * v"),
    "cube": ("x * x * x", "v * v * v"),
    "sine": ("torch.sin(x)", "tl.sin(v)"),
    "exponential": ("torch.exp(-x.abs())", "tl.exp(-tl.abs(v))"),
    "affine": ("x * 3 + 1", "v * 3.0 + 1.0"),
    "absolute": ("x.abs()", "tl.abs(v)"),
    "root": ("torch.sqrt(x.abs() + 1)", "tl.sqrt(tl.abs(v) + 1.0)"),
    "reciprocal": ("1 / (1 + x.abs())", "1.0 / (1.0 + tl.abs(v))"),
    "swish2": ("x * torch.sigmoid(2 * x)", "v * tl.sigmoid(2.0 * v)"),
}
FLAT = """

DECORATOR@triton.jit
def flat_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(out + i, LINE, mask=i < n)


def NAME(x):
    flat = x.contiguous()
    out = torch.empty_like(flat)
    n = out.numel()
    if n:
        flat_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](flat, out, n, ARGUMENT)
    return torch.empty_like(x).copy_(out)
"""
STRIDED = """

@triton.jit
def persistent_kernel(x, out, xs0, xs1, os0, os1, n, d, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < n
        v = tl.load(x + i // d * xs0 + i % d * xs1, mask=m)
        tl.store(out + i // d * os0 + i % d * os1, LINE, mask=m)


def NAME(x):
    out = torch.empty_like(x)
    if out.numel():
        persistent_kernel[(min(7, out.numel()),)](x, out, *x.stride(), *out.stride(), out.numel(), x.shape[1], BLOCK=256)
    return out
"""
TILED = """

@triton.jit
def tile_kernel(x, out, xs0, xs1, os0, os1, rows, d, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    m = (r < rows) & (c < d)
    v = tl.load(x + r * xs0 + c * xs1, mask=m)
    tl.store(out + r * os0 + c * os1, LINE, mask=m)


def NAME(x):
    out = torch.empty_like(x)
    rows, d = x.shape
    if out.numel():
        tile_kernel[(triton.cdiv(rows, 16), triton.cdiv(d, 64))](x, out, *x.stride(), *out.stride(), rows, d, R=16, C=64)
    return out
"""
AUTOTUNE = '@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024}, num_warps=8)], key=["n"])\n'
HEURISTIC = '@triton.heuristics({"BLOCK": lambda a: 128 if a["n"] < 4096 else 512})\n'
STYLES = {
    "flat": FLAT.replace("DECORATOR", "").replace("ARGUMENT", "BLOCK=512"),
    "autotuned": FLAT.replace("DECORATOR", AUTOTUNE).replace(", ARGUMENT", ""),
    "heuristic": FLAT.replace("DECORATOR", HEURISTIC).replace(", ARGUMENT", ""),
    "persistent": STRIDED,
    "tiled": TILED,
}
REDUCTIONS = {  # name: (torch, Triton, text for combining)
    "row_sum": ("x.sum(-1)", "v"),
    "row_energy": ("x.square().sum(-1)", "v * v"),
    "row_l1": ("x.abs().sum(-1)", "tl.abs(v)"),
    "row_halves": ("(x * 0.5).sum(-1)", "v * 0.5"),
}
LOOP = BASES["row_sum"].kernels("y = LINE").replace("BLOCK=128", "BLOCK=SIZE")
ATOMIC = (
    HEAD
    + """

@triton.jit
def atomic_kernel(x, out, xs0, xs1, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * xs0 + i * xs1, mask=i < n, other=0.0)
    tl.atomic_add(out + row, tl.sum(LINE, 0))


def launch(x):
    rows, n = x.shape
    out = torch.zeros(rows, dtype=x.dtype, device=x.device)
    if x.numel():
        atomic_kernel[(rows, triton.cdiv(n, 256))](x, out, *x.stride(), n, BLOCK=256)
    return out
"""
)
TWO = (
    HEAD
    + """

@triton.jit
def parts_kernel(x, parts, xs0, xs1, n, k, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * xs0 + i * xs1, mask=i < n, other=0.0)
    tl.store(parts + row * k + tl.program_id(1), tl.sum(LINE, 0))


@triton.jit
def total_kernel(parts, out, k, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(out + row, tl.sum(tl.load(parts + row * k + i, mask=i < k, other=0.0), 0))


def launch(x):
    rows, n = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    k = max(1, triton.cdiv(n, 128))
    if rows:
        parts = torch.empty(rows, k, dtype=x.dtype, device=x.device)
        parts_kernel[(rows, k)](x, parts, *x.stride(), n, k, BLOCK=128)
        total_kernel[(rows,)](parts, out, k, BLOCK=triton.next_power_of_2(k))
    return out
"""
)
REDUCING = {
    "loop64": LOOP.replace("SIZE", "64"),
    "loop512": LOOP.replace("SIZE", "512"),
    "atomic": ATOMIC,
    "two_launches": TWO,
}


def _reference(name: str, expression: str) -> str:
    lines = ["import torch", "import torch.nn.functional as F", "", "", "# mtmc: x=f32[512,200]"]
    return "\n".join([*lines, f"def {name}(x):", f"    return {expression}", ""])


def honest() -> list[Candidate]:
    """Return the correct kernels."""
    made = []
    for name, base in BASES.items():
        made.append(Candidate(f"honest/base/{name}", "honest", name, base.reference(), base.honest()))
    for name, (expression, line) in POINTWISE.items():
        for style, text in STYLES.items():
            text = HEAD + text.replace("NAME", name).replace("LINE", line)
            made.append(Candidate(f"honest/{style}/{name}", "honest", name, _reference(name, expression), text))
    for name, (expression, line) in REDUCTIONS.items():
        for style, text in REDUCING.items():
            text = text.replace("LINE", line) + f"\n\ndef {name}(x):\n    return launch(x)\n"
            made.append(Candidate(f"honest/{style}/{name}", "honest", name, _reference(name, expression), text))
    return made
