"""Syntax of a directive: splitting it into entries and parsing their values. Errors contain the line."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mtmc_lsp.core.dtypes import SHORT
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import ModuleForm, Target, TensorSpec
from mtmc_lsp.source.workload.value_syntax import OPENING, Value, parse_value

JAXTYPING = {
    "Float": "float32", "Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16",
    "Float8e4m3fn": "float8_e4m3fn", "Float8e5m2": "float8_e5m2",
    "Int": "int64", "Int64": "int64", "Int32": "int32", "Int16": "int16", "Int8": "int8", "UInt8": "uint8",
    "Integer": "int64", "Bool": "bool", "Shaped": "float32", "Num": "float32", "Inexact": "float32",
}  # fmt: skip
"""jaxtyping name to dtype."""

EXAMPLE = "Write `# mtmc: x=f32[64,1024] eps=1e-6`, with sizes as numbers, or as names such as B followed by `B=64`."
MODULE_DTYPES = ("f64", "f32", "f16", "bf16")
AUTOCAST_DTYPES = ("bfloat16", "float16")
MODES = {"eval": False, "train": True}
MODULE_EXAMPLE = f"Write module=bf16,eval: a dtype ({', '.join(MODULE_DTYPES)}), and eval or train."
CONTAINERS = (
    'Write a tuple as x=(f32[N],f32[N]), a dictionary as x={"a":f32[N],"n":2}, '
    "a dataclass or a named tuple as x=Config(w=f32[N],n=2)."
)
TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\](?:\{(?P<stride>[^{}]*)\})?(?:@(?P<low>\S+?)\.\.(?P<high>\S+))?"
)
DECIMAL = re.compile(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Entry:
    """One ``name=value`` of a directive, as written."""

    name: str
    value: str
    line: int
    in_init: bool = False
    """Whether it is after ``init:``."""

    @cached_property
    def content(self) -> Value:
        """The value, taken apart if it is a container."""
        return parse_value(self.name, self.value)

    @property
    def leaves(self) -> tuple[Entry, ...]:
        """The tensors and constants in the value, with their paths as names; the entry itself if it is no container."""
        return tuple(replace(self, name=leaf.path, value=leaf.text) for leaf in self.content.leaves)

    @property
    def is_tensor(self) -> bool:
        """Whether the value describes a tensor."""
        return self.content.is_tensor

    @property
    def has_tensors(self) -> bool:
        """Whether the value describes a tensor or a container with a tensor in it."""
        return any(leaf.is_tensor for leaf in self.content.leaves)

    @property
    def names(self) -> frozenset[str]:
        """Names used in the value."""
        return frozenset(re.findall(r"\b[A-Za-z_]\w*", re.sub(r"\"[^\"]*\"|'[^']*'", "", self.value)))


class Reader:
    """Parses the entries of one file's directives. Errors contain the file and the line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def error(self, message: str, line: int, remedy: str = EXAMPLE) -> RequestError:
        """The error for an invalid directive."""
        return RequestError(f"in the mtmc directive: {message}", where=Location(self.path, line), remedy=remedy)

    def entries(self, comments: list[tuple[int, str]]) -> tuple[Entry, ...]:
        """Parse the entries of directive lines; ``init:`` applies to the rest of its line."""
        entries_by_name: dict[tuple[str, bool], Entry] = {}
        for line, text in comments:
            in_init = False
            for part in self._split(text, line):
                if part == "init:":
                    in_init = True
                    continue
                name, equals, value = part.partition("=")
                if not equals or not name.isidentifier() or not value:
                    raise self.error(f"cannot read {part!r}", line)
                if (name, in_init) in entries_by_name:
                    raise self.error(f"{name!r} is set twice", line, "Remove one of them.")
                entry = Entry(name, value, line, in_init)
                try:
                    entry.content  # noqa: B018 - reports a value that cannot be read
                except ValueError as problem:
                    raise self.error(f"cannot read {name}={value}: {problem}", line, CONTAINERS) from None
                entries_by_name[name, in_init] = entry
        return tuple(entries_by_name.values())

    def _split(self, text: str, line: int) -> list[str]:
        """Split at spaces outside brackets and quotes."""
        parts, current, closing_brackets, quote = [], "", "", ""
        for character in text:
            if quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character in OPENING:
                closing_brackets += OPENING[character]
            elif closing_brackets and character == closing_brackets[-1]:
                closing_brackets = closing_brackets[:-1]
            if character.isspace() and not closing_brackets and not quote:
                parts.append(current)
                current = ""
            else:
                current += character
        if closing_brackets or quote:
            missing = quote or closing_brackets[-1]
            raise self.error(f"{current.split()[0]!r} is not closed", line, f"Add the missing {missing} after it.")
        return [part for part in [*parts, current] if part]

    def tensor(self, entry: Entry) -> TensorSpec:
        """The tensor of an entry such as ``x=f32[B,64]{1,B}``, without its value range."""
        match = TENSOR.fullmatch(entry.value)
        if match is None:
            raise self.error(
                f"cannot read the tensor {entry.name}={entry.value}",
                entry.line,
                "Write x=f32[64,1024], optionally followed by strides such as {1,64} and a value range such as @0..31.",
            )
        dtype = SHORT.get(match["dtype"]) or JAXTYPING.get(match["dtype"])
        if dtype is None:
            raise self.error(f"unknown dtype {match['dtype']!r}", entry.line, f"Available dtypes: {', '.join(SHORT)}.")
        shape = self._sizes(match["shape"], entry.line)
        stride = self._sizes(match["stride"], entry.line) if match["stride"] is not None else None
        if stride is not None and len(stride) != len(shape):
            raise self.error(
                f"{entry.name} has {len(shape)} sizes and {len(stride)} strides",
                entry.line,
                "Write one stride per size.",
            )
        return TensorSpec(shape, dtype, stride)

    def _sizes(self, text: str, line: int) -> tuple[Size, ...]:
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        try:
            return tuple(Size.parse(item) for item in items)
        except (ValueError, SyntaxError, ZeroDivisionError):
            raise self.error(
                f"cannot read the sizes [{text}]",
                line,
                "Write numbers, names and + - * //, separated by commas: [B,2*D].",
            ) from None

    def with_range(self, entry: Entry, spec: TensorSpec, sizes: Mapping[str, int]) -> TensorSpec:
        """``spec`` with the inclusive value range ``@low..high`` of the entry, if it has one."""
        match = TENSOR.fullmatch(entry.value)
        if match is None or match["low"] is None:
            return spec
        text = f"{match['low']}..{match['high']}"
        try:
            low, high = (
                float(bound) if DECIMAL.fullmatch(bound) else float(Size.parse(bound).value(sizes))
                for bound in (match["low"], match["high"])
            )
        except (ValueError, SyntaxError, KeyError, ZeroDivisionError):
            remedy = "Use numbers or named sizes with a value, as in @0..V-1."
            raise self.error(f"cannot read the range {text}", entry.line, remedy) from None
        if low > high:
            raise self.error(
                f"the range {text} is empty: it goes from {low:g} to {high:g}", entry.line, "Swap the bounds."
            )
        named = not DECIMAL.fullmatch(match["high"]) and next(Size.parse(match["high"]).symbols(), None) is not None
        return replace(spec, low=low, high=high, high_size=Size.parse(match["high"]) if named else None)

    def constant(self, entry: Entry, sizes: Mapping[str, int]) -> object:
        """The number, string, bool, ``None`` or list in the value; arithmetic over named sizes is evaluated."""
        try:
            value = ast.literal_eval(entry.value)
        except (ValueError, SyntaxError):
            value = self._arithmetic(entry, sizes)
        if isinstance(value, tuple):
            value = list(value)
        if not _is_constant(value):
            raise self.error(
                f"{entry.name} cannot be {entry.value}",
                entry.line,
                "Use a number, True, False, None, a string, or a tuple, list, dictionary or class of these.",
            )
        return value

    def module_form(self, entry: Entry | None, target: Target) -> ModuleForm:
        """The dtype and mode in an entry such as ``module=bf16,eval``; an open form without an entry."""
        if entry is None:
            return ModuleForm()
        if not target.class_name:
            raise self.error(f"{target.qualname} has no module", entry.line, f"Remove module={entry.value}.")
        words = entry.value.split(",")
        dtypes = [SHORT.get(word, word) for word in words if word not in MODES]
        modes = [MODES[word] for word in words if word in MODES]
        unknown = [dtype for dtype in dtypes if dtype not in [SHORT[name] for name in MODULE_DTYPES]]
        if unknown:
            raise self.error(f"unknown word {unknown[0]!r} in module={entry.value}", entry.line, MODULE_EXAMPLE)
        if len(dtypes) > 1 or len(modes) > 1:
            raise self.error(f"module={entry.value} contradicts itself", entry.line, MODULE_EXAMPLE)
        return ModuleForm(dtypes[0] if dtypes else "", modes[0] if modes else None)

    def autocast(self, entry: Entry | None) -> str:
        """The dtype in an entry such as ``autocast=bf16``; empty without an entry."""
        if entry is None:
            return ""
        dtype = SHORT.get(entry.value, entry.value)
        if dtype not in AUTOCAST_DTYPES:
            raise self.error(
                f"autocast must be bf16 or f16, not {entry.value!r}", entry.line, "Write autocast=bf16 or autocast=f16."
            )
        return dtype

    def _arithmetic(self, entry: Entry, sizes: Mapping[str, int]) -> int:
        try:
            return Size.parse(entry.value).value(sizes)
        except (ValueError, SyntaxError, KeyError, ZeroDivisionError):
            raise self.error(
                f"cannot read the value {entry.value!r}",
                entry.line,
                f"Quote a string, as in {entry.name}='{entry.value}'.",
            ) from None


def _is_constant(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_constant(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
