"""Candidates that change what everyone shares: the default dtype, seeds, flags, limits, and functions of torch."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.adversarial_second.cases import Edit, Witness, table
from benchmarks.adversarial_second.witnesses import inputs

HEAD = "def softmax(x):\n"


def in_call(line: str, imports: str = "") -> list[Edit]:
    """Runs a line in each call."""
    return [("import torch\n", f"{imports}import torch\n"), (HEAD, f"{HEAD}    {line}\n")]


def at_import(line: str, imports: str = "") -> list[Edit]:
    """Runs a line once, when the file is imported."""
    return [("import torch\n", f"{imports}import torch\n"), (HEAD, f"{line}\n\n\n{HEAD}")]


def after(read: Callable[[], Any], base: str = "softmax") -> Witness:
    """What ``read`` returns before any use of the candidate's call and after it; the file itself is imported already."""
    initial = read()

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        candidate(*inputs(base))
        return initial, read()

    return witness


def patched(holder: Any, name: str) -> Witness:
    """Whether a function of torch is still what it was."""
    return after(lambda: id(getattr(holder, name)))


CASES = table(
    "harness",
    [
        (
            "default dtype, each call",
            "softmax",
            in_call("torch.set_default_dtype(torch.float64)"),
            after(torch.get_default_dtype),
        ),
        (
            "default dtype, at import",
            "softmax",
            at_import("torch.set_default_dtype(torch.float64)"),
            after(torch.get_default_dtype),
        ),
        ("seed, each call", "softmax", in_call("torch.manual_seed(0)"), after(torch.initial_seed)),
        ("seed, at import", "softmax", at_import("torch.manual_seed(0)"), after(torch.initial_seed)),
        (
            "python's seed, each call",
            "softmax",
            in_call("random.seed(0)", "import random\n"),
            after(lambda: hash(random.getstate())),
        ),
        ("gradients off, each call", "softmax", in_call("torch.set_grad_enabled(False)"), after(torch.is_grad_enabled)),
        (
            "gradients off, at import",
            "softmax",
            at_import("torch.set_grad_enabled(False)"),
            after(torch.is_grad_enabled),
        ),
        (
            "tf32 allowed, each call",
            "softmax",
            in_call("torch.backends.cuda.matmul.allow_tf32 = True"),
            after(lambda: torch.backends.cuda.matmul.allow_tf32),
        ),
        (
            "tf32 allowed, at import",
            "softmax",
            at_import("torch.set_float32_matmul_precision('medium')"),
            after(torch.get_float32_matmul_precision),
        ),
        (
            "mkldnn off, at import",
            "softmax",
            at_import("torch.backends.mkldnn.enabled = False"),
            after(lambda: torch.backends.mkldnn.enabled),
        ),
        (
            "denormals flushed, each call",
            "softmax",
            in_call("torch.set_flush_denormal(True)"),
            after(lambda: bool(torch.tensor([1e-40]) * 1.0 > 0)),
        ),
        (
            "denormals flushed, at import",
            "softmax",
            at_import("torch.set_flush_denormal(True)"),
            after(lambda: bool(torch.tensor([1e-40]) * 1.0 > 0)),
        ),
        (
            "anomaly detection, each call",
            "softmax",
            in_call("torch.autograd.set_detect_anomaly(True)"),
            after(torch.is_anomaly_enabled),
        ),
        (
            "environment, each call",
            "softmax",
            in_call("os.environ['TORCH_SHOW_CPP_STACKTRACES'] = '1'", "import os\n"),
            after(lambda: os.environ.get("TORCH_SHOW_CPP_STACKTRACES")),
        ),
        (
            "environment, at import",
            "softmax",
            at_import("os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'", "import os\n"),
            after(lambda: os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")),
        ),
        (
            "torch.allclose is always true",
            "softmax",
            at_import("torch.allclose = lambda *a, **k: True"),
            patched(torch, "allclose"),
        ),
        (
            "torch.allclose by another name",
            "softmax",
            at_import("vars(torch)['allclose'] = lambda *a, **k: True"),
            patched(torch, "allclose"),
        ),
        (
            "torch.softmax is patched in a call",
            "softmax",
            in_call("setattr(torch, 'softmax', torch.log_softmax)"),
            patched(torch, "softmax"),
        ),
        (
            "comparison of tensors is patched",
            "softmax",
            at_import("torch.Tensor.allclose = lambda *a, **k: True"),
            patched(torch.Tensor, "allclose"),
        ),
        (
            "recursion limit, each call",
            "softmax",
            in_call("sys.setrecursionlimit(5000)", "import sys\n"),
            after(sys.getrecursionlimit),
        ),
        (
            "signal handler, at import",
            "softmax",
            at_import("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", "import signal\n"),
            after(lambda: signal.getsignal(signal.SIGUSR1)),
        ),
        (
            "path of imports, each call",
            "softmax",
            in_call("sys.path.insert(0, '.')", "import sys\n"),
            after(lambda: len(sys.path)),
        ),
        (
            "print options, each call",
            "softmax",
            in_call("torch.set_printoptions(precision=1)"),
            after(lambda: str(torch.tensor(0.123456))),
        ),
        (
            "default device, at import",
            "softmax",
            [*at_import("torch.set_default_device('meta')"), ("device=x.device)", "device='cpu')")],
            after(lambda: str(torch.empty(1).device)),
        ),
    ],
)
