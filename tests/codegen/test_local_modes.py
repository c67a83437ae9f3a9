"""Local modes in a target's body: ``.data``, ``detach``, gradients off, autocast."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import MtmcError, TargetUnsupported
from tests.codegen.checker import Checker, planned
from tests.codegen.harness import some_cases

HEAD = "import torch\n\n\n# mtmc: x=f32[B,16] y=f32[B,16] B=4\ndef f(x, y):\n"


@pytest.mark.parametrize(
    "body",
    [
        "    x.data.add_(y.data, alpha=-0.1)\n    return x\n",
        "    x.data.mul_(0.9)\n    x.data[:, 0] = 1.0\n    return x + y\n",
        "    m = x.detach().amax(-1, keepdim=True)\n    return torch.exp(x - m) * y.data\n",
        "    with torch.no_grad():\n        s = x.abs().amax(-1, keepdim=True)\n    return y / (s + 1)\n",
        "    with torch.set_grad_enabled(False), torch.autocast(x.device.type, enabled=False):\n        z = x.float()\n    return z * y\n",
        "    with torch.inference_mode():\n        s = x * 2\n    return s + y\n",
        "    return x + y if torch.compiler.is_compiling() else torch.tanh(x) * y\n",
        "    with torch.autocast('cuda', dtype=torch.float16):\n        z = x @ y.t()\n    return z * 2\n",
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n        z = torch.tanh(x)\n    return z * y\n",
    ],
)
def test_modes_without_an_effect_on_the_results_are_captured(checker: Checker, body: str) -> None:
    capture = checker.capture(HEAD + body)
    assert checker.first_failure(capture, planned(capture), some_cases(capture)) == ""


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("    z = x + y\n    x.data = z\n    return x\n", TargetUnsupported, "assigns .data of a tensor"),
        ("    z = x\n    with torch.enable_grad():\n        return z * y\n", TargetUnsupported, "turns gradients on"),
        (
            "    x.requires_grad_(True)\n    (g,) = torch.autograd.grad((x * y).sum(), x)\n    return g\n",
            TargetUnsupported,
            "computes gradients, and Triton versions have no backward pass",
        ),
    ],
)
def test_modes_that_kernels_cannot_follow_are_refused_with_line_and_remedy(
    checker: Checker, body: str, kind: type[MtmcError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        checker.capture(HEAD + body)
    assert message in caught.value.message
    assert "torch.export" not in str(caught.value)
    assert caught.value.remedy
    assert caught.value.where is not None and caught.value.where.line == HEAD.count("\n") + 2
