"""Features that correct kernels need and that the interpreter lacks work in a verification."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from honest import own
from pairs import POINTWISE, changed

from mtmc_lsp.core.results import Verdict

LAUNCH = "(x, out, x.numel(), BLOCK=64)"
PARAMETERS = "count, BLOCK: tl.constexpr"
LIBDEVICE = (
    "import triton.language as tl\n",
    "import triton.language as tl\nfrom triton.language.extra import libdevice\n",
)
TUNED = (
    "@triton.jit",
    "@triton.autotune([triton.Config({'BLOCK': b}, num_warps=w) for b in (64, 128) for w in (2, 4)], key=['count'])\n@triton.jit",
)
KINDS = {
    "a float argument with methods": (
        "x * 0.3",
        "x * scale.to(tl.float32)",
        ((PARAMETERS, f"count, scale, {PARAMETERS[7:]}"), (LAUNCH, "(x, out, x.numel(), 0.3, BLOCK=64)")),
    ),
    "functions of CUDA's library": (
        "torch.tanh(x) + torch.erf(x) + torch.hypot(x, x * 2)",
        "libdevice.tanh(x) + libdevice.erf(x) + libdevice.hypot(x, x * 2.0)",
        (LIBDEVICE,),
    ),
    "a choice by timing": (
        "x * 2 + 1",
        "x * 2 + 1",
        (TUNED, (LAUNCH, "(x, out, x.numel())"), ("(triton.cdiv(x.numel(), 64),)", "lambda m: (triton.cdiv(x.numel(), m['BLOCK']),)")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_kernel_with_this_is_certified(kind: str, judge: Callable[..., Verdict]) -> None:
    formula, triton, changes = KINDS[kind]
    verdict = judge(own(formula), "own", changed(POINTWISE.replace("FORMULA", triton), *changes), "fast")
    assert verdict.is_correct, verdict.reason


def test_a_wrong_function_of_cudas_library_is_found(judge: Callable[..., Verdict]) -> None:
    """The library's functions compute; they do not only pass."""
    text = changed(POINTWISE.replace("FORMULA", "libdevice.sinh(x)"), LIBDEVICE)
    assert not judge(own("torch.tanh(x)"), "own", text, "fast").is_correct


BLOCK_POINTERS = """
import numpy, sys, torch, triton, triton.language as tl
from triton.runtime import interpreter
from mtmc_lsp.verify.worker.interpreter.patches import patch_interpreter

if not hasattr(interpreter, "BlockPointerHandle"):
    sys.exit(f"no block pointers in Triton {triton.__version__}")
patch_interpreter()
seen = []
original = interpreter.InterpreterBuilder.create_masked_load
interpreter.InterpreterBuilder.create_masked_load = lambda *a, **k: seen.append(type(a[2]).__name__) or original(*a, **k)

@triton.jit
def doubled(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (N,), (1,), (0,), (BLOCK,), (0,))
    out = tl.make_block_ptr(out_ptr, (N,), (1,), (0,), (BLOCK,), (0,))
    tl.store(out, tl.load(x, boundary_check=(0,)) * 2, boundary_check=(0,))

x, out = torch.arange(5.0), torch.zeros(5)
doubled[(1,)](x, out, 5, BLOCK=8)
print(out.tolist(), seen)
"""


def test_masks_of_block_pointers_are_tiles(tmp_path: Path) -> None:
    """Observers of loads ask for the type of the mask."""
    file = tmp_path / "program.py"
    file.write_text(BLOCK_POINTERS)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=800)
    if "no block pointers in Triton" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.strip() == "[0.0, 2.0, 4.0, 6.0, 8.0] ['TensorHandle']", done.stderr


DESCRIPTORS = """
import torch, triton, triton.language as tl
from mtmc_lsp.verify.worker.interpreter import prepare_interpreter

prepare_interpreter()

@triton.jit
def doubled(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = tl.make_tensor_descriptor(x_ptr, (8, N), (16, 1), (1, BLOCK))
    out = tl.make_tensor_descriptor(out_ptr + row * 16, (1, N), (16, 1), (1, BLOCK))
    out.store([0, 0], x.load([row, 0]) * 2)

x, out = torch.arange(128.0).reshape(8, 16), torch.zeros(8, 16)
doubled[(8,)](x, out, 13, BLOCK=16)
print(torch.equal(out[:, :13], 2 * x[:, :13]), out[:, 13:].any().item())
"""


def test_descriptors_load_and_store(tmp_path: Path) -> None:
    """Triton 3.6 gives their masks as arrays, not as tiles."""
    file = tmp_path / "program.py"
    file.write_text(DESCRIPTORS)
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=800)
    assert done.stdout.strip() == "True False", done.stderr
