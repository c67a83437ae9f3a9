"""Parentheses of generated expressions."""

from __future__ import annotations

import pytest

from mtmc_lsp.programs.expressions import atom, simplified


@pytest.mark.parametrize("text", ["x", "self.proj(a + b)", "x[:, None]", "h.float()", "F.relu(x, -1)"])
def test_names_calls_and_items_are_operands(text: str) -> None:
    assert atom(text) == text


@pytest.mark.parametrize("text", ["a + b", "-x", "x**2", "a @ b", "~mask", "x if y else z"])
def test_other_expressions_get_parentheses(text: str) -> None:
    assert atom(text) == f"({text})"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = F.relu((a + b))", "x = F.relu(a + b)"),
        ("x = F.relu((a + b), dim=-1)", "x = F.relu(a + b, dim=-1)"),
        ("x = (a + b)", "x = a + b"),
        ("return (a + b)", "return a + b"),
        ("x = (a + b) * c", "x = (a + b) * c"),
        ("x = f((a, b))", "x = f((a, b))"),
        ("x = (f(a), b)", "x = (f(a), b)"),
        ("x = torch.cat([(a + b), c])", "x = torch.cat([(a + b), c])"),
        ("x = f(y, (a + b))", "x = f(y, a + b)"),
        ("x = f((a + b) * c, d)", "x = f((a + b) * c, d)"),
        ("x = f(((a + b)))", "x = f(a + b)"),
    ],
)
def test_parentheses_around_whole_arguments_are_left_out(line: str, expected: str) -> None:
    assert simplified(line) == expected
