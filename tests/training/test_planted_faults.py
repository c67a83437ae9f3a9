"""Faults in the backward pass: each is refused by the cases of a verification."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from tests.codegen.checker import Checker
from tests.training.targets import HEAD, TARGETS, cases, planned

# For each fault: the target, a pattern in the generated code, and its replacement.
FAULTS: dict[str, tuple[str, str, str]] = {
    "a gradient that is doubled": ("gated", r"return grad_a, grad_b$", "return grad_a * 2, grad_b"),
    "a gradient that is left out": ("gated", r"return grad_a, grad_b$", "return grad_a, None"),
    "gradients that are swapped": (
        "gated",
        r"^        return grad_a, grad_b((?:, None)*)$",
        r"        return grad_b, grad_a\1",
    ),
    "a gradient of zeros": ("gelu", r"return grad_x, grad_bias$", "return grad_x, torch.zeros_like(grad_bias)"),
    "a sum over the batch that lacks the last row": (
        "gelu",
        r"grad_x, grad_bias = f_pass\(x, bias, grad_out\.contiguous\(\)\)",
        "grad_x, grad_bias = f_backward(x, bias, grad_out.contiguous())\n"
        "        grad_bias = f_backward(x[:-1], bias, grad_out[:-1].contiguous())[1] if len(x) > 1 else grad_bias",
    ),
    "a mean over the batch instead of a sum": (
        "gelu",
        r"return grad_x, grad_bias$",
        "return grad_x, grad_bias / grad_out.shape[0]",
    ),
    "the sign of a gradient": (
        "rms norm",
        r"return grad_x, grad_weight((?:, None)+)$",
        r"return -grad_x, grad_weight\1",
    ),
    "a scale that is dropped": ("layer norm", r"return grad_x, grad_w, grad_b$", "return grad_x / 2, grad_w, grad_b"),
    "upstream gradients that are ignored": (
        "rms norm",
        r"grad_out\.contiguous\(\)",
        "torch.ones_like(grad_out)",
    ),
    "upstream gradients in the wrong memory order": (
        "rms norm",
        r"grad_out\.contiguous\(\)",
        "torch.as_strided(grad_out, grad_out.shape, (max(grad_out.shape[1], 1), 1), 0)"
        " if grad_out.untyped_storage().nbytes() >= 4 * grad_out.numel() else grad_out.contiguous()",
    ),
    "upstream gradients of the wrong row": (
        "rms norm",
        r"grad_out\.contiguous\(\)",
        "grad_out.roll(1, 0).contiguous()",
    ),
    "a saved value of another call": (
        "rms norm",
        r"ctx\.save_for_backward\(x, weight, rstd\)",
        "ctx.save_for_backward(x, weight, rstd.roll(1, 0))",
    ),
    "a saved value that is rounded": (
        "rms norm",
        r"ctx\.save_for_backward\(x, weight, rstd\)",
        "ctx.save_for_backward(x, weight, rstd.bfloat16().float())",
    ),
    "an operand instead of another": (
        "rms norm",
        r"x, weight, rstd = ctx\.saved_tensors",
        "x, weight, rstd = ctx.saved_tensors\n        weight = torch.ones_like(weight)",
    ),
    "a gradient in lower precision": (
        "layer norm",
        r"return grad_x, grad_w, grad_b$",
        "return grad_x.bfloat16().float(), grad_w, grad_b",
    ),
    "a class that counts although it is ignored": ("ignored classes", r"!= -1", "!= -2"),
    "a mask that is inverted": ("changed in place", r"<= 0", "> 0"),
    "a row of the first half alone": (
        "rotary",
        r"return grad_q((?:, None)+)$",
        r"grad_q = grad_q.clone()\n        grad_q[..., 16:] = 0\n        return grad_q\1",
    ),
    "only one of two results": (
        "two results",
        r"grad_out_1\.contiguous\(\)",
        "torch.zeros_like(grad_out_1).contiguous()",
    ),
    "the gradient of the other result": (
        "two results",
        r"grad_out_0\.contiguous\(\)",
        "grad_out_1[:, None].expand_as(grad_out_0).contiguous()",
    ),
    "a broadcast dimension that is not reduced": (
        "broadcast operands",
        r"return grad_x, grad_a, grad_b$",
        "return grad_x, grad_a / grad_x.shape[0], grad_b",
    ),
    "no record of the call": ("gated", r"return _FAutograd\.apply\(a, b[^)]*\)", "return f_forward(a, b)"),
    "the gradient of the first call": (
        "rms norm",
        r"grad_x, grad_weight = f_pass\(x, weight, rstd, grad_out\.contiguous\(\)\)",
        "if not hasattr(_FAutograd, 'kept'):\n"
        "            _FAutograd.kept = f_backward(x, weight, rstd, grad_out.contiguous())\n"
        "        grad_x, grad_weight = _FAutograd.kept",
    ),
}


@pytest.fixture(scope="module")
def versions() -> dict[str, tuple[Capture, Candidate]]:
    """The captured and planned targets so far."""
    return {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_backward_pass_is_refused(
    checker: Checker, versions: dict[str, tuple[Capture, Candidate]], fault: str
) -> None:
    name, pattern, replacement = FAULTS[fault]
    if name not in versions:
        capture = checker.capture(HEAD + TARGETS[name])
        versions[name] = capture, planned(capture)
    capture, candidate = versions[name]
    source, count = re.subn(pattern, lambda _: replacement, candidate.source, flags=re.MULTILINE)
    assert count, candidate.source
    wrong = replace(candidate, id=fault, source=source)
    assert checker.first_failure(capture, wrong, cases(capture)) != ""
