"""Programs that train with generated code, in a process with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mtmc_lsp.core.run import Candidate
from mtmc_lsp.verify.worker.interpreter.source import on_cpu

ROOT = Path(__file__).parents[2]
PRELUDE = '''import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from mtmc_lsp.verify.worker.interpreter import prepare_interpreter

prepare_interpreter()
import fast
import user

torch.manual_seed(0)
launched = []


def counted(name):
    run = getattr(fast, name)

    def count(*args, **kwargs):
        launched.append(name)
        return run(*args, **kwargs)

    setattr(fast, name, count)


for name in ("f_forward", "f_backward"):
    if hasattr(fast, name):
        counted(name)


def runs():
    """The passes that ran as kernels since the last call."""
    names = [name.removeprefix("f_") for name in launched]
    launched.clear()
    return names


def leaves(*tensors):
    """Copies that require gradients like the originals."""
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def close(a, b):
    """Check that two results are equal but for rounding."""
    if a is None or b is None:
        assert a is b, (a, b)
        return
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


def x_w(rows=16, columns=96):
    """Arguments of a norm."""
    return torch.randn(rows, columns, requires_grad=True), torch.randn(columns, requires_grad=True)
'''
ON_TWO_RANKS = """
import os

child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
work(rank)
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
"""The end of a program that calls ``work(rank)`` in two processes."""


def run(folder: Path, user_text: str, candidate: Candidate, program: str, *, replaces_autocast: bool = True) -> None:
    """Run a program that imports the user's file as ``user`` and a version of it as ``fast``.

    Args:
        replaces_autocast: whether guards read the state of the CPU's autocast instead of the GPU's.

    Raises:
        AssertionError: the program failed.
    """
    folder.mkdir(exist_ok=True)
    (folder / "user.py").write_text(user_text)
    text = on_cpu(candidate.source, user_text)
    if replaces_autocast:
        text = text.replace("is_autocast_enabled()", 'is_autocast_enabled("cpu")')
    (folder / "fast.py").write_text(text)
    (folder / "program.py").write_text(f"{PRELUDE}\n\n{program}")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-4000:]
