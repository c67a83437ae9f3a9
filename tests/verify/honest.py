"""Honest kernels of many kinds: formulas by hand, other styles by hand, and what our own coder writes."""

from __future__ import annotations

from pairs import HONEST, MODEL, MODEL_NEW, POINTWISE, REFERENCE

FORMULAS = {
    "x * 3 - 1": "x * 3 - 1",
    "torch.relu(x)": "tl.where(x > 0, x, tl.where(x == x, 0.0, x))",
    "x.abs() + 1": "tl.abs(x) + 1",
    "torch.exp(-x * x)": "tl.exp(-x * x)",
    "torch.sigmoid(x)": "1 / (1 + tl.exp(-x))",
    "x * torch.sigmoid(x)": "x * (1 / (1 + tl.exp(-x)))",
    "torch.where(x > 0.5, x, -2 * x)": "tl.where(x > 0.5, x, -2 * x)",
    "torch.sin(x) + torch.cos(x)": "tl.sin(x) + tl.cos(x)",
    "x.square() + x": "x * x + x",
    "torch.sqrt(x.abs() + 1)": "tl.sqrt(tl.abs(x) + 1)",
    "torch.rsqrt(x * x + 1)": "tl.rsqrt(x * x + 1)",
    "torch.floor(x) + torch.ceil(x)": "tl.floor(x) + tl.ceil(x)",
}
"""A function of ``x`` in torch, and the same in Triton."""

TRITON = "import torch\nimport triton\nimport triton.language as tl\n\n\n"

PRODUCT = """import torch


# mtmc: a=f32[M,K] b=f32[K,N] M=20 K=24 N=18
def product(a, b):
    return a @ b
"""
TILED = (
    TRITON
    + """@triton.jit
def tiles(a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, T: tl.constexpr):
    rows = tl.program_id(0) * T + tl.arange(0, T)
    cols = tl.program_id(1) * T + tl.arange(0, T)
    total = tl.zeros((T, T), dtype=tl.float32)
    for start in range(0, K, T):
        depth = start + tl.arange(0, T)
        a = tl.load(a_ptr + rows[:, None] * am + depth[None, :] * ak, mask=(rows[:, None] < M) & (depth[None, :] < K), other=0.0)
        b = tl.load(b_ptr + depth[:, None] * bk + cols[None, :] * bn, mask=(depth[:, None] < K) & (cols[None, :] < N), other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], total, mask=(rows[:, None] < M) & (cols[None, :] < N))


class Product:
    def __call__(self, a, b):
        (M, K), N = a.shape, b.shape[1]
        c = torch.empty((M, N), device=a.device, dtype=a.dtype)
        if c.numel():
            tiles[(triton.cdiv(M, 16), triton.cdiv(N, 16))](a, b, c, M, N, K, *a.stride(), *b.stride(), T=16)
        return c


def fast(a, b):
    return Product()(a, b)
"""
)

TOTALS = """import torch


# mtmc: x=f32[N,D] N=9 D=20
def totals(x):
    return x.sum(0), (x * x).sum(0)
"""
LOOPED = (
    TRITON
    + """@triton.jit
def add_up(x_ptr, sum_ptr, square_ptr, rows, columns, stride_n, stride_d, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    row = 0
    while row < rows:
        x = tl.load(x_ptr + row * stride_n + at * stride_d, mask=at < columns, other=0.0)
        total += x
        squares += x * x
        row += 1
    tl.store(sum_ptr + at, total, mask=at < columns)
    tl.store(square_ptr + at, squares, mask=at < columns)


def fast(x):
    n, d = x.shape
    sums, squares = (x.new_empty(d) for _ in range(2))
    if d:
        add_up[(triton.cdiv(d, 32),)](x, sums, squares, n, d, *x.stride(), BLOCK=32)
    return sums, squares
"""
)

SHIFT = """import torch


# mtmc: x=f32[N,D] bias=f32[D] N=9 D=20
def shift(x, bias):
    x.add_(bias)
    return x
"""
IN_PLACE = (
    TRITON
    + """@triton.jit
def add(x_ptr, bias_ptr, count, columns, sn, sd, sb, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        row, col = at // columns, at % columns
        place = x_ptr + row * sn + col * sd
        tl.store(place, tl.load(place, mask=at < count) + tl.load(bias_ptr + col * sb, mask=at < count), mask=at < count)


def fast(x, bias):
    if x.numel():
        add[(2,)](x, bias, x.numel(), x.shape[1], *x.stride(), bias.stride(0), BLOCK=64)
    return x
"""
)

PICK = """import torch


# mtmc: table=f32[V,D] ids=i64[N]@0..V-1 V=11 D=20 N=13
def pick(table, ids):
    return table[ids] * 2
"""
GATHERED = (
    TRITON
    + """@triton.jit
def rows(table_ptr, ids_ptr, out_ptr, columns, sv, sd, si, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    source = tl.load(ids_ptr + row * si)
    value = tl.load(table_ptr + source * sv + cols * sd, mask=cols < columns)
    tl.store(out_ptr + row * columns + cols, value * 2, mask=cols < columns)


def fast(table, ids):
    out = torch.empty((ids.numel(), table.shape[1]), device=table.device)
    if out.numel():
        rows[(ids.numel(),)](table, ids, out, table.shape[1], *table.stride(), ids.stride(0), BLOCK=triton.next_power_of_2(table.shape[1]))
    return out
"""
)


def own(formula: str) -> str:
    """A reference of one formula."""
    return f"import torch\n\n\n# mtmc: x=f32[N,D] N=9 D=20\ndef own(x):\n    return {formula}\n"


BY_HAND = {
    "a row by a program": (REFERENCE, "rms", HONEST, "fast"),
    "a module with its parameter": (MODEL, "Model", MODEL_NEW, "ModelNew"),
    "tiles of a product": (PRODUCT, "product", TILED, "fast"),
    "columns by a loop, two results": (TOTALS, "totals", LOOPED, "fast"),
    "in place, programs that persist": (SHIFT, "shift", IN_PLACE, "fast"),
    "rows by index": (PICK, "pick", GATHERED, "fast"),
    **{f"{text} by hand": (own(text), "own", POINTWISE.replace("FORMULA", f), "fast") for text, f in FORMULAS.items()},
}
"""Reference, its name, candidate, its name."""

OF_OURS = (
    "chain",
    "activations",
    "gated",
    "learned slope",
    "two operands",
    "integers",
    "clamped and masked",
    "rotated halves",
    "stacked",
    "padded",
    "strided",
    "repeated",
    "triangles",
    "outer",
    "further activations",
    "mean over several dimensions",
    "extremes",
    "functions",
    "norms",
    "softmax",
    "log softmax",
    "masked softmax",
    "scalars and promotion",
    "similarity",
)
"""Of the coder's operations (tests/codegen/families.py), those that its kernels are judged for here."""
