"""The decorator that is offered where torch.compile is faster than the kernels."""

from __future__ import annotations

import pytest

from mtmc_lsp.source.compile_decorator import add_compile_decorator

MODULE = """from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return x + 1

    @staticmethod
    def scale(x):
        return 2 * x
"""


def test_a_function_gets_the_decorator_directly_above_its_def() -> None:
    source = "import torch\n\n\n@torch.no_grad()\ndef f(x):\n    return x\n"
    changed = add_compile_decorator(source, "f")
    assert changed == source.replace("def f", "@torch.compile\ndef f")


@pytest.mark.parametrize("name", ["Net", "Net.forward"])
def test_a_module_gets_it_on_its_forward_and_the_file_the_missing_import(name: str) -> None:
    changed = add_compile_decorator(MODULE, name)
    assert changed == "import torch\n" + MODULE.replace("    def forward", "    @torch.compile\n    def forward")


def test_a_static_method_stays_one() -> None:
    """The static method is the outer decorator, so the compiled function is what it wraps."""
    changed = add_compile_decorator(MODULE, "Net.scale")
    assert changed is not None
    assert "    @staticmethod\n    @torch.compile\n    def scale(x):" in changed


def test_the_import_follows_the_docstring_and_future_imports() -> None:
    source = '"""Doc."""\nfrom __future__ import annotations\n\ndef f(x):\n    return x\n'
    changed = add_compile_decorator(source, "f")
    assert changed is not None
    compile(changed, "f.py", "exec")
    assert changed.index("__future__") < changed.index("import torch\n")


def test_line_ends_of_windows_stay() -> None:
    changed = add_compile_decorator("import torch\r\ndef f(x):\r\n    return x\r\n", "f")
    assert changed == "import torch\r\n@torch.compile\r\ndef f(x):\r\n    return x\r\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\n@torch.compile\ndef f(x):\n    return x\n", "f"),
        ("import torch\n@torch.compile(mode='max-autotune')\ndef f(x):\n    return x\n", "f"),
        ("def f(x):\n    return x\n", "g"),
        ("def f(x:\n", "f"),
    ],
)
def test_where_it_cannot_be_added_there_is_no_text(source: str, name: str) -> None:
    assert add_compile_decorator(source, name) is None
