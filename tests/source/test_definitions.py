"""The definitions of a file: what each name is bound to, and what that reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mtmc_lsp.core.source_digest import source_digest
from mtmc_lsp.source import dependencies
from mtmc_lsp.source.dependencies import Definitions, definitions_in

TEXT = '''\
import math as m
A = 1; B = (2,
    m.pi)
if A:
    C = 3
    def chosen(x): return x * C


@decorated(A)
class Block(Base):
    """A docstring
that is not indented."""
    gain: float = 1.5; bias = "é"; offset = B
    text = """
not indented
"""

    @staticmethod
    def scaled(
        x, by=A,
    ):
        return x * by * OTHER
'''


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_each_definition_has_the_digest_of_its_statement(newline: str) -> None:
    definitions = definitions_in(TEXT.replace("\n", newline).encode())
    tree = ast.parse(TEXT)
    condition, block = tree.body[3], tree.body[4]
    assert isinstance(block, ast.ClassDef)
    expected = {
        "A": tree.body[1],
        "B": tree.body[2],
        "C": condition,
        "chosen": condition,
        "Block": block,
        "Block.gain": block.body[1],
        "Block.bias": block.body[2],
        "Block.offset": block.body[3],
        "Block.text": block.body[4],
        "Block.scaled": block.body[5],
    }
    assert {name: definitions.digest(name) for name in definitions.by_name} == {
        "m": "math:",
        **{name: source_digest(ast.unparse(node)) for name, node in expected.items()},
    }


def test_a_definition_knows_its_line_its_value_and_the_names_that_it_reads() -> None:
    definitions = definitions_in(TEXT.encode())

    def described(name: str) -> tuple[int, str, set[str]]:
        (item,) = definitions.by_name[name]
        return item.line, item.value, set(item.reads)

    assert described("B") == (2, "(2, m.pi)", {"m"})
    assert described("C") == (5, "", {"A", "C", "x"})
    assert described("Block.bias") == (13, "'é'", set())
    assert described("Block.scaled") == (18, "", {"staticmethod", "A", "OTHER"})


def test_definitions_that_nothing_needs_are_not_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested = []

    def counted(source: str) -> str:
        digested.append(source)
        return source_digest(source)

    monkeypatch.setattr(dependencies, "source_digest", counted)
    file = tmp_path / "large.py"
    file.write_text("".join(f"def function_{i}(x):\n    return x * {i} + 12345\n" for i in range(50)))
    definitions = dependencies.read_definitions(str(file))
    assert isinstance(definitions, Definitions)
    assert definitions.digest("function_7")
    assert digested == ["def function_7(x):\n    return x * 7 + 12345"]
