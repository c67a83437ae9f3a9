"""Long lines of generated code are wrapped, and the code stays the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mtmc_lsp.codegen.kernel.device_functions import HELPERS
from mtmc_lsp.codegen.matmul.descriptors import ALLOCATOR_SOURCE
from mtmc_lsp.codegen.module.constants import CONSTANT_SOURCE
from mtmc_lsp.codegen.module.cuda_graph import GRAPHS, RUN_CUDA_GRAPH
from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES
from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS
from mtmc_lsp.codegen.module.up_to_date import CODE_HELPERS
from mtmc_lsp.source.line_wrapping import MAX_LINE, wrapped

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "mtmc_lsp" / "codegen").glob("**/*.py")) + sorted((ROOT / "tests" / "golden").glob("*/after.py"))


def meaning(source: str) -> str:
    """The syntax tree; line breaks in docstrings do not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = "".join(node.value.value.split())
    return ast.dump(tree)


@pytest.mark.parametrize("limit", [50, 80, MAX_LINE])
def test_wrapping_real_code_does_not_change_its_meaning(limit: int) -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert meaning(wrapped(text, limit)) == meaning(text), path


@pytest.mark.parametrize(
    ("line", "result"),
    [
        (
            "y = tl.load(x_ptr + rows * n_cols, mask=mask)",
            "y = tl.load(\n    x_ptr + rows * n_cols, mask=mask\n)",
        ),
        (
            "def launch(first, second, third, fourth, fifth): pass",
            "def launch(\n    first, second, third, fourth, fifth\n): pass",
        ),
        (
            "call(first_argument, second_argument, third_one, x)",
            "call(\n    first_argument,\n    second_argument,\n    third_one,\n    x,\n)",
        ),
        (
            "y = first + second * third - fourth_value_of_all",
            "y = (\n    first\n    + second * third\n    - fourth_value_of_all\n)",
        ),
        (
            "if aaaaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbbbbbbbb:",
            "if (\n    aaaaaaaaaaaaaaaaaa\n    and bbbbbbbbbbbbbbbbbbbbbb\n):",
        ),
        (
            "y = all(t.is_cuda and t.dim() for t in tensors if t)",
            "y = all(\n    t.is_cuda and t.dim()\n    for t in tensors\n    if t\n)",
        ),
        (
            "if fits_the_arguments(first, second):  # marked here",
            "if fits_the_arguments(  # marked here\n    first, second\n):",
        ),
        ("# a comment of more than forty characters is long", "# a comment of more than forty\n# characters is long"),
        (
            "x = value_with_a_name - 1e-06 * other_value_here",
            "x = (\n    value_with_a_name\n    - 1e-06 * other_value_here\n)",
        ),
        (
            "x = 'a string that does not fit into one line'",
            "x = (\n    'a string that does not fit into on'\n    'e line'\n)",
        ),
    ],
)
def test_a_line_is_wrapped_like_a_formatter_does(line: str, result: str) -> None:
    body = "\n    pass" if line.endswith(":") or "):  #" in line else ""
    assert wrapped(line + body, 40) == result + body


def test_helpers_fit_so_that_checks_recognise_their_text_in_generated_files() -> None:
    sources = [
        *GUARD_HELPERS.values(),
        *HELPERS.values(),
        CODE_HELPERS,
        ALLOCATOR_SOURCE,
        CONSTANT_SOURCE,
        DIRECT_LAUNCHES,
    ]
    for source in (*sources, GRAPHS, RUN_CUDA_GRAPH):
        assert wrapped(source) == source
