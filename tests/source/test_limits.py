"""Texts that would take the parser or the analysis too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import MAX_COMMENTS, is_too_deep, parsable, parse

COMMENT = '# a comment with \'quotes\' and """ in it\n'


def names(text: str) -> list[str]:
    data = text.encode()
    return [item.target.qualname for item in Outliner("/m.py").outline(data, parse(data)).targets]


def test_of_a_long_run_of_comments_the_parser_gets_the_ends() -> None:
    text = (COMMENT * 3 * MAX_COMMENTS + "def f(x):\n    return x\n").encode()
    parsed = parsable(text)
    assert len(parsed) == len(text)
    assert parsed.count(b"#") == MAX_COMMENTS
    assert parsed.endswith(b'# a comment with \'quotes\' and """ in it\ndef f(x):\n    return x\n')
    assert names(text.decode()) == ["f"]


@pytest.mark.parametrize("quotes", ['"""', "'''"])
def test_lines_of_a_string_that_look_like_comments_are_not_shortened(quotes: str) -> None:
    lines = "# in the string\n" * 3 * MAX_COMMENTS
    text = f"x = {quotes}\n{lines}{quotes}\ndef f(x):\n    return x\n".encode()
    assert parsable(text) is text
    assert names(text.decode()) == ["f"]


@given(st.lists(st.sampled_from(["a", "#", '"', "'", "\\", "\n", "\r", "é", '"""']), max_size=40).map("".join))
def test_short_texts_are_parsed_as_they_are_except_for_single_carriage_returns(text: str) -> None:
    data = text.encode()
    assert parsable(data).decode() == text.replace("\r\n", "\0").replace("\r", "\n").replace("\0", "\r\n")


def test_a_statement_that_is_nested_too_deeply_has_no_targets_and_the_others_have_theirs() -> None:
    deep = f"def f(x):\n    return {'-' * 2000}x\n"
    assert is_too_deep(parse(deep.encode()))
    assert not is_too_deep(parse(f"x = {' + '.join('1' * 750)}\n".encode()))
    assert names(f"{deep}\n\ndef g(x):\n    return x\n") == ["g"]
