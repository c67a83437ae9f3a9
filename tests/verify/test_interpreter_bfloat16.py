"""The interpreter computes bfloat16 bit by bit as torch does, which rounds each result to the nearest value, ties to even."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
import triton.language as tl
from mtmc_lsp.verify.worker.interpreter import patch_bfloat16, prepare_interpreter
(prepare_interpreter if FAST else patch_bfloat16)()

BFLOAT16 = torch.bfloat16
N = 1024

@triton.jit
def elementwise(x_ptr, y_ptr, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out + at, x + y)
    tl.store(out + N + at, x - y)
    tl.store(out + 2 * N + at, x * y)
    tl.store(out + 3 * N + at, tl.where(x < y, x, -y))
    tl.store(out + 4 * N + at, tl.maximum(x, y))
    tl.store(out + 5 * N + at, tl.minimum(x, y))
    tl.store(out + 6 * N + at, tl.abs(x) * 3 + 1.1)
    tl.store(out + 7 * N + at, x.to(tl.float32) * 0.3)
    tl.store(out + 8 * N + at, tl.where((x != y) & (x >= 0.5), tl.full((N,), 0.1, tl.bfloat16), x.to(tl.int32).to(tl.bfloat16)))
    tl.store(out + 9 * N + at, x / y)

@triton.jit
def casts(x_ptr, single, half, wide, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(single + at))
    tl.store(out + N + at, tl.load(wide + at).to(tl.bfloat16))
    tl.store(out + 2 * N + at, tl.load(half + at).to(tl.bfloat16))
    tl.store(out + 3 * N + at, tl.load(single + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))
    tl.store(half + at, tl.load(x_ptr + at).to(tl.float16))

@triton.jit
def reductions(x_ptr, out, sums, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out + tl.arange(0, M), tl.max(x, 1))
    tl.store(out + M + tl.arange(0, M), tl.min(x, 1))
    tl.store(out + 2 * M + tl.arange(0, M), tl.sum(x, 1))
    tl.store(out + 3 * M + tl.arange(0, M), tl.argmax(x, 1).to(tl.float32))
    tl.store(sums + at, tl.cumsum(x, 1))

@triton.jit
def product(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def additions(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(out + at % 2, tl.load(x + at), mask=at < N - 1)

torch.manual_seed(0)
wrong = []
def same(name, a, b):
    if not torch.equal(torch.isnan(a), torch.isnan(b)) or not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
        wrong.append(name)

special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, 1.0, 1.00390625])
x, y = (torch.randn(N) * 10 ** (4 * torch.rand(N) - 2) for _ in range(2))
x[:10], y[:10], y[10:20] = special, 2.5, special
x, y = x.to(BFLOAT16), y.to(BFLOAT16)
out = torch.zeros(10, N, dtype=BFLOAT16)
elementwise[(1,)](x, y, out, N)
expected = {
    "add": x + y, "subtract": x - y, "multiply": x * y, "select": torch.where(x < y, x, -y), "maximum": torch.fmax(x, y),
    "minimum": torch.fmin(x, y), "steps": x.abs() * 3 + torch.tensor(1.1, dtype=BFLOAT16), "float32": (x.float() * 0.3).to(BFLOAT16),
}
for i, (name, value) in enumerate(expected.items()):
    same(name, out[i], value)
finite = x.isfinite() & (x.abs() < 2**31)
mask = (x != y) & (x >= 0.5)
chosen = torch.where(mask, torch.tensor(0.1, dtype=BFLOAT16), torch.where(finite, x, 0).to(torch.int32).to(BFLOAT16))
same("mask", out[8][finite], chosen[finite])
same("divide", out[9], (x.float() / y.float()).to(BFLOAT16))

bits = torch.randint(-(2**31), 2**31, (N,), dtype=torch.int64).to(torch.int32)
bits[: N // 2] = (bits[: N // 2] & ~0xFFFF) | 0x8000
single = bits.view(torch.float32)
# Just above and below ties, where rounding to float32 first would give the tie.
tie = single.double()
wide = torch.where(torch.arange(N) % 2 == 0, tie * (1 + 1e-12), tie * (1 - 1e-12))
half = torch.randn(N).half()
converted = half.to(BFLOAT16)
out = torch.zeros(4, N, dtype=BFLOAT16)
casts[(1,)](x, single, half, wide, out, N)
same("from float32", out[0], single.to(BFLOAT16))
usual = tie.isfinite() & (tie.abs() > 1e-30) & (tie.abs() < 1e38)
down, up = (single.view(torch.int32) & ~0xFFFF).view(torch.float32), ((single.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
is_tie = (bits & 0xFFFF) == 0x8000
larger = torch.arange(N) % 2 == 0
nearest = torch.where(larger, up, down).to(BFLOAT16)
same("from float64", out[1][usual & is_tie], nearest[usual & is_tie])
same("from float16", out[2], converted)
same("truncated", out[3][usual], down.to(BFLOAT16)[usual])
same("to float16", half, x.half())

M, N = 8, 64
x = torch.randn(M, N).to(BFLOAT16)
out, sums = torch.zeros(4, M, dtype=BFLOAT16), torch.zeros(M, N, dtype=BFLOAT16)
reductions[(1,)](x, out, sums, M, N)
same("largest", out[0], x.amax(1))
same("smallest", out[1], x.amin(1))
total = x
while total.shape[1] > 1:
    total = total[:, ::2] + total[:, 1::2]
if FAST:
    same("sum by halves", out[2], total[:, 0])
if not (out[2].float() - x.float().sum(1)).abs().max() < 0.5:
    wrong.append("sum")
same("index of the largest", out[3], x.argmax(1).to(BFLOAT16))
if not (sums.float() - x.float().cumsum(1)).abs().max() < 0.5:
    wrong.append("cumulated sum")

a, b = torch.randn(32, 32).to(BFLOAT16), torch.randn(32, 32).to(BFLOAT16)
out = torch.zeros(32, 32)
product[(1,)](a, b, out, 32)
if not torch.allclose(out, a.float() @ b.float(), atol=1e-5):
    wrong.append("product")

x, out = torch.randn(32).to(BFLOAT16), torch.zeros(2, dtype=BFLOAT16)
additions[(1,)](x, out, 32)
total = torch.zeros(2, dtype=BFLOAT16)
for i in range(31):
    total[i % 2] += x[i]
same("atomic additions", out, total)
print(json.dumps(wrong))
"""


@pytest.mark.parametrize("fast", [True, False])
def test_operations_round_as_torch_does(fast: bool, tmp_path: Path) -> None:
    """With and without the faster reductions, which a reproduction file lacks."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.replace("FAST", str(fast)))
    seen = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout) == []
