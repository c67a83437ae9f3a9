"""References by name, and the text of a correct kernel for each, which the other tables spoil."""

from dataclasses import dataclass

HEAD = "import torch\nimport triton\nimport triton.language as tl\n"

ROW_KERNEL = """

@triton.jit
def row_kernel(x, out, xs0, xs1, os0, os1, n, gain, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    m = i < n
    v = tl.load(x + row * xs0 + i * xs1, mask=m, other=0.0).to(tl.{acc})
    {body}
    tl.store(out + row * os0 + i * os1, y * gain, mask=m)


def launch(x, gain=1.0):
    out = torch.empty_like(x)
    rows, n = x.shape
    if x.numel():
        block = triton.next_power_of_2(n)
        row_kernel[(rows,)](x, out, *x.stride(), *out.stride(), n, gain, BLOCK=block)
    return out
"""

REDUCE_KERNEL = """

@triton.jit
def reduce_kernel(x, out, xs0, xs1, n, gain, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.{acc})
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        m = i < n
        v = tl.load(x + row * xs0 + i * xs1, mask=m, other=0.0).to(tl.{acc})
        {body}
        total += y
    tl.store(out + row, tl.sum(total, 0) * gain)


def launch(x, gain=1.0):
    rows, n = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    if rows:
        reduce_kernel[(rows,)](x, out, *x.stride(), n, gain, BLOCK=128)
    return out
"""

PLAIN = "\n\ndef {name}(x):\n    return launch(x)\n"


@dataclass(frozen=True)
class Base:
    """A reference in plain torch with the line of a kernel that computes it."""

    name: str
    expression: str
    body: str
    kernel: str = ROW_KERNEL

    def reference(self, dtype: str = "f32", size: str = "2048,768") -> str:
        """Return the text of the reference's file."""
        lines = ["import torch", "import torch.nn.functional as F", "", "", f"# mtmc: x={dtype}[{size}]"]
        return "\n".join([*lines, f"def {self.name}(x):", f"    return {self.expression}", ""])

    def kernels(self, body: str | None = None, acc: str = "float32") -> str:
        """Return the kernel and `launch`, with another line `body` or type of the arithmetic."""
        return HEAD + self.kernel.replace("{acc}", acc).replace("{body}", body or self.body)

    def honest(self) -> str:
        """Return the text of a correct candidate."""
        return self.kernels() + PLAIN.format(name=self.name)


SOFTMAX = 'h = tl.max(tl.where(m, v, -float("inf")), 0); e = tl.where(m, tl.exp(v - h), 0.0); y = e / tl.sum(e, 0)'
LOG_SOFTMAX = (
    'h = tl.max(tl.where(m, v, -float("inf")), 0); y = v - h - tl.log(tl.sum(tl.where(m, tl.exp(v - h), 0.0), 0))'
)
LAYER_NORM = "c = tl.where(m, v - tl.sum(v, 0) / n, 0.0); y = c * tl.rsqrt(tl.sum(c * c, 0) / n + 1e-5)"
RMS_NORM = "y = v * tl.rsqrt(tl.sum(v * v, 0) / n + 1e-6)"
UNIT = "y = v / tl.maximum(tl.sqrt(tl.sum(v * v, 0)), 1e-12, propagate_nan=tl.PropagateNan.ALL)"

BASES = {
    base.name: base
    for base in [
        Base("softmax", "torch.softmax(x, -1)", SOFTMAX),
        Base("log_softmax", "torch.log_softmax(x, -1)", LOG_SOFTMAX),
        Base("layer_norm", "F.layer_norm(x, (x.shape[-1],))", LAYER_NORM),
        Base("rms_norm", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)", RMS_NORM),
        Base("unit_rows", "F.normalize(x, dim=-1)", UNIT),
        Base("silu", "F.silu(x)", "y = v / (1 + tl.exp(-v))"),
        Base("gelu", "F.gelu(x)", "y = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))"),
        Base("row_sum", "x.sum(-1)", "y = v", REDUCE_KERNEL),
        Base("row_energy", "x.square().sum(-1)", "y = v * v", REDUCE_KERNEL),
    ]
}
