"""Wrap long lines of generated Python, much as ruff and black do: at commas, then before operators, inside brackets."""

from __future__ import annotations

import ast
import io
import keyword
import re
import textwrap
import tokenize
from dataclasses import dataclass
from functools import cached_property

MAX_LINE = 120
"""Maximum length of a generated line, in characters."""
STEP = "    "
_TOKEN = re.compile(
    r"""(?P<string>[rRbBuUfF]{0,2}(?:\"\"\".*?\"\"\"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'))
    |(?P<comment>\#.*)|(?P<number>\d[\d.]*(?:[eE][+-]?\d+)?\w*)|(?P<word>\w+)|(?P<space>\s+)|(?P<op>:=|->|\*\*|//|<<|>>|[<>=!]=|.)""",
    re.VERBOSE,
)
_OPEN, _CLOSE = "([{", ")]}"
COMPREHENSION = ("for", "async")
_SPLITS = (
    COMPREHENSION,
    (",",),
    ("if", "else"),
    ("or",),
    ("and",),
    ("in", "not", "is", "<", ">", "==", "!=", "<=", ">="),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "//", "%", "@"),
)
"""Where a line is split, the best first: after a comma, before any other."""
_PREFIXES = ("return", "if", "elif", "while")
"""Keywords whose expression may be put in brackets."""
_F_STRING_START: int | None = getattr(tokenize, "FSTRING_START", None)
_F_STRING_END: int | None = getattr(tokenize, "FSTRING_END", None)
"""From Python 3.12 on, an f-string is several tokens. Before, it is one of type ``STRING``."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    depth: int
    """Number of brackets of the same text around it."""

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class _Piece:
    """Code without line breaks."""

    text: str

    @cached_property
    def tokens(self) -> list[_Token]:
        tokens, depth = [], 0
        for match in _TOKEN.finditer(self.text):
            kind, text = match.lastgroup or "", match[0]
            depth -= text in _CLOSE
            if kind != "space":
                tokens.append(_Token(kind, text, match.start(), depth))
            depth += text in _OPEN
        return tokens

    @cached_property
    def parts(self) -> list[str]:
        """The text split at its best operators outside brackets; the whole text if there are none."""
        if any(token.text == "lambda" and not token.depth for token in self.tokens):
            # Its commas separate parameters.
            return [self.text]
        for words in _SPLITS:
            cuts = [cut for i in range(1, len(self.tokens)) if (cut := self._cut(i, words))]
            if words == COMPREHENSION and cuts:
                # The condition of a comprehension is on its own line.
                cuts = [cut for i in range(1, len(self.tokens)) if (cut := self._cut(i, (*words, "if")))]
            if cuts:
                return [self.text[a:b].strip() for a, b in zip([0, *cuts], [*cuts, len(self.text)], strict=True)]
        return [self.text]

    def _cut(self, i: int, words: tuple[str, ...]) -> int:
        """Where to split at the token with this index; 0 if it is none of the words, or no operator between operands."""
        before, token, after = self.tokens[i - 1], self.tokens[i], self.tokens[i + 1 : i + 2]
        if token.depth != 0 or token.text not in words:
            return 0
        if token.text == ",":
            return token.end if after else 0
        if token.text == "not":
            return token.start if after and after[0].text == "in" else 0
        if token.text in ("in", "for"):
            return 0 if before.text in ("not", "async") else token.start
        if token.text in ("+", "-", "*"):
            is_operand = before.kind in ("string", "number") or before.text in _CLOSE
            is_operand |= before.kind == "word" and not keyword.iskeyword(before.text)
            return token.start if is_operand else 0
        return token.start

    @cached_property
    def has_commas(self) -> bool:
        """Whether it is several items, separated by commas."""
        return len(self.parts) > 1 and self.parts[0].endswith(",")

    @cached_property
    def brackets(self) -> tuple[int, int] | None:
        """Offsets of the outermost brackets with the longest content: after the opening one, and of the closing one."""
        pairs, opened = [], []
        for token in self.tokens:
            if token.text in _OPEN:
                opened.append(token)
            elif token.text in _CLOSE and opened:
                start = opened.pop()
                if not opened and token.start > start.end:
                    pairs.append((start.end, token.start))
        return max(pairs, key=lambda pair: pair[1] - pair[0], default=None)


def wrapped(source: str, limit: int = MAX_LINE) -> str:
    """``source`` with all lines wrapped that are longer than ``limit`` characters. Its meaning stays the same.

    A comment at the end of a long line goes to the first of its lines.
    """
    lines = source.split("\n")
    if all(len(line) <= limit for line in lines):
        return source
    depth, docstrings, strings = _layout(source)
    result: list[str] = []
    for row, line in enumerate(lines, 1):
        code = line.lstrip(" ")
        indent = line[: len(line) - len(code)]
        if len(line) <= limit or row in strings:
            result.append(line)
        elif row in docstrings or code.startswith("#"):
            following = indent if row in docstrings else f"{indent}# "
            result += textwrap.wrap(
                code,
                limit,
                initial_indent=indent,
                subsequent_indent=following,
                break_on_hyphens=False,
                break_long_words=False,
            )
        else:
            result += _split(code, indent, limit, is_inside=depth.get(row, 0) > 0)
    return "\n".join(result)


def _layout(source: str) -> tuple[dict[int, int], set[int], set[int]]:
    """The number of open brackets at the start of each row, the rows of docstrings, and those of other multi-line strings."""
    depth: dict[int, int] = {}
    docstrings: set[int] = set()
    strings: set[int] = set()
    level, previous = 0, tokenize.NEWLINE
    f_strings: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth.setdefault(token.start[0], level)
        level += (token.type == tokenize.OP) * ((token.string in _OPEN) - (token.string in _CLOSE))
        rows = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT) and '"""' in token.string:
            docstrings.update(rows)
        elif token.type == tokenize.STRING and len(rows) > 1:
            strings.update(rows)
        elif token.type == _F_STRING_START:
            f_strings.append(token.start[0])
        elif token.type == _F_STRING_END and (start := f_strings.pop()) < token.end[0]:
            strings.update(range(start, token.end[0] + 1))
        if token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.DEDENT):
            previous = token.type
    return depth, docstrings, strings


def _split(code: str, indent: str, limit: int, *, is_inside: bool) -> list[str]:
    """The lines of a line of code.

    Args:
        is_inside: whether it is inside brackets of earlier lines, so that it may be split anywhere.
    """
    piece = _Piece(code)
    if piece.tokens and piece.tokens[-1].kind == "comment":
        comment = piece.tokens[-1]
        first, *rest = _split(
            code[: comment.start].rstrip(), indent, limit - len(comment.text) - 2, is_inside=is_inside
        )
        return [f"{first}  {comment.text}", *rest]
    if len(indent) + len(code) <= limit:
        return [f"{indent}{code}"]
    if is_inside and len(piece.parts) > 1:
        return [line for part in piece.parts for line in _split(part, indent, limit, is_inside=True)]
    if not is_inside:
        head, expression, tail = _expression(piece)
        if expression and (len(_Piece(expression).parts) > 1 or _Piece(expression).brackets is None):
            return [f"{indent}{head}(", *_inside(expression, indent + STEP, limit), f"{indent}){tail}"]
    if piece.brackets is not None:
        start, end = piece.brackets
        inner = _inside(code[start:end], indent + STEP, limit)
        return [f"{indent}{code[:start]}", *inner, *_split(code[end:], indent, limit, is_inside=is_inside)]
    return [f"{indent}{part}" for part in (_split_string(piece, limit - len(indent)) if is_inside else [code])]


def _inside(code: str, indent: str, limit: int) -> list[str]:
    """The lines of the content of brackets."""
    if len(indent) + len(code) <= limit:
        return [f"{indent}{code}"]
    piece = _Piece(code)
    parts = piece.parts
    if piece.has_commas and not parts[-1].endswith(","):
        parts = [*parts[:-1], f"{parts[-1]},"]
    return [line for part in parts for line in _split(part, indent, limit, is_inside=True)]


def _expression(piece: _Piece) -> tuple[str, str, str]:
    """A statement as the text before its expression, the expression, and the text after it; empty for other statements."""
    text, tokens = piece.text, piece.tokens
    if sum((token.text in _OPEN) - (token.text in _CLOSE) for token in tokens):
        # It continues on the next line.
        return "", "", ""
    if tokens and tokens[0].text in _PREFIXES:
        start = tokens[0].end + 1
        tail = ":" if text.endswith(":") else ""
        return text[:start], text[start : len(text) - len(tail)], tail
    equals = [token for token in tokens if token.depth == 0 and token.text == "="]
    if not equals:
        return "", "", ""
    start = equals[-1].end + 1
    return text[:start], text[start:], ""


def _split_string(piece: _Piece, width: int) -> list[str]:
    """Split a string that is too long for a line into several, which Python joins; other code stays as it is."""
    longest = max(piece.tokens, key=lambda token: len(token.text), default=_Token("", "", 0, 0))
    if longest.kind != "string" or longest.text[0] not in "\"'" or len(longest.text) + longest.start <= width // 2:
        return [piece.text]
    before, after = piece.text[: longest.start], piece.text[longest.end :]
    value = str(ast.literal_eval(longest.text))
    size = max(width - len(before) - len(after) - 2, 1)
    chunks = [repr(value[i : i + size]) for i in range(0, len(value), size)]
    return [f"{before}{chunks[0]}", *chunks[1:-1], f"{chunks[-1]}{after}"] if len(chunks) > 1 else [piece.text]
