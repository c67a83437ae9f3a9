"""The server's text is the client's, whatever is typed, and positions mean the same on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types as lsp

from mtmc_lsp.server.edits import changed_lines
from mtmc_lsp.server.text import Text
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse

PIECES = [
    "a",
    "é",
    "漢",
    "😀",
    "\n",
    "\r\n",
    "\r",
    "\t",
    "\x0c",
    "\u2028",
    "def f(x):\n    return x\n",
    "(",
    '"""',
    "#",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
ENCODINGS = st.sampled_from(["utf-8", "utf-16", "utf-32"])


def units(text: str, encoding: str) -> int:
    """The length of a text as a client counts it."""
    width = {"utf-8": 1, "utf-16": 2, "utf-32": 4}[encoding]
    return len(text.encode({"utf-8": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}[encoding])) // width


def client_position(text: str, at: int, encoding: str) -> lsp.Position:
    """Where a client says that a character is: lines end at ``\\n``, ``\\r\\n`` and ``\\r``, and nowhere else."""
    before = text[:at].replace("\r\n", "\n").replace("\r", "\n")
    return lsp.Position(before.count("\n"), units(before.rpartition("\n")[2], encoding))


def splits(text: str) -> list[int]:
    """Places between characters; a line ending is one."""
    return [at for at in range(len(text) + 1) if not (text[at - 1 : at] == "\r" and text[at : at + 1] == "\n")]


@settings(max_examples=300, deadline=None)
@given(st.data(), TEXTS, ENCODINGS)
def test_edits_give_the_clients_text_and_the_tree_of_a_fresh_parse(
    data: st.DataObject, text: str, encoding: str
) -> None:
    ours = Text(text, encoding)
    outliner = Outliner("/m.py")
    for _ in range(4):
        start, end = sorted(data.draw(st.tuples(*[st.sampled_from(splits(text))] * 2)))
        new = data.draw(TEXTS)
        range_ = lsp.Range(client_position(text, start, encoding), client_position(text, end, encoding))
        ours.replace(range_, new)
        text = text[:start] + new + text[end:]
        assert str(ours) == text
        assert ours.line_count == Text(text, encoding).line_count
        assert str(ours.root) == str(parse(text.encode()))
        fresh = Outliner("/m.py").outline(ours.data, parse(ours.data))
        assert outliner.outline(ours.data, ours.root).targets == fresh.targets


@given(st.data(), TEXTS, ENCODINGS)
def test_positions_go_there_and_back(data: st.DataObject, text: str, encoding: str) -> None:
    ours = Text(text, encoding)
    at = data.draw(st.sampled_from(splits(text)))
    position = client_position(text, at, encoding)
    offset = ours.offset(position)
    assert ours.data[:offset].decode() == text[:at]
    assert ours.position(offset) == position


def test_positions_outside_the_text_are_its_nearest() -> None:
    text = Text("ab\ncd", "utf-16")
    assert text.offset(lsp.Position(0, 99)) == 2
    assert text.offset(lsp.Position(9, 0)) == 5
    assert text.line(9) == b""


def test_half_a_surrogate_pair_comes_back_as_it_was() -> None:
    assert str(Text("x = '\ud83d'", "utf-16")) == "x = '\ud83d'"


@pytest.mark.parametrize(("encoding", "inside"), [("utf-8", 1), ("utf-8", 2), ("utf-8", 3), ("utf-16", 1)])
def test_a_position_inside_a_character_is_that_of_the_character(encoding: str, inside: int) -> None:
    text = Text("é😀x", encoding)
    start = text.position(len("é".encode()))
    within = lsp.Position(0, start.character + inside)
    assert text.offset(within) == len("é".encode())
    text.replace(lsp.Range(within, within), "y")
    assert str(text) == "éy😀x"


LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"\n", b"c"]), max_size=14)


@given(LINES, LINES)
def test_changed_lines_turn_one_text_into_the_other_with_as_few_lines_as_possible(
    old: list[bytes], new: list[bytes]
) -> None:
    ranges = changed_lines(old, new)
    result, lengths = list(old), [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for a, b, c, d in reversed(ranges):
        result[a:b] = new[c:d]
    assert result == new
    # The longest common subsequence, by its textbook recurrence.
    for i, one in enumerate(old, 1):
        for j, other in enumerate(new, 1):
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if one == other else max(lengths[i - 1][j], lengths[i][j - 1])
    assert sum(b - a for a, b, _, _ in ranges) == len(old) - lengths[-1][-1]


def test_too_many_changed_lines_are_one_range() -> None:
    old, new = [b"%d" % number for number in range(2000)], [b"x%d" % number for number in range(2000)]
    assert changed_lines(old, new) == [(0, 2000, 0, 2000)]
