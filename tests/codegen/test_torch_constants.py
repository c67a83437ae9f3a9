"""Arguments that are dtypes, layouts or memory formats: their defaults are part of the version that the guard accepts."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from tests.codegen.checker import Checker, greedy
from tests.codegen.test_families import cases, check

HEAD = "import torch\n\n# mtmc: x=f32[B,6] B=5{}\n"
FORMS = {
    "a dtype": ("f(x, dtype=torch.float16)", "x.exp().to(dtype) * 2", "dtype is torch.float16"),
    "a memory format": (
        "f(x, memory_format=torch.preserve_format)",
        "torch.ones_like(x, memory_format=memory_format) * x.exp()",
        "memory_format is torch.preserve_format",
    ),
    "a layout": ("f(x, *, layout=torch.strided)", "torch.ones_like(x, layout=layout) + x", "layout is torch.strided"),
}


@pytest.mark.parametrize("gradient", ["", " grad=x"])
@pytest.mark.parametrize("name", FORMS)
def test_the_guard_compares_them(checker: Checker, name: str, gradient: str) -> None:
    signature, body, condition = FORMS[name]
    capture = checker.capture(f"{HEAD.format(gradient)}def {signature}:\n    return {body}\n")
    candidate = greedy(capture, {})
    assert condition in candidate.source
    check(checker, capture, [candidate], cases(capture))


def test_a_string_that_looks_like_one_is_refused(checker: Checker) -> None:
    with pytest.raises(TargetUnsupported, match="argument 'kind' of f is a str"):
        checker.capture(HEAD.format("") + "def f(x, kind='torch.float16'):\n    return x.exp() * 2\n")
