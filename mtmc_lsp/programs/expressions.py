"""Parentheses of Python expressions that are put together from parts."""

from __future__ import annotations

from collections.abc import Iterator

OPENING, CLOSING = "([{", ")]}"


def atom(text: str) -> str:
    """The expression as an operand: in parentheses unless it is a name, a call or an item."""
    bare = "".join(character for character, depth in _with_depth(text) if depth == 0)
    is_operand = not any(character in " -*@~" for character in bare)
    return text if is_operand else f"({text})"


def simplified(line: str) -> str:
    """The line without parentheses around a whole argument, or around what follows ``=`` or ``return``."""
    position = 0
    while (position := line.find("(", position)) >= 0:
        end = _closing(line, position)
        before, after = line[:position], line[end + 1 : end + 2]
        is_whole = before.endswith(("(", ", ")) and after in (",", ")") and not _is_tuple_item(line, position)
        is_statement = before.endswith((" = ", "return ")) and not after
        inner = line[position + 1 : end]
        if (is_whole or is_statement) and not _has_comma(inner):
            line = f"{before}{inner}{line[end + 1 :]}"
        else:
            position += 1
    return line


def _is_tuple_item(line: str, position: int) -> bool:
    """Whether the bracket around the position belongs to no call, so that parentheses may tell a tuple from its item."""
    depth = 0
    for index in range(position - 1, -1, -1):
        if line[index] in CLOSING:
            depth += 1
        elif line[index] in OPENING:
            if depth == 0:
                return line[index] != "(" or not (index and (line[index - 1].isalnum() or line[index - 1] in "_])"))
            depth -= 1
    return True


def _has_comma(text: str) -> bool:
    return not text or any(character == "," and depth == 0 for character, depth in _with_depth(text))


def _closing(text: str, position: int) -> int:
    depth = 0
    for index in range(position, len(text)):
        depth += (text[index] in OPENING) - (text[index] in CLOSING)
        if depth == 0:
            return index
    raise ValueError(f"no closing parenthesis: {text}")


def _with_depth(text: str) -> Iterator[tuple[str, int]]:
    depth = 0
    for character in text:
        depth -= character in CLOSING
        yield character, depth + (character in CLOSING)
        depth += character in OPENING
