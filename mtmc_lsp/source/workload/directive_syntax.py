"""The words of a directive: how they are told apart and read. One that cannot be read is an error with its line."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtmc_lsp.core.dtypes import SHORT
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import TensorSpec

JAXTYPING = {
    "Float": "float32", "Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16",
    "Float8e4m3fn": "float8_e4m3fn", "Float8e5m2": "float8_e5m2",
    "Int": "int64", "Int64": "int64", "Int32": "int32", "Int16": "int16", "Int8": "int8", "UInt8": "uint8",
    "Integer": "int64", "Bool": "bool", "Shaped": "float32", "Num": "float32", "Inexact": "float32",
}  # fmt: skip
"""jaxtyping's names to dtypes."""

EXAMPLE = "Write `# mtmc: x=f32[64,1024] eps=1e-6`, sizes as numbers or as names such as B with `B=64` behind."
TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\](?:\{(?P<stride>[^{}]*)\})?(?:@(?P<low>\S+?)\.\.(?P<high>\S+))?"
)
DECIMAL = re.compile(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
BRACKETS = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True)
class Word:
    """``name=value``, as written."""

    name: str
    value: str
    line: int
    in_init: bool = False
    """Whether it stands behind ``init:``."""

    @property
    def is_tensor(self) -> bool:
        """Whether it means to describe a tensor."""
        return re.match(r"\w+\[", self.value) is not None

    @property
    def names(self) -> frozenset[str]:
        """Names that the value speaks of."""
        return frozenset(re.findall(r"\b[A-Za-z_]\w*", re.sub(r"\"[^\"]*\"|'[^']*'", "", self.value)))


class Reader:
    """Reads words of one file; its errors name that file and the word's line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def bad(self, message: str, line: int, remedy: str = EXAMPLE) -> RequestError:
        """The error for a directive that cannot be read."""
        return RequestError(f"in the mtmc directive: {message}", where=Location(self.path, line), remedy=remedy)

    def words(self, comments: list[tuple[int, str]]) -> tuple[Word, ...]:
        """The words of directive lines; ``init:`` holds to the end of its line."""
        found: dict[tuple[str, bool], Word] = {}
        for line, text in comments:
            in_init = False
            for part in self._split(text, line):
                if part == "init:":
                    in_init = True
                    continue
                name, equals, value = part.partition("=")
                if not equals or not name.isidentifier() or not value:
                    raise self.bad(f"cannot read {part!r}", line)
                if (name, in_init) in found:
                    raise self.bad(f"{name!r} is given twice", line, "Keep one of the two.")
                found[name, in_init] = Word(name, value, line, in_init)
        return tuple(found.values())

    def _split(self, text: str, line: int) -> list[str]:
        """Parts between spaces, where brackets and quotes hold together."""
        parts, current, open_, quote = [], "", "", ""
        for character in text:
            if quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in BRACKETS:
                open_ += BRACKETS[character]
            elif open_ and character == open_[-1]:
                open_ = open_[:-1]
            if character.isspace() and not open_ and not quote:
                parts.append(current)
                current = ""
            else:
                current += character
        if open_ or quote:
            missing = quote or open_[-1]
            raise self.bad(f"{current.split()[0]!r} is not closed", line, f"Add the missing {missing} behind it.")
        return [part for part in [*parts, current] if part]

    def tensor(self, word: Word) -> TensorSpec:
        """The tensor of ``x=f32[B,64]{1,B}``, its range left out."""
        match = TENSOR.fullmatch(word.value)
        if match is None:
            raise self.bad(
                f"cannot read the tensor {word.name}={word.value}",
                word.line,
                "Write x=f32[64,1024], with strides as in {1,64} and a range as in @0..31 behind it.",
            )
        dtype = SHORT.get(match["dtype"]) or JAXTYPING.get(match["dtype"])
        if dtype is None:
            raise self.bad(f"no dtype {match['dtype']!r}", word.line, f"There are {', '.join(SHORT)}.")
        shape = self._sizes(match["shape"], word.line)
        stride = self._sizes(match["stride"], word.line) if match["stride"] is not None else None
        if stride is not None and len(stride) != len(shape):
            raise self.bad(
                f"{word.name} has {len(shape)} sizes and {len(stride)} strides", word.line, "Give one stride per size."
            )
        return TensorSpec(shape, dtype, stride)

    def _sizes(self, text: str, line: int) -> tuple[Size, ...]:
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        try:
            return tuple(Size.parse(item) for item in items)
        except (ValueError, SyntaxError, ZeroDivisionError):
            raise self.bad(
                f"cannot read the sizes [{text}]", line, "Write numbers, names and + - * // between commas: [B,2*D]."
            ) from None

    def ranged(self, word: Word, spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
        """``spec`` with the range of ``@low..high``, if the word has one; both ends are included."""
        match = TENSOR.fullmatch(word.value)
        if match is None or match["low"] is None:
            return spec
        text = f"{match['low']}..{match['high']}"
        try:
            low, high = (
                float(bound) if DECIMAL.fullmatch(bound) else float(Size.parse(bound).value(sizes))
                for bound in (match["low"], match["high"])
            )
        except (ValueError, SyntaxError, KeyError, ZeroDivisionError):
            remedy = "Write numbers or named sizes that have a value, as in @0..V-1."
            raise self.bad(f"cannot read the range {text}", word.line, remedy) from None
        if low > high:
            raise self.bad(f"the range {text} is empty: it goes from {low:g} to {high:g}", word.line, "Swap the ends.")
        named = not DECIMAL.fullmatch(match["high"]) and next(Size.parse(match["high"]).symbols(), None) is not None
        return replace(spec, low=low, high=high, high_size=Size.parse(match["high"]) if named else None)

    def constant(self, word: Word, sizes: Mapping[str, int]) -> object:
        """The number, text, ``None`` or list that the word gives; arithmetic over named sizes is worked out."""
        try:
            value = ast.literal_eval(word.value)
        except (ValueError, SyntaxError):
            value = self._arithmetic(word, sizes)
        if isinstance(value, tuple):
            value = list(value)
        if not _is_constant(value):
            raise self.bad(
                f"{word.name} cannot be {word.value}",
                word.line,
                "It can be a number, True, False, None, text or a list.",
            )
        return value

    def _arithmetic(self, word: Word, sizes: Mapping[str, int]) -> int:
        try:
            return Size.parse(word.value).value(sizes)
        except (ValueError, SyntaxError, KeyError, ZeroDivisionError):
            raise self.bad(
                f"cannot read the value {word.value!r}", word.line, f"Quote text, as in {word.name}='{word.value}'."
            ) from None


def _is_constant(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_constant(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
