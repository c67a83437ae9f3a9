"""Triton code snippets with their precedence, dtype and the tile axes along which they vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINE = 112
"""Maximum line length of generated calls and signatures, in characters."""

ATOM, UNARY, PRODUCT, SUM, BITS, COMPARE = 100, 80, 70, 60, 50, 40
"""Precedences, as in Python; only their order matters."""


@dataclass(frozen=True)
class Code:
    """An expression in a kernel."""

    text: str
    dtype: str
    """PyTorch name of the expression's dtype inside the kernel (16-bit floats are computed in float32)."""
    rows: bool = False
    """Whether it varies along the tile's rows."""
    cols: bool = False
    """Whether it varies along the tile's columns."""
    precedence: int = ATOM

    def at(self, precedence: int) -> str:
        """The text, in brackets if its precedence is lower than ``precedence``."""
        return self.text if self.precedence >= precedence else f"({self.text})"


def tuple_text(items: Sequence[str]) -> str:
    """A tuple of expressions as Python: ``(a,)``, ``(a, b)``."""
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def literal(value: object) -> str:
    """A Python number as Triton source."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        if value != value:
            return 'float("nan")'
        if value in (float("inf"), float("-inf")):
            return 'float("inf")' if value > 0 else '-float("inf")'
    return repr(value)


def filled(items: Sequence[str], indent: str) -> list[str]:
    """Format arguments on as few lines as possible, each with a trailing comma."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= LINE:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{indent}{item},")
    return lines


def filled_groups(first: Sequence[str], second: Sequence[str], indent: str) -> list[str]:
    """Format two groups of arguments as :func:`filled` does; the second begins a line, unless one line holds both."""
    together = filled([*first, *second], indent)
    return together if len(together) == 1 else [*filled(first, indent), *filled(second, indent)]


def joined(items: Sequence[str], separator: str, width: int = LINE) -> list[str]:
    """Join items to as few lines as possible, each of at most ``width`` characters."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(separator) + len(item) <= width:
            lines[-1] += separator + item
        else:
            lines.append(item)
    return lines


def call_text(function: str, arguments: Sequence[str], indent: str = "") -> str:
    """Format a call, on several lines if it is too long; ``indent`` is the indent of its statement."""
    one_line = f"{function}({', '.join(arguments)})"
    if len(indent) + len(one_line) <= LINE:
        return one_line
    return "\n".join([f"{function}(", *filled(arguments, f"{indent}    "), f"{indent})"])


def def_lines(name: str, parameters: Sequence[str], result: str = "") -> list[str]:
    """The ``def`` line or lines of a function: if one is too long, parameters with annotations or defaults begin a line."""
    arrow = f" -> {result}" if result else ""
    one_line = f"def {name}({', '.join(parameters)}){arrow}:"
    if len(one_line) <= LINE:
        return [one_line]
    plain = next((i for i, text in enumerate(parameters) if not text.isidentifier()), len(parameters))
    return [f"def {name}(", *filled_groups(parameters[:plain], parameters[plain:], "    "), f"){arrow}:"]


def blocks_text(size: str, block: int) -> str:
    """Number of blocks as Python for the launcher; avoids ``triton.cdiv``, which takes microseconds on the host.

    The text ends with a division: write further factors after it, not before.
    """
    count = size if size.isidentifier() else f"({size})"
    return count if block == 1 else f"({count} + {block - 1}) // {block}"


def next_power_of_2_text(size: str) -> str:
    """The least power of two that is at least a positive size, as Python for the launcher.

    Avoids ``triton.next_power_of_2``, which takes 2 us on the host.
    """
    return f"1 << ({size} - 1).bit_length()"


TRITON_DTYPES = {
    "float64": "tl.float64",
    "float32": "tl.float32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float8_e4m3fn": "tl.float8e4nv",
    "float8_e5m2": "tl.float8e5",
    "int64": "tl.int64",
    "int32": "tl.int32",
    "int16": "tl.int16",
    "int8": "tl.int8",
    "uint8": "tl.uint8",
    "bool": "tl.int1",
}
"""PyTorch dtype to Triton dtype."""
