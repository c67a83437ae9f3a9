"""Files that name the GPU run under the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GUARDED = """\
import torch
import triton
import triton.language as tl

empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda


@triton.jit
def doubled_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


def doubled(x):
    with torch.cuda._DeviceGuard(INDEX):
        y = empty_strided_cuda((x.numel(),), (1,), torch.float32)
        doubled_kernel[(triton.cdiv(x.numel(), 4),)](x, y, x.numel(), BLOCK=4)
    return y


print(doubled(torch.arange(6.0, device="cuda")).tolist())
"""


@pytest.mark.parametrize("index", ["x.device.index", "0"])
def test_a_launcher_enters_the_guard_of_its_tensors_device_and_allocates_there(tmp_path: Path, index: str) -> None:
    file = tmp_path / "doubled.py"
    file.write_text(GUARDED.replace("INDEX", index))
    command = [sys.executable, "-m", "mtmc_lsp.kernels.worker.run_on_cpu", str(file)]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=800)
    assert done.stdout == "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]\n", done.stderr
