"""The statements of a function by number, in the user's file and in versions of it with generated dispatch statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

DISPATCH = "# mtmc: dispatch"
"""Marks the first line of a dispatch statement, as :mod:`mtmc_lsp.source.compose` writes it."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_at(text: str, name: str, line: int) -> Function | None:
    """The function of this name that starts, decorators included, in this 1-based line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            if line in (first, node.lineno):
                return node
    return None


def suites_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The suites directly inside a compound statement, without those of functions and classes."""
    if isinstance(statement, SCOPES):
        return
    for _, value in ast.iter_fields(statement):
        if isinstance(value, list) and value:
            if isinstance(value[0], ast.stmt):
                yield value
            elif isinstance(value[0], (ast.ExceptHandler, ast.match_case)):
                yield from (item.body for item in value)


class Statements:
    """The numbered statements of a function."""

    def __init__(self, function: Function, lines: Sequence[str]) -> None:
        """Number the statements.

        Args:
            lines: of the file.
        """
        self._lines = lines
        self.all: list[ast.stmt] = []
        """Each statement at its number."""
        self.numbers: dict[ast.stmt, int] = {}
        self._raw: list[list[ast.stmt]] = []
        self._number(function.body)

    def _number(self, suite: list[ast.stmt]) -> None:
        self._raw.append(suite)
        for statement in self._plain(suite):
            self.numbers[statement] = len(self.all)
            self.all.append(statement)
            for inner in suites_of(statement):
                self._number(inner)

    def _is_dispatch(self, statement: ast.stmt) -> bool:
        return isinstance(statement, ast.If) and DISPATCH in self._lines[statement.lineno - 1]

    def _plain(self, suite: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """The user's statements of a suite."""
        for statement in suite:
            if isinstance(statement, ast.If) and self._is_dispatch(statement):
                yield from self._plain(statement.orelse)
            else:
                yield statement

    def run(self, first: int, last: int) -> list[ast.stmt]:
        """The statements with the numbers ``first`` to ``last``, which are in one suite, with the dispatch for them."""
        for suite in self._raw:
            chosen: list[ast.stmt] = []
            dispatch: list[ast.stmt] = []
            for statement in suite:
                numbers = [self.numbers[item] for item in self._plain([statement])]
                if not numbers:
                    dispatch = [statement]
                    continue
                if all(first <= number <= last for number in numbers):
                    chosen += [*(dispatch if numbers[0] == first else ()), statement]
                dispatch = []
            if chosen and first in {self.numbers[item] for item in self._plain(chosen)}:
                return chosen
        raise ValueError(f"there are no statements {first} to {last}")
