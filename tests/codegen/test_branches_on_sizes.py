"""Branches of the user's code on sizes, dtypes and unused arguments: calls that take another branch run the original code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from tests.codegen.checker import Checker
from tests.codegen.harness import fused, verified
from tests.codegen.test_guard import loaded

PRELUDE = "import torch\nimport torch.nn.functional as F\n\n\n"


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


BESIDE = "x=f32[B,T] q=f32[S,D] B=8 T=33 S=6 D=64"
"""Only the metadata of ``q`` matters."""
TARGETS: dict[str, tuple[str, str, list[tuple[Any, ...]], list[tuple[Any, ...]]]] = {
    "scaled by another's size": (
        "x=f32[B,T] q=f32[6,64] B=8 T=33",
        "def f(x, q):\n    return (x * q.shape[-1] ** -0.5).softmax(-1)",
        [(rand(8, 33), rand(6, 64)), (rand(4, 9), rand(6, 64))],
        [(rand(8, 33), rand(6, 32)), (rand(8, 33), None), (rand(8, 33), 3.0)],
    ),
    "a named size that is constant for it": (
        BESIDE,
        "def f(x, q):\n    return (x * q.shape[-1] ** -0.5).softmax(-1)",
        [(rand(8, 33), rand(6, 64)), (rand(4, 9), rand(2, 64))],
        [(rand(8, 33), rand(6, 32))],
    ),
    "another's rank and dtype": (
        BESIDE,
        "def f(x, q):\n    return x.sin() * q.ndim if q.dtype == torch.float32 else x.cos()",
        [(rand(8, 33), rand(6, 64)), (rand(8, 33), rand(5, 1))],
        [(rand(8, 33), rand(6)), (rand(8, 33), rand(6, 64, dtype=torch.float64))],
    ),
    "another's size, even or odd": (
        BESIDE,
        "def f(x, q):\n    return x.sin() if q.shape[0] % 2 == 0 else x.cos()",
        [(rand(8, 33), rand(6, 64)), (rand(8, 33), rand(4, 1))],
        [(rand(8, 33), rand(5, 64))],
    ),
    "a mask that is there": (
        "x=f32[B,T] mask=bool[T] B=8 T=33",
        "def f(x, mask=None):\n    return x.sin() if mask is not None else x.cos()",
        [(rand(8, 33), rand(33, dtype=torch.bool))],
        [(rand(8, 33), None)],
    ),
    "a division that is asked for behind a condition": (
        "x=f32[B,T] B=8 T=33",
        "def f(x):\n    B, T = x.shape\n    if B > 1 and T / (B - 1) > 3:\n        return x.sin()\n    return x.cos()",
        [(rand(8, 33),), (rand(2, 9),)],
        [(rand(1, 33),), (rand(8, 20),)],
    ),
    "the number of elements": (
        "x=f32[B,T] B=8 T=33",
        "def f(x):\n    return x.sin() if x.numel() > 1 else x.cos()",
        [(rand(8, 33),), (rand(1, 2),), (rand(2, 1),)],
        [(rand(1, 1),)],
    ),
    "what torch takes to be so of every size": (
        "x=f32[B,T] B=8 T=33",
        "def f(x):\n    B, T = x.shape\n    if T < 16:\n        return x.sin()\n    return x.cos() * (2.0 if B > 1 else 3.0)",
        [(rand(8, 33),), (rand(2, 16),)],
        [(rand(1, 33),), (rand(8, 15),)],
    ),
    "what torch has asked before": (
        "x=f32[B,T] B=8 T=33",
        "def f(x):\n    B, T = x.shape\n    y = x[:, :B].relu()\n    return y * (2.0 if B == T else 3.0)",
        [(rand(8, 33),), (rand(4, 5),)],
        [(rand(8, 8),)],
    ),
    "a number made of a size": (
        "x=f32[B,T] B=8 T=33",
        "def f(x):\n    return F.layer_norm(x, x.shape[1:], eps=1 / x.shape[1]) * float(x.shape[0])",
        [(rand(8, 33),)],
        [(rand(8, 32),), (rand(7, 33),)],
    ),
    "a bound with an exponent, of a size called e": (
        "x=f32[B,e] B=8 e=33",
        "def f(x):\n    return x * (1.5 if x.shape[1] * 1e-5 < 1 else 2.0)",
        [(rand(8, 33),), (rand(5, 7),)],
        [],
    ),
    "a size called as a function is": (
        "x=f32[B,max] B=8 max=33",
        "def f(x):\n    return x * (1.5 if x.shape[1] > max(x.shape[0], 4) else 2.0)",
        [(rand(8, 33),), (rand(5, 7),)],
        [(rand(8, 8),), (rand(3, 4),)],
    ),
    "a power that is too large for a float": (
        "x=f32[B,T] B=8 T=33",
        "def f(x):\n    return x * (1.5 if 2.0 ** x.shape[1] > x.shape[0] else 2.0)",
        [(rand(8, 33),)],
        [(rand(8, 3),)],
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_calls_that_take_another_branch_run_the_original_code(name: str, checker: Checker, tmp_path: Path) -> None:
    workload, body, accepted_calls, rejected_calls = TARGETS[name]
    text = f"{PRELUDE}# mtmc: {workload}\n{body}\n"
    capture = checker.capture(text, "f")
    candidate = fused(capture, text)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    module = loaded(tmp_path / "asked.py", on_cpu(candidate.source, text))
    for arguments in accepted_calls:
        assert module.f_fits(*arguments), f"{[getattr(x, 'shape', x) for x in arguments]} is as the captured one is"
    for arguments in rejected_calls:
        assert not module.f_fits(*arguments), f"{[getattr(x, 'shape', x) for x in arguments]} is another case"


HELD = """import torch


# mtmc: x=f32[B,33] B=8
class Scaled(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(33))
        self.key = torch.nn.Parameter(torch.ones(width))
        self.idle = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return (x * self.gain * self.key.shape[0] ** -0.5).softmax(-1)
"""


def test_a_parameter_of_another_size_than_the_one_that_a_number_came_from(checker: Checker, tmp_path: Path) -> None:
    candidate = fused(checker.capture(HELD, "Scaled"), HELD)
    module = loaded(tmp_path / "scaled.py", on_cpu(candidate.source, HELD))
    with torch.no_grad():
        same, other, plain = module.Scaled(), module.Scaled(32), module.Scaled()
        plain.idle = None
        assert module.scaled_fits(same, rand(3, 33))
        assert module.scaled_fits(plain, rand(3, 33)), "what it does not look at may be anything"
        assert not module.scaled_fits(other, rand(3, 33))


def test_a_parameter_that_another_module_of_the_class_lacks(checker: Checker, tmp_path: Path) -> None:
    text = HELD.replace("        self.key =", "        if width:\n            self.key =")
    text = text.replace("self.key.shape[0] ** -0.5", "(0.5 if hasattr(self, 'key') else 2.0)")
    candidate = fused(checker.capture(text, "Scaled"), text)
    module = loaded(tmp_path / "lacking.py", on_cpu(candidate.source, text))
    with torch.no_grad():
        assert module.scaled_fits(module.Scaled(), rand(3, 33))
        assert not module.scaled_fits(module.Scaled(0), rand(3, 33))
