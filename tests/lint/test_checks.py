"""The static checks behave as documented: the examples on their pages are tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtmc_lsp import docs
from mtmc_lsp.source.lint import CODES, ON_SAVE, Finding, check, context_of
from mtmc_lsp.source.lint.finding import Severity
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse

PAGES = {path.stem: path.read_text() for path in (docs.FOLDER / "checks").glob("*.md")}
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"


def findings(text: str) -> list[tuple[int, Finding]]:
    """Findings in a file, each with the offset of its statement."""
    outline = Outliner("/m.py").outline(text.encode(), parse(text.encode()))
    context = context_of(outline)
    return [(chunk.start, finding) for chunk in outline.chunks for finding in check(chunk.text, context)]


def codes(text: str) -> list[str]:
    return [finding.code for _, finding in findings(text)]


def example(code: str, heading: str) -> str:
    found = re.search(rf"## {heading}\n```python\n(.*?)```", PAGES[code], re.DOTALL)
    assert found is not None
    return found[1]


def test_every_check_has_a_page_and_every_page_a_check() -> None:
    assert set(PAGES) == {*CODES, *ON_SAVE}


@pytest.mark.parametrize("code", CODES)
def test_the_examples_of_a_page_are_reported_and_not_reported(code: str) -> None:
    assert codes(example(code, "Reported")) == [code]
    assert codes(example(code, "Not reported")) == []


@pytest.mark.parametrize("code", CODES)
def test_a_comment_on_the_line_or_above_disables_a_check(code: str) -> None:
    text = example(code, "Reported")
    ((start, finding),) = findings(text)
    at = len(text.encode()[: start + finding.start].decode())
    end = text.index("\n", at)
    for comment in (f"  # mtmc: ignore[{code}]", "  # mtmc: ignore", f"  # mtmc: ignore[other, {code}]"):
        assert codes(text[:end] + comment + text[end:]) == []
    assert codes(text[:end] + "  # mtmc: ignore[other]" + text[end:]) == [code]
    begin = text.rfind("\n", 0, at) + 1
    indent = re.match(" *", text[begin:])[0]
    # A comment between decorators is Python too.
    assert codes(f"{text[:begin]}{indent}# mtmc: ignore[{code}]\n{text[begin:]}") == []


@pytest.mark.parametrize("code", [code for code in CODES if "Quick fix:" in PAGES[code]])
def test_a_quick_fix_resolves_the_finding(code: str) -> None:
    text = example(code, "Reported")
    ((start, finding),) = findings(text)
    fix = finding.fix
    data = text.encode()
    mended = (data[: start + fix.start] + fix.new.encode() + data[start + fix.end :]).decode()
    assert mended == example(code, "Not reported")


LAUNCHED = example("grid-size", "Not reported")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("BLOCK=128", "BLOCK=300"), ["grid-size", "arange-bound"]),
        (("triton.cdiv(x.numel(), 128)", "triton.cdiv(x.numel(), 64)"), ["grid-size"]),
        (("    y = torch", "    size = 300\n    y = torch"), []),
        (("BLOCK=128", "BLOCK=size"), []),
        (("x.numel(), 128),)", "x.numel(), 128), 2)"), []),
    ],
)
def test_a_launch_is_compared_with_its_grid(change: tuple[str, str], expected: list[str]) -> None:
    assert codes(LAUNCHED.replace(*change)) == expected


def test_a_block_size_in_a_variable_and_a_grid_in_a_lambda_are_seen() -> None:
    text = LAUNCHED.replace(
        "    y = torch", "    size = 300\n    grid = lambda meta: (triton.cdiv(x.numel(), 256),)\n    y = torch"
    )
    text = text.replace("double[(triton.cdiv(x.numel(), 128),)]", "double[grid]").replace("BLOCK=128", "BLOCK=size")
    found = [finding for _, finding in findings(text)]
    assert [finding.code for finding in found] == ["grid-size", "arange-bound"]
    assert (
        found[0].message
        == "the grid has a program for each 256 elements, but `BLOCK` is 300: further programs have nothing to do"
    )
    assert "must be a power of two, not 300; use 512 and a mask" in found[1].message


TWO_BLOCKS = f"""{HEAD}@triton.jit
def k(x_ptr, y_ptr, m, n, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    second = tl.arange(0, BLOCK)
    inside = (first < m) & (second < n)
    x = tl.load(x_ptr + first * 8 + second)
    tl.store(y_ptr + first * 8 + second, x, mask=inside)
"""


def test_the_quick_fix_of_a_missing_mask_takes_all_offsets_into_account() -> None:
    ((start, finding),) = findings(TWO_BLOCKS)
    assert finding.fix is not None
    data = TWO_BLOCKS.encode()
    fixed = (data[: start + finding.fix.start] + finding.fix.new.encode() + data[start + finding.fix.end :]).decode()
    assert "first * 8 + second, mask=inside, other=0.0)" in fixed
    assert codes(fixed) == []
    unknown = TWO_BLOCKS.replace("(first < m) & (second < n)", "first < m")
    ((_, finding),) = findings(unknown)
    assert finding.fix is None, "no bound is known for the second offset"


def kernel(body: str, parameters: str = "x_ptr, y_ptr, n, m, EVEN: tl.constexpr, BLOCK: tl.constexpr") -> str:
    return f"{HEAD}@triton.jit\ndef k({parameters}):\n" + "".join(f"    {line}\n" for line in body.strip().splitlines())


OFFSETS = "at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"


@pytest.mark.parametrize(
    "body",
    [
        "ok = at < n\nif EVEN:\n    x = tl.load(x_ptr + at)\nelse:\n    x = tl.load(x_ptr + at, mask=ok)",
        "for i in range(n):\n    x = tl.load(x_ptr + at)\nx = tl.load(x_ptr + at, mask=at < n)",
        "wrapped = at % n\nx = tl.load(x_ptr + wrapped)\ny = wrapped < n",
        "x = tl.load(x_ptr + at, at < n)\ntl.store(y_ptr + at, x, at < n)",
        "x = tl.load(x_ptr + at, mask=at < n)\ntl.store(y_ptr + tl.program_id(0), tl.sum(x))",
        "x = tl.load(x_ptr + at, boundary_check=(0,))\ny = at < n",
        "b = tl.arange(0, BLOCK)\nc = at[:, None] >= b[None, :]\nx = tl.load(x_ptr + b)",
    ],
)
def test_safe_accesses_are_not_reported(body: str) -> None:
    # A modulo is safe, though slow.
    assert set(codes(kernel(OFFSETS + body))) <= {"missed-vectorization"}


def test_a_pointer_variable_is_followed_to_its_value() -> None:
    assert codes(kernel(OFFSETS + "p = x_ptr + at\nx = tl.load(p)\ny = tl.load(y_ptr + at, mask=at < n)")) == [
        "unmasked-access"
    ]


def test_conditions_on_scalars_are_not_reported() -> None:
    body = "pid = tl.program_id(0)\nif pid == 0 and n > m:\n    tl.store(y_ptr, 1.0)\nx = tl.load(x_ptr)\nif x > 0:\n    pass"
    assert codes(kernel(body)) == []


def test_and_on_blocks_is_deprecated_in_a_mask_and_an_error_in_a_condition() -> None:
    ((_, finding),) = findings(kernel(OFFSETS + "x = tl.load(x_ptr + at, mask=(at < n) and EVEN)"))
    assert (finding.code, finding.severity) == ("tensor-condition", Severity.WARNING)
    ((_, finding),) = findings(kernel(OFFSETS + "if EVEN or not (at < n):\n    pass"))
    assert (finding.code, finding.severity) == ("tensor-condition", Severity.ERROR)
    assert codes(kernel(OFFSETS + "x = tl.load(x_ptr + at, mask=not (at >= n))")) == []


@pytest.mark.parametrize(("start", "end", "expected"), [(0, 64, []), (64, 128, []), (0, 48, ["arange-bound"])])
def test_the_size_of_a_block_is_end_minus_start(start: int, end: int, expected: list[str]) -> None:
    assert codes(kernel(f"x = tl.load(x_ptr + tl.arange({start}, {end}))")) == expected


def test_names_imported_from_triton_language_are_resolved() -> None:
    text = "import triton\nfrom triton.language import arange as a\n\n\n@triton.jit\ndef k():\n    x = a(0, 48)\n"
    assert codes(text) == ["arange-bound"]
    assert codes(text.replace("triton.language", "mine")) == []


@pytest.mark.parametrize(
    ("left", "right", "dtype", "expected"),
    [
        ("32, 8", "N, 32", "float16", ["dot-operands"]),
        ("M, N", "8, 32", "float16", ["dot-operands"]),
        ("1, 32", "32, 1", "float16", []),
        ("M, 8", "8, M", "float32", []),
        ("M, 4", "4, M", "float32", ["dot-operands"] * 2),
        ("M, 4", "4, M", "float64", []),
    ],
)
def test_a_small_inner_size_of_a_dot_is_reported_and_few_rows_are_not(
    left: str, right: str, dtype: str, expected: list[str]
) -> None:
    a, b = (f"tl.full([{shape}], 1, dtype=tl.{dtype})" for shape in (left, right))
    assert codes(kernel(f"c = tl.dot({a}, {b})")) == expected


def test_one_overflowing_offset_and_several_are_worded_in_singular_and_plural() -> None:
    one = "x = tl.load(x_ptr + tl.program_id(0) * n + tl.arange(0, 64))"
    two = "pid = tl.program_id(0)\nx = tl.load(x_ptr + pid * n)\ny = tl.load(x_ptr + pid * m)"
    texts = [finding.message for body in (one, two) for _, finding in findings(kernel(body).replace("n,", "n, m,", 1))]
    assert ["overflows for" in text for text in texts] == [True, False]
    assert "and 1 more are computed in 32 bits and overflow for" in texts[1]


LAUNCHER = (
    HEAD
    + """@triton.jit
def k(x_ptr, n, BLOCK: tl.constexpr):
    pass


def launch(x):
    assert x.is_contiguous()
    n = x.numel()
    y = torch.empty_like(x)
    k[(1,)](x, n, BLOCK=64)
    {line}
    return y
"""
)


@pytest.mark.parametrize(
    "line",
    [
        "print(y)",
        "print('sum', y.sum())",
        "print(f'largest {torch.max(torch.abs(x - y)):.3f}')",
        "print(x[0])",
        "scale = float(x.max())",
        "if bool((y > 0).any()): pass",
        "total = int(torch.sum(y))",
        "host = y.to('cpu')",
        "host = y.cpu()",
        "torch.cuda.synchronize()",
    ],
)
def test_synchronisation_in_a_launcher_is_reported(line: str) -> None:
    assert codes(LAUNCHER.format(line=line)) == ["host-sync"]
    # Without a launch, the same line is not reported.
    assert codes(LAUNCHER.format(line=line).replace("k[(1,)](x, n, BLOCK=64)", "pass")) == []


@pytest.mark.parametrize(
    "line",
    [
        "print(x.shape, y.dtype, x.numel(), x.size(0))",
        "print(f'{n} elements on {x.device}')",
        "print('launched')",
        "if DEBUG: print(y)",
        "if verbose > 1:\n        print(y.sum().item())",
        "grid = int(n / 64)",
        "width = float(x.size(-1))",
        "rows = int(x.shape[0])",
        "y = y.to(torch.float32)",
        "finite = torch.is_tensor(y)",
    ],
)
def test_code_without_synchronisation_is_not_reported(line: str) -> None:
    assert codes(LAUNCHER.format(line=line)) == []


def test_persistent_kernels_and_converted_program_ids_do_not_overflow() -> None:
    load = "x = tl.load(x_ptr + row * n + tl.arange(0, BLOCK))\n"
    row = "row = tl.program_id(0)\n"
    assert codes(kernel(row + load)) == ["int32-offset"]
    assert codes(kernel(row + "step = tl.num_programs(0)\n" + load)) == []
    assert codes(kernel(row + "p = y_ptr + row * m.to(tl.int64)\n" + load)) == []


def test_all_products_of_one_program_id_are_reported_together() -> None:
    body = "row = tl.program_id(0)\nx = tl.load(x_ptr + row * n)\ntl.store(y_ptr + row * m, x)"
    ((_, finding),) = findings(kernel(body))
    assert finding.message.startswith("`row * n` and 1 more are computed in 32 bits")


def test_a_missing_key_and_a_tuned_key_are_reported() -> None:
    text = example("autotune-key", "Not reported")
    assert codes(text.replace('key=["n"]', "key=[]")) == ["autotune-key"]
    assert codes(text.replace('key=["n"]', 'key=["BLOCK"]')) == ["autotune-key"]


def test_a_launcher_that_handles_layout_is_not_reported() -> None:
    text = example("assumed-contiguous", "Reported")
    assert codes(text.replace("    y = ", "    assert x.is_contiguous()\n    y = ")) == []
    assert codes(text.replace("def twice", "@contiguous_inputs\ndef twice")) == []
    assert codes(f"{text}\n\ndef outer(x):\n    return twice(x + 1)\n") == []


def test_code_with_syntax_errors_is_checked_where_possible() -> None:
    assert codes(kernel("x = tl.arange(0, 48)\ny = x +")) == ["arange-bound"]


def test_the_kernels_in_this_repository_have_no_findings() -> None:
    """The examples and the Python code of the repository give no error and no warning."""
    root = Path(__file__).resolve().parent.parent.parent
    for path in [*(root / "examples").glob("*.py"), *(root / "mtmc_lsp").rglob("*.py")]:
        assert [f for _, f in findings(path.read_text()) if f.severity.value != "hint"] == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("rows * n", "rows * stride"), []),
        (("rows * n", "rows * BLOCK"), ["uncoalesced-access"]),
        (("rows * n", "rows * 2"), []),
        (("    x = tl", "    rows = rows + 1\n    x = tl"), []),
    ],
)
def test_only_factors_that_are_more_than_1_make_an_access_uncoalesced(
    change: tuple[str, str], expected: list[str]
) -> None:
    text = example("uncoalesced-access", "Reported").replace("m, n,", "m, n, stride,")
    assert change[0] in text
    assert codes(text.replace(*change)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("x_ptr + offsets", "x_ptr + offsets * n"), []),
        (
            (
                "(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) % n",
                "tl.max_contiguous((tl.arange(0, BLOCK)) % n, BLOCK)",
            ),
            [],
        ),
        (("% n", "% n + 1"), ["missed-vectorization"]),
    ],
)
def test_a_modulo_is_reported_only_along_neighbouring_elements(change: tuple[str, str], expected: list[str]) -> None:
    text = example("missed-vectorization", "Reported").replace("    tl.store(y_ptr + offsets, 2 * ", "    y = (")
    text = text.replace("tl.load(x_ptr + offsets))", "tl.load(x_ptr + offsets))\n    tl.store(y_ptr, tl.sum(y))")
    assert change[0] in text
    assert codes(text.replace(*change)) == expected
