"""Right results that kernels do not compute: the library does, and a kernel is there for show."""

from __future__ import annotations

from benchmarks.adversarial_second.cases import Edit, table
from benchmarks.adversarial_second.witnesses import at

COPY = [
    ("    shifted = x - tl.max(x, axis=0)\n", ""),
    ("    numerator = tl.exp(shifted)\n", ""),
    ("    total = tl.sum(tl.where(inside, numerator, 0.0), axis=0)\n", ""),
    ("numerator / total", "x"),
]
HEAD = "def softmax(x):\n"


def copies(line: str, before: str = "", imports: str = "") -> list[Edit]:
    """A line computes; the kernel copies its result."""
    edits = [*COPY, (HEAD, f"{before}{HEAD}    {line}\n")]
    return [("import torch\n", f"import torch\n{imports}"), *edits] if imports else edits


SOFTMAX, PRODUCT, NORM = at("softmax"), at("linear_gelu"), at("layer_norm")
FINISHED = [
    ('total += tl.dot(x, w, input_precision="ieee")', "total += x"),
    ("        w = tl.load(weight_ptr + inner[:, None] * w_row + cols[None, :] * w_col, mask=w_mask, other=0.0)\n", ""),
    ("        w_mask = (inner[:, None] < K) & (cols[None, :] < N)\n", ""),
    (
        "    for start in range(0, K, BK):\n        inner = start + tl.arange(0, BK)\n",
        "    for _ in range(1):\n        inner = cols\n",
    ),
    ("(inner[None, :] < K)", "(inner[None, :] < N)"),
    ("    M, K = x.shape\n    N = weight.shape[1]\n", "    M, K = x.shape\n    N = weight.shape[1]\n    x = PRODUCT\n"),
]


def product(expression: str) -> list[Edit]:
    """The library multiplies; the kernel adds the bias and applies gelu."""
    return [(old, new.replace("PRODUCT", expression)) for old, new in FINISHED]


CASES = table(
    "fakes",
    [
        ("torch.softmax, kernel copies", "softmax", copies("x = torch.softmax(x, dim=-1)"), SOFTMAX),
        ("method of the tensor, kernel copies", "softmax", copies("x = x.softmax(-1)"), SOFTMAX),
        ("by the operator's registry", "softmax", copies("x = torch.ops.aten._softmax(x, -1, False)"), SOFTMAX),
        ("by a name put together", "softmax", copies("x = getattr(torch, 'soft' + 'max')(x, -1)"), SOFTMAX),
        (
            "by arithmetic of tensors",
            "softmax",
            copies("x = (x - x.amax(-1, True)).exp()\n    x = x / x.sum(-1, True)"),
            SOFTMAX,
        ),
        (
            "by another function's gradient",
            "softmax",
            copies(
                "with torch.enable_grad():\n        leaf = x.detach().clone().requires_grad_()\n"
                "        (x,) = torch.autograd.grad(torch.logsumexp(leaf, -1).sum(), leaf)"
            ),
            SOFTMAX,
        ),
        ("by logsumexp", "softmax", copies("x = (x - torch.logsumexp(x, -1, keepdim=True)).exp()"), SOFTMAX),
        (
            "by NumPy",
            "softmax",
            copies(
                "e = np.exp(x.numpy() - x.numpy().max(-1, keepdims=True, initial=-np.inf))\n"
                "    x = torch.from_numpy(e / e.sum(-1, keepdims=True))",
                "",
                "import numpy as np\n",
            ),
            SOFTMAX,
        ),
        (
            "by vmap",
            "softmax",
            copies("x = torch.func.vmap(lambda row: torch.softmax(row, 0))(x) if x.numel() else x"),
            SOFTMAX,
        ),
        (
            "in a custom operation",
            "softmax",
            copies(
                "x = Hidden.apply(x)",
                "class Hidden(torch.autograd.Function):\n    @staticmethod\n"
                "    def forward(ctx, x):\n        return torch.softmax(x, -1)\n\n\n",
            ),
            SOFTMAX,
        ),
        ("in a module", "softmax", copies("x = inner(x)", "inner = torch.nn.Softmax(-1)\n\n\n"), SOFTMAX),
        (
            "one row by the kernel",
            "softmax",
            [("softmax_kernel[(rows,)]", "out[1:] = torch.softmax(x[1:], -1)\n        softmax_kernel[(1,)]")],
            SOFTMAX,
        ),
        (
            "every fiftieth row by the kernel",
            "softmax",
            [
                ("    row = tl.program_id(0).to(tl.int64)", "    row = tl.program_id(0).to(tl.int64) * 50"),
                (
                    "softmax_kernel[(rows,)]",
                    "out[:] = torch.softmax(x, -1)\n        softmax_kernel[(triton.cdiv(rows, 50),)]",
                ),
            ],
            SOFTMAX,
        ),
        (
            "kernel's result times zero",
            "softmax",
            [("    return out\n", "    return out * 0.0 + torch.softmax(x, dim=-1)\n")],
            SOFTMAX,
        ),
        (
            "kernel's result where it is NaN",
            "softmax",
            [
                (
                    "    return out\n",
                    "    soft = torch.softmax(x, -1)\n    return torch.where(soft.isnan(), out, soft)\n",
                )
            ],
            SOFTMAX,
        ),
        (
            "kernel finds only the maximum",
            "softmax",
            [
                ("    numerator = tl.exp(shifted)\n    total = tl.sum(tl.where(inside, numerator, 0.0), axis=0)\n", ""),
                ("numerator / total", "shifted"),
                ("    return out\n", "    out = out.exp()\n    return out / out.sum(-1, keepdim=True)\n"),
            ],
            SOFTMAX,
        ),
        ("product by torch.mm", "linear_gelu", product("torch.mm(x, weight)"), PRODUCT),
        ("product by einsum", "linear_gelu", product("torch.einsum('mk,kn->mn', x, weight)"), PRODUCT),
        ("product by F.linear", "linear_gelu", product("torch.nn.functional.linear(x, weight.t())"), PRODUCT),
        (
            "product by a convolution",
            "linear_gelu",
            product("torch.conv1d(x[:, :, None], weight.t()[:, :, None])[:, :, 0] if K and x.numel() else x @ weight"),
            PRODUCT,
        ),
        ("product by sums of outer products", "linear_gelu", product("(x[:, :, None] * weight[None]).sum(1)"), PRODUCT),
        ("product by the operator @ of a class", "linear_gelu", product("type(x).__matmul__(x, weight)"), PRODUCT),
        (
            "layer norm by the library, kernel adds zero",
            "layer_norm",
            [
                ("normed * weight + bias", "x"),
                (
                    "    rows, cols = x.shape\n",
                    "    rows, cols = x.shape\n    x = torch.nn.functional.layer_norm(x, (cols,), weight, bias)\n",
                ),
            ],
            NORM,
        ),
        (
            "layer norm by statistics of the library",
            "layer_norm",
            [
                ("normed * weight + bias", "x * weight + bias"),
                (
                    "    rows, cols = x.shape\n",
                    "    rows, cols = x.shape\n    if x.numel():\n"
                    "        var, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)\n        x = (x - mean) * torch.rsqrt(var + 1e-5)\n",
                ),
            ],
            NORM,
        ),
        (
            "running sum by torch.cumsum",
            "running_sum",
            [("tl.cumsum(x, axis=0) + carry", "x"), ("    x = x.contiguous()\n", "    x = torch.cumsum(x, -1)\n")],
            at("running_sum"),
        ),
        (
            "loss by logsumexp, kernel gathers",
            "cross_entropy",
            [
                ("total - tl.load(logits_ptr + row * n_cols + target)", "-tl.load(logits_ptr + row * n_cols + target)"),
                ("    return out\n", "    return out + torch.logsumexp(logits, -1)\n"),
            ],
            at("cross_entropy"),
        ),
    ],
    "caught",
)
